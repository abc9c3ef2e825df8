"""Models by name: our own (small.py), every classification model of torchvision, and timm's."""

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torchvision
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from utils.config.settings import TrainConfig
from utils.config.table import Table, suggestion
from utils.data.datasets import ImageDataset
from utils.data.order import fold_in
from utils.data.spec import SMALL, InputSpec, sides
from utils.errors import UserError, one_line
from utils.models.checking import MINIMUM_SIZE, check_output, hook_for_size
from utils.models.matching import find_heads, zero_heads
from utils.models.published import keep_head, published_input, published_model, resize_input
from utils.models.small import MLP, FastNet, MnistCNN, some_images

_SEVERAL_HEADS = {"googlenet", "inception_v3"}  # they have three outputs in training
# timm would unpickle the file of the last one
_NOT_ARGUMENTS = {"weights", "pretrained", "checkpoint_path"}
OWN_MODELS = Table(
    "model",
    {"mnist_cnn": MnistCNN, "mlp": MLP, "fastnet": FastNet},
    others="any torchvision classification model or timm/NAME",
)


def check_model(config: TrainConfig) -> None:
    """Raise ValueError if there is no model of this name, or no pretrained weights for it.

    Does not build it.
    """
    name = config.model
    if name is None:  # chosen from the data
        return
    if name in OWN_MODELS:
        if config.pretrained:
            raise UserError(
                f"--pretrained: {name} has no published weights",
                "use a torchvision model or timm/NAME",
            )
    elif name.startswith("timm/"):
        if importlib.util.find_spec("timm") is None:
            raise UserError(f"--model {name}: timm is not installed", "pip install timm")
        import timm

        bare = name[5:].partition(".")[0]
        if not timm.is_model(bare):
            fix = suggestion(
                bare, timm.list_models(), f"use {OWN_MODELS.describe_values()}", "timm/"
            )
            raise UserError(f"--model {name}: timm has no such model", fix)
        if config.pretrained and not timm.is_model_pretrained(name[5:]):
            fix = suggestion(
                f"{bare}.",
                timm.list_models(f"{bare}.*", pretrained=True),
                "use another model",
                "timm/",
            )
            raise UserError(f"--pretrained: timm has no weights for {name[5:]}", fix)
    elif name not in torchvision_models():
        raise UserError(f"--model {name}: no such model", _similar_model(name))
    if name not in OWN_MODELS and (given := _NOT_ARGUMENTS & config.model_args.keys()):
        raise UserError(
            f"--model_args {min(given)}: cannot be set here", "leave it out, or use --pretrained"
        )
    if config.stem == "small" and (
        name in OWN_MODELS or name.startswith("timm/") or config.pretrained
    ):
        raise UserError(
            "--stem small: only for models of torchvision without --pretrained", "leave it out"
        )


def _similar_model(name: str) -> str:
    """The fix for a model that does not exist."""
    if importlib.util.find_spec("timm") is not None:
        import timm

        if timm.is_model(name):
            return f"did you mean timm/{name}?"
    return suggestion(
        name, [*OWN_MODELS, *torchvision_models()], f"use {OWN_MODELS.describe_values()}"
    )


def torchvision_models() -> list[str]:
    """Names of torchvision's classification models with one output."""
    return sorted({*torchvision.models.list_models(module=torchvision.models)} - _SEVERAL_HEADS)


