"""The layers of a model: those that compute the logits, batch normalisation, and what --freeze,
--grad_checkpointing and --tta change.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from fnmatch import filter as fitting
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from utils.config import require, suggestion
from utils.data import Plan
from utils.settings.shared import BACKBONE

# torchvision itself would change ImageNet's normalisation to theirs (`transform_input`)
OF_TENSORFLOW = {"googlenet", "inception_v3"}


def shape_of(tensor: Tensor) -> str:
    """The shape of a tensor as text, with a note if its values are integers."""
    shape = f"{list(tensor.shape)}"
    return shape if tensor.is_floating_point() else f"{shape} of integers"


def find_heads(model: nn.Module) -> tuple[str, ...]:
    """The names of the layers that compute the logits: those that timm names, else the last linear
    layer and those of torchvision's auxiliary heads.
    """
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear | nn.Conv2d)
    }
    own = ("aux1.fc2", "aux2.fc2", "AuxLogits.fc", *[*layers][-1:])
    named = getattr(model, "pretrained_cfg", {}).get("classifier") or own
    named = (named,) if isinstance(named, str) else named
    return tuple(name for name in named if name in layers) or tuple(layers)[-1:]


def head_prefixes(model: nn.Module) -> tuple[str, ...]:
    """The prefixes of tensor names, such as `fc.`, of the layers that compute the logits."""
    return tuple(f"{name}." for name in find_heads(model))


def freeze(model: nn.Module, patterns: Sequence[str], new: Mapping[str, str] = {}) -> None:
    """Freeze the parameters that match a pattern. Modules whose parameters are all frozen stay in
    evaluation mode.

    Their batch normalisation keeps its running statistics, and their dropout is off.

    A pattern is `backbone`, or the name of a layer or parameter, with the wildcards of `fnmatch`.
    Raises UserError for a pattern that matches nothing or a parameter in `new`, and if no parameter
    is left to train. `new` has parameters that --init_from did not set, with the reason; they would
    stay random.
    """
    parameters = dict(model.named_parameters())
    heads = head_prefixes(model)
    for pattern in patterns:
        matching = [*fitting(parameters, pattern), *fitting(parameters, f"{pattern}.*")]
        if pattern == BACKBONE:
            matching = [name for name in parameters if not name.startswith(heads)]
        layers = [name for name, _ in model.named_modules() if name]
        fix = suggestion(
            pattern, [*layers, *parameters], f"use {BACKBONE}, or a name such as {layers[0]}"
        )
        require(matching, f"--freeze {pattern}: no parameter has such a name", fix)
        for name in matching:
            problem = f"--freeze {pattern}: {name} would stay random ({new.get(name)})"
            fix = "freeze other layers, or set --model and --channels to those of --init_from"
            require(name not in new, problem, fix)
            parameters[name].requires_grad_(False)
    problem = f"--freeze {' '.join(patterns)}: no parameter is left to train"
    require(any(each.requires_grad for each in parameters.values()), problem, f"try {BACKBONE}")
    for module in model.modules():
        trained = [parameter.requires_grad for parameter in module.parameters()]
        if trained and not any(trained):
            for layer in module.modules():
                _stay_in_evaluation(layer)


def keep_batch_stats(model: nn.Module, new: Collection[str]) -> None:
    """Let batch normalisation use its running statistics in training without updating them.

    Raises UserError if some of these statistics are in `new`, the names of tensors that the given
    weights do not have.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, _BatchNorm):
            problem = (
                f"--keep_batch_stats: the given weights have no {name}.running_mean of this shape"
            )
            require(f"{name}.running_mean" not in new, problem, "use --keep_batch_stats false")
            _stay_in_evaluation(layer)


def has_batch_norm(model: nn.Module) -> bool:
    """Whether a layer of a model in training mode uses batch statistics.

    Frozen ones stay in evaluation mode.
    """
    return any(isinstance(layer, _BatchNorm) and layer.training for layer in model.modules())


