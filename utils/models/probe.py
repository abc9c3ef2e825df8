"""Run a new model once, to check that it takes the images and returns what a run expects."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from accelerate.utils import recursively_apply
from torch import Tensor, nn

from utils.config import require
from utils.data import InputSpec
from utils.errors import UserError, one_line
from utils.models.layers import main_output, restored_buffers
from utils.settings.models import ModelSettings

# smaller images are enlarged to it; 32 for other models
MINIMUM_SIZE = {"mnist_cnn": 28, "mlp": 1, "fastnet": 28, "inception_v3": 299}


def check_output(model: nn.Module, config: ModelSettings, spec: InputSpec, classes: int) -> None:
    """Run the model on images of training and of evaluation, then let it accept an empty batch,
    which a rank without samples computes, and return only logits in evaluation mode.

    Raises UserError for a model that does not take these images or has other outputs.
    """
    name = config.model
    size_fix = f"try --image_size {_usual_size(name)}"
    tries = [(spec, 1, size_fix), (spec, 2, size_fix)]
    other = spec.for_evaluation()
    if other.size != spec.size:
        tries.append((other, 1, "leave out --eval_size"))
    # a rank that shares batch statistics computes the empty batch itself, see `_forward`
    if config.sync_batchnorm:
        tries.append((spec, 0, "leave out --sync_batchnorm"))
    for each, count, fix in tries:
        try:
            model.train(count == 2)  # some models have more layers in training
            with torch.no_grad(), restored_buffers(model):
                logits = main_output(model(torch.zeros(count, each.channels, *each.size)))
        except (RuntimeError, AssertionError, ValueError) as error:
            what = f"{each.height}x{each.width}x{each.channels} images"
            if count == 0:
                what = f"an empty batch of {what}"
            problem = f"{name} does not accept {what} ({one_line(error)[:100]})"
            raise UserError(problem, f"{fix}, or use another --model or --model_args") from error
        found = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        wanted = [count, classes]
        problem = f"{name} returns {found} for {count} images, not one score per class, {wanted}"
        require(found == wanted, problem, "leave out --model_args, or see docs/architecture.md")
    model.train()
    model.forward = partial(_forward, model, config.sync_batchnorm)


def _usual_size(name: str) -> int:
    """The size of the images that this model is usually trained on."""
    if name.startswith("timm/"):
        from utils.models.published import timm_weights

        cfg = timm_weights(name)
        if cfg:
            return cfg.input_size[1]
    return MINIMUM_SIZE.get(name, 224)


def _forward(model: nn.Module, shares_statistics: bool, images: Tensor, *more: Any) -> Any:
    """What the model returns; in evaluation mode its logits alone.

    Unless ranks share batch statistics, two images of zeros are computed instead of an empty batch,
    and no row of the outputs is returned. All gradients are then zero, and buffers do not change.
    Some kernels of a GPU do not accept an empty batch: cuDNN's attention returns None (PyTorch
    2.11). Batch normalisation does not accept one image.
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


def hook_for_size(weight_bytes: float) -> Callable[..., None]:
    """A hook that raises UserError if the registered parameters far exceed `weight_bytes`."""
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