def input_spec(
    config: TrainConfig, seen_channels: int, seen_size: tuple[int, int] | None
) -> InputSpec:
    """The model's input, from the flags, its pretrained weights, and the channels and size of the
    images.

    `seen_size` is None if the images differ in size.
    """
    weights = published_input(config.model) if config.pretrained else {}
    channels = config.channels or weights.get("channels") or seen_channels
    if config.image_size or weights.get("image_size"):
        height, width = sides(config.image_size or weights["image_size"])
    elif seen_size is not None and max(seen_size) <= SMALL:
        enlarge = max(1.0, MINIMUM_SIZE.get(config.model, 32) / min(seen_size))
        height, width = (round(side * enlarge) for side in seen_size)
    else:
        height = width = 224
    if (
        config.pretrained
        and config.model.startswith("vit_")
        and [height, width] != weights["image_size"]
    ):
        side = weights["image_size"][0]
        problem = (
            f"--image_size {config.image_size}: the weights of {config.model} are for {side}x{side}"
        )
        raise UserError(f"{problem} images only", "leave out --image_size")
    given = {"mean": config.mean, "std": config.std}
    for flag, values in given.items():
        if values and len(values) not in (1, channels):
            problem = f"--{flag} has {len(values)} values for {channels} channels"
            raise UserError(problem, "give one value, or one for each channel")
    mean, std = (_per_channel(given[key] or weights.get(key) or [0.5], channels) for key in given)
    spec = resize_input(InputSpec(height, width, channels, mean, std), config, (height, width))
    other = resize_input(spec, config, sides(config.eval_size)) if config.eval_size else spec
    return spec if other == spec else replace(spec, evaluation=other)


def _per_channel(values: Sequence[float], channels: int) -> list[float]:
    """The values, or for a different number of channels, their mean for each channel."""
    return list(values) if len(values) == channels else [sum(values) / len(values)] * channels


def build_model(
    config: TrainConfig,
    spec: InputSpec,
    classes: int,
    weight_bytes: float | None = None,
    names: Sequence[str] = (),
    images: ImageDataset | None = None,
) -> nn.Module:
    """The model, from images [n, C, H, W] to logits [n, classes].

    Its weights are random, drawn with --seed. With --pretrained they are the published ones. If
    these know all of the classes `names`, their head is kept. The first layer of fastnet is
    computed from the training `images`. If other weights will be loaded, of `weight_bytes`, they
    are random, and a far larger model is refused before it fills the memory. Raises ValueError if
    --model_args are invalid or the model does not accept the images of training or evaluation.
    """
    check_model(config)  # again: the data may have chosen the model
    load = weight_bytes is None
    torch.manual_seed(fold_in(config.seed, "weights"))
    name = config.model
    try:
        with register_module_parameter_registration_hook(hook_for_size(weight_bytes or math.inf)):
            if name.startswith("timm/"):
                model = _timm(config, spec, classes, load)
            else:
                own = OWN_MODELS.get(name)
                model = (
                    own(spec, classes, **config.model_args)
                    if own
                    else _torchvision(config, spec, classes, load)
                )
                if config.drop_path is not None:
                    raise _without_drop_path(name)
        if images is not None and isinstance(model, FastNet):
            model.initialise(some_images(images))
        if config.pretrained and load:
            zero_heads(model)
            if names:
                keep_head(model, config, names)
        check_output(model, config, spec, classes)
        if (other := spec.for_evaluation()).size != spec.size:
            check_output(model, config, other, classes, in_evaluation=True)
    except UserError:
        raise
    except Exception as error:  # invalid arguments can cause errors of any class
        if not config.model_args and not isinstance(error, TypeError | RuntimeError):
            raise
        what, fix = "--model", ""
        if config.model_args:
            what, fix = (
                "--model_args for",
                "change or remove these arguments, written as '{NAME: VALUE, NAME: VALUE}'",
            )
        # The text of a KeyError and others means nothing without the class.
        kind = (
            ""
            if isinstance(error, TypeError | ValueError | RuntimeError)
            else f"{type(error).__name__} "
        )
        raise UserError(f"{what} {name}: {kind}{one_line(error)[:200]}", fix) from error
    return model.to(memory_format=torch.channels_last) if config.channels_last else model


def _without_drop_path(name: str) -> UserError:
    fix = "use a timm model such as timm/vit_* and timm/convnext_*, or --model_args '{stochastic_depth_prob: RATE}'"
    return UserError(f"--drop_path: {name} does not support it", fix)