def check_batch_norm(plan: Plan, updates: int, together: int = 1) -> None:
    """Raise ValueError if batch statistics would be those of a single sample.

    With synchronised batch normalisation, `together` processes share their statistics.
    """
    places = [0]
    if updates >= plan.updates_per_epoch:
        places.append((plan.updates_per_epoch - 1) * plan.global_batch_size)
    batches = f"global batches of {plan.global_batch_size} in {plan.microbatches} microbatches"
    size = f"{plan.samples} samples, {batches}"
    problem = f"batch normalisation needs more than one sample, but one batch has only one ({size})"
    fix = "use --drop_last, another --global_batch_size, or fewer processes or microbatches"
    # ranks compute contiguous ranges; an accumulation step shares statistics
    per_rank = plan.microbatches // together
    for place in places:
        sizes = plan.microbatch_sizes(place)
        alone = any(sum(sizes[step::per_rank]) == 1 for step in range(per_rank))
        require(not alone, problem, fix)


def _stay_in_evaluation(layer: nn.Module) -> None:
    layer.training = False
    # Called by `train` of the model, also after an evaluation
    layer.__dict__["train"] = lambda mode=True: None


def checkpoint_blocks(model: nn.Module, name: str) -> None:
    """Let the model's blocks compute their activations twice; the results are the same, bit for
    bit.

    Raises UserError for a model without blocks.
    """
    blocks = find_blocks(model)
    fix = "use a model with blocks, such as resnet50, convnext_tiny or timm/vit_small_patch16_224"
    require(blocks, f"--grad_checkpointing: {name} does not support it", fix)
    for block in blocks:
        block.forward = partial(_compute_twice, block, block.forward)


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """The modules with sublayers, in a list or among siblings of one class, that hold at most one
    other such module.
    """
    containers = nn.Sequential | nn.ModuleList
    found = []
    in_list = (
        isinstance(module, containers) or len({type(child) for child in module.children()}) == 1
    )
    # the layers of DenseNet extend one list of tensors
    in_list = in_list and not isinstance(module, nn.ModuleDict)
    for child in module.children():
        inner = find_blocks(child)
        is_block = in_list and not isinstance(child, containers) and any(child.children())
        found += [child] if is_block and len(inner) < 2 else inner
    return found


def _compute_twice(block: nn.Module, forward: Callable, *inputs: Any, **named: Any) -> Any:
    # The second pass has the same random numbers, and must not change the batch statistics again.
    return checkpoint(
        forward,
        *inputs,
        use_reentrant=False,
        context_fn=lambda: (nullcontext(), restored_buffers(block)),
        **named,
    )


@contextmanager
def restored_buffers(module: nn.Module) -> Iterator[None]:
    """Restore the buffers of a module, such as batch statistics, at the end."""
    before = [buffer.clone() for buffer in module.buffers()]
    try:
        yield
    finally:  # PyTorch ends the second pass of a block by an exception
        for buffer, value in zip(module.buffers(), before, strict=True):
            buffer.data.copy_(value)  # a backward pass may follow


def main_output(outputs: Any) -> Any:
    """The logits in what a model returns: the first of a tuple or list, `logits` of a dictionary,
    or else all of it.
    """
    if isinstance(outputs, Mapping):
        return outputs.get("logits", outputs)
    return outputs[0] if isinstance(outputs, tuple | list) else outputs


class TestTimeAugmentation(nn.Module):
    """The weighted mean of a model's logits over views of each image, [n, C, H, W] to float32 [n,
    outputs].

    The views of `flip` are the image and its mirror image. Those of `shift` are the image, with
    weight 1/2, and the image shifted by one pixel to the lower right and to the upper left, with
    weight 1/4 each; the edges are reflected. `flip,shift` has the views of `shift` and their mirror
    images, as `infer_mirror_translate` of airbench (Jordan, 2024,
    https://arxiv.org/abs/2404.00498), which averages logits too. After a softmax or a sigmoid, this
    is the normalised geometric mean of the probabilities. Shifts need images of at least 2x2
    pixels.
    """

    def __init__(self, model: nn.Module, views: str):
        super().__init__()
        self.model = model
        self.views = views.split(",")

    def forward(self, images: Tensor) -> Tensor:
        views = [(1.0, images)]
        if "shift" in self.views:
            padded = F.pad(images, (1, 1, 1, 1), mode="reflect")
            views = [(0.5, images), (0.25, padded[..., :-2, :-2]), (0.25, padded[..., 2:, 2:])]
        if "flip" in self.views:
            views += [(weight, view.flip(-1)) for weight, view in views]
        total = sum(weight for weight, _ in views)
        return torch.stack(
            [weight / total * self.model(view).float() for weight, view in views]
        ).sum(0)
