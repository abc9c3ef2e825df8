"""Check a model by running it, its weights, and the batches of its batch normalisation."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from utils.config import require
from utils.data import InputSpec, Plan
from utils.errors import UserError, one_line
from utils.models.layers import main_output, restored_buffers
from utils.models.sharded import local_shard
from utils.settings.models import ModelSettings

# smaller images are enlarged to it; 32 for other models
MINIMUM_SIZE = {"mnist_cnn": 28, "mlp": 1, "fastnet": 28, "inception_v3": 299}


def check_output(model: nn.Module, config: ModelSettings, spec: InputSpec, classes: int) -> None:
    """Run the model on images of training and of evaluation, and let it accept an empty batch,
    which a rank without samples computes. In evaluation mode, it then returns logits alone.

    Raises UserError for a model that does not take these images or has other outputs.
    """
    name = config.model
    other = spec.for_evaluation()
    usual = MINIMUM_SIZE.get(name, 224)
    if name.startswith("timm/"):
        from utils.models.published import timm_weights

        usual = cfg.input_size[1] if (cfg := timm_weights(name)) else usual
    tries = [(spec, count, f"try --image_size {usual}") for count in (1, 2)]
    tries += [(other, 1, "leave out --eval_size")] * (other.size != spec.size)
    # ranks share batch statistics, so all of them must be in training mode
    tries += [(spec, 0, "leave out --sync_batchnorm")] * config.sync_batchnorm
    for each, count, fix in tries:
        try:
            model.train(count == 2)  # some models have more layers in training
            with torch.no_grad(), restored_buffers(model):
                logits = main_output(model(torch.zeros(count, each.channels, *each.size)))
        except (RuntimeError, AssertionError, ValueError) as error:
            what = "an empty batch of " * (count == 0)
            what += f"{each.height}x{each.width}x{each.channels} images"
            problem = f"{name} does not accept {what} ({one_line(error)[:100]})"
            raise UserError(problem, f"{fix}, or use another --model or --model_args") from error
        found = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        wanted = [count, classes]
        problem = f"{name} returns {found} for {count} images, not one score per class, {wanted}"
        require(found == wanted, problem, "leave out --model_args, or see docs/architecture.md")
    model.train()
    model.forward = partial(_forward, model, config.sync_batchnorm)


def hook_for_size(weight_bytes: float) -> Callable[..., None]:
    """A hook that raises UserError if the parameters that are registered take far more bytes than
    these.
    """
    left = 2 * weight_bytes + 2**26  # a head may be replaced

    def count(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> None:
        nonlocal left
        left -= 0 if parameter is None else parameter.nbytes
        require(
            left >= 0,
            "the settings of this checkpoint do not match the size of its weights",
            "use another checkpoint",
        )

    return count


def bad_tensors(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of the tensors with a NaN or infinite value, in the rows of this rank if they are
    sharded.

    Waits for the device.
    """
    floats = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    # with fsdp_offload_params, buffers are on another device
    device = next(iter(floats.values())).device
    # waits only once
    good = torch.stack(
        [_is_finite(local_shard(tensor)).to(device) for tensor in floats.values()]
    ).tolist()
    return [name for name, is_good in zip(floats, good, strict=True) if not is_good]


def _is_finite(tensor: Tensor) -> Tensor:
    # On a CPU this is several times faster than `isfinite` of all values. A rank may have no row of
    # a sharded tensor.
    return torch.stack(tensor.aminmax()).isfinite().all() if tensor.numel() else torch.tensor(True)


def hash_tensors(tensors: Iterable[Tensor]) -> str:
    """The SHA-256 of the values of these tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


_COLUMNS = 4093  # a prime: rows or channels in another order change the sum


def sum_bits(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """A sum of the bits of each tensor, as integers weighted by their position, modulo 2**64.

    Waits once.
    """
    device = next(iter(tensors.values())).device  # an optimizer may count steps on the host
    sums = torch.stack([sum_words(tensor.detach()).to(device) for tensor in tensors.values()])
    return dict(zip(tensors, sums.tolist(), strict=True))


def sum_words(tensor: Tensor) -> Tensor:
    """A sum of the bits of a tensor, int64, as `sum_bits` computes it; does not wait."""
    # The values as they are in memory, which copies nothing.
    values = (
        tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))
        .reshape(-1)
        .contiguous()
    )
    fits = values.nbytes % 8 == values.storage_offset() * values.itemsize % 8 == 0
    words = values.view(torch.int64 if fits else torch.uint8)  # larger words are faster
    end = len(words) // _COLUMNS * _COLUMNS
    sums = words[:end].view(-1, _COLUMNS).sum(0)
    rest = words[end:]
    sums[: len(rest)] += rest
    sums ^= sums >> 31  # otherwise two changed signs would cancel
    # odd: no change of one word is lost
    return (sums * torch.arange(1, 2 * _COLUMNS, 2, device=sums.device)).sum()


def _forward(model: nn.Module, shares_statistics: bool, images: Tensor, *more: Any) -> Any:
    """What the model returns; in evaluation mode its logits alone.

    Unless ranks share batch statistics, two images of zeros are computed instead of an empty batch,
    and no row of the outputs is returned. Some kernels of a GPU do not accept an empty batch:
    cuDNN's attention returns None (PyTorch 2.11). Batch normalisation does not accept one image. All
    gradients are then zero, and buffers do not change.
    """
    # not `len`, which would fix the size of a batch in an exported model
    if images.shape[0] == 0 and not shares_statistics:
        images = images.new_zeros(2, *images.shape[1:])
        with restored_buffers(model):
            outputs = _forward(model, shares_statistics, images, *more)
        return recursively_apply(lambda each: each[:0], outputs)
    # Not a closure over `model.forward`: in a copy of the model, that would be the forward pass of
    # the original.
    outputs = type(model).forward(model, images, *more)
    return outputs if model.training else main_output(outputs)


def has_batch_norm(model: nn.Module) -> bool:
    """Whether a layer of a model in training mode uses batch statistics.

    Frozen ones stay in evaluation mode.
    """
    return any(isinstance(layer, _BatchNorm) and layer.training for layer in model.modules())


def check_batch_norm(plan: Plan, updates: int, together: int = 1) -> None:
    """Raise ValueError if batch statistics would be those of a single sample.

    With synchronised batch normalisation, `together` processes share their statistics.
    """
    last = (plan.updates_per_epoch - 1) * plan.global_batch_size
    microbatches = [
        plan.microbatch_sizes(place)
        for place in (0, last)[: 1 + (updates >= plan.updates_per_epoch)]
    ]
    # ranks compute contiguous ranges; an accumulation step shares statistics
    per_rank = plan.microbatches // together
    alone = any(
        sum(sizes[step::per_rank]) == 1 for sizes in microbatches for step in range(per_rank)
    )
    size = f"{plan.samples} samples, global batches of {plan.global_batch_size} in {plan.microbatches} microbatches"
    problem = f"batch normalisation needs more than one sample, but one batch has only one ({size})"
    require(
        not alone,
        problem,
        "use --drop_last, another --global_batch_size, or fewer processes or microbatches",
    )