def _timm(config: TrainConfig, spec: InputSpec, classes: int, load: bool) -> nn.Module:
    import timm

    arguments: dict[str, Any] = {
        "num_classes": classes,
        "in_chans": spec.channels,
        **config.model_args,
    }
    if config.drop_path is not None:
        arguments["drop_path_rate"] = config.drop_path
    try:
        if config.pretrained and load:
            model = published_model(config, **arguments)
        else:
            model = timm.create_model(config.model[5:], **arguments)
    except TypeError as error:
        if "'drop_path_rate'" not in str(error):
            raise
        raise _without_drop_path(config.model) from error
    if config.drop_path and all(type(layer).__name__ != "DropPath" for layer in model.modules()):
        raise _without_drop_path(config.model)
    return model


def _torchvision(config: TrainConfig, spec: InputSpec, classes: int, load: bool) -> nn.Module:
    name, arguments = config.model, dict(config.model_args)
    if name.startswith("vit_") and not (config.pretrained and load):  # its weights are for one size
        arguments = {"image_size": spec.height, **arguments}
    if config.pretrained:
        if spec.channels != 3:
            raise UserError(
                "--pretrained weights of torchvision take colour images", "leave out --channels 1"
            )
        model = (
            published_model(config, **arguments)
            if load
            else torchvision.models.get_model(name, **arguments)
        )
        _replace_head(model, classes)
    else:
        model = torchvision.models.get_model(name, num_classes=classes, **arguments)
        model.stem_change = _fit_stem(model, spec, config)
    return model


def _replace_head(model: nn.Module, classes: int) -> None:
    """Replace the last linear layer (or 1x1 convolution) with a new one with `classes` outputs."""
    (name,) = find_heads(model)
    head: Any = model.get_submodule(name)
    bias = head.bias is not None
    linear = isinstance(head, nn.Linear)
    new = (
        nn.Linear(head.in_features, classes, bias)
        if linear
        else nn.Conv2d(head.in_channels, classes, 1, bias=bias)
    )
    model.set_submodule(name, new)


def _fit_stem(model: nn.Module, spec: InputSpec, config: TrainConfig) -> str:
    """Replace the first convolution with one that has the channels of the images and does not
    shrink small images.

    With the small stem, an overlapping stem (kernel larger than stride) becomes 3x3 with stride 1
    and its pooling is removed, as in the CIFAR networks of He et al., 2016. Patch stems keep their
    kernel and stride. Returns a description of the change; "" if there is none.
    """
    name, conv = next(
        (name, module) for name, module in model.named_modules() if isinstance(module, nn.Conv2d)
    )
    geometry: dict[str, Any] = {
        "kernel_size": conv.kernel_size,
        "stride": conv.stride,
        "padding": conv.padding,
    }
    small = spec.small if config.stem == "auto" else config.stem == "small"
    if small and max(conv.stride) > 1 and max(conv.kernel_size) > max(conv.stride):
        change = "small-image stem (3x3, stride 1: slower; --stem standard keeps torchvision's)"
        geometry = {"kernel_size": 3, "stride": 1, "padding": 1}
        for pool in ("maxpool", "features.pool0"):  # of ResNet and DenseNet
            if pool in dict(model.named_modules()):
                model.set_submodule(pool, nn.Identity())
    elif config.stem == "small":
        raise UserError(
            f"--stem small: {config.model} has no stem that can be replaced", "leave it out"
        )
    elif conv.in_channels == spec.channels:
        return ""
    else:
        change = f"stem with {spec.channels} input channel"
    new = nn.Conv2d(spec.channels, conv.out_channels, **geometry, bias=conv.bias is not None)
    nn.init.kaiming_normal_(new.weight, mode="fan_out", nonlinearity="relu")
    model.set_submodule(name, new)
    return change
