"""Models by name: our own (small.py, fastnet.py), torchvision's for classification, and timm's."""

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torchvision
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from utils.config import Registry, require, suggestion
from utils.data import EVAL_CROP, SMALL, ImageDataset, InputSpec, fold_in, sides
from utils.errors import UserError, one_line
from utils.models.layers import OF_TENSORFLOW
from utils.models.probe import MINIMUM_SIZE, check_output, hook_for_size
from utils.models.small import MLP, MnistCNN
from utils.settings.models import ModelSettings

# timm would unpickle the file of the last one
_NOT_ARGUMENTS = {"weights", "pretrained", "checkpoint_path"}
_FOR_DROP_PATH = (
    "use a timm model such as timm/vit_*, or --model_args '{stochastic_depth_prob: RATE}'"
)
OWN_MODELS = Registry(
    "model",
    {"mnist_cnn": MnistCNN, "mlp": MLP, "fastnet": "utils.models.fastnet:FastNet"},
    others="any torchvision classification model or timm/NAME",
)


def check_model(config: ModelSettings) -> None:
    """Raise ValueError if there is no model of this name, or no pretrained weights for it.

    Does not build it.
    """
    name = config.model
    if name is None:  # chosen from the data
        return
    known = [*OWN_MODELS, *torchvision_models()]
    is_timm = name.startswith("timm/")
    has_weights = name not in OWN_MODELS
    if name not in known:  # importing timm takes a second
        has_timm = importlib.util.find_spec("timm")
        require(
            has_timm or not is_timm, f"--model {name}: timm is not installed", "pip install timm"
        )
        if has_timm:
            import timm

            known += [f"timm/{each}" for each in timm.list_models()]
            has_weights = timm.is_model_pretrained(name.removeprefix("timm/"))
        bare = name.partition(".")[0]
        fix = suggestion(bare, known, f"use {OWN_MODELS.describe_values()}")
        require(bare in known, f"--model {name}: no such model", fix)
    problem = f"--pretrained: {name} has no published weights"
    require(has_weights or not config.pretrained, problem, "use another model")
    reserved = _NOT_ARGUMENTS & config.model_args.keys()
    if reserved and name not in OWN_MODELS:
        problem = f"--model_args {min(reserved)}: cannot be set here"
        raise UserError(problem, "leave it out, or use --pretrained")
    own_stem = name in OWN_MODELS or is_timm or config.pretrained
    problem = "--stem small: only for models of torchvision without --pretrained"
    require(config.stem != "small" or not own_stem, problem, "leave it out")
    problem = f"--drop_path: {name} does not support it"
    require(config.drop_path is None or is_timm, problem, _FOR_DROP_PATH)


def torchvision_models() -> list[str]:
    """Names of torchvision's classification models."""
    return torchvision.models.list_models(module=torchvision.models)


def input_spec(
    config: ModelSettings, seen_channels: int, seen_size: tuple[int, int] | None
) -> InputSpec:
    """The model's input, from the flags, its pretrained weights, and the channels and size of the
    images.

    `seen_size` is None if the images differ in size.
    """
    weights = _published_input(config)
    channels = config.channels or weights.get("channels") or seen_channels
    if config.image_size or weights.get("image_size"):
        height, width = sides(config.image_size or weights["image_size"])
    elif seen_size is not None and max(seen_size) <= SMALL:
        enlarge = max(1.0, MINIMUM_SIZE.get(config.model, 32) / min(seen_size))
        height, width = (round(side * enlarge) for side in seen_size)
    else:
        height = width = 224
    mean, std = (
        _per_channel(f"--{name}", getattr(config, name), weights.get(name, [0.5]), channels)
        for name in ("mean", "std")
    )
    spec = resize_input(InputSpec(height, width, channels, mean, std), config, (height, width))
    other = resize_input(spec, config, sides(config.eval_size)) if config.eval_size else spec
    return spec if other == spec else replace(spec, evaluation=other)


def _published_input(config: ModelSettings) -> dict:
    """The settings of the input of published weights; empty without --pretrained."""
    if not config.pretrained:
        return {}
    from utils.models.published import published_input

    return published_input(config.model)


def resize_input(spec: InputSpec, config: ModelSettings, size: tuple[int, int]) -> InputSpec:
    """The input with this height and width, and with the resizing of photographs that it needs."""
    weights = _published_input(config)
    spec = InputSpec(*size, spec.channels, spec.mean, spec.std)
    if not spec.small:  # small images are resized once, for the cache, with bilinear interpolation
        squash = weights.get("squash", False) if config.squash is None else config.squash
        interpolation = config.interpolation or weights.get("interpolation", spec.interpolation)
        spec = replace(spec, squash=squash, interpolation=interpolation)
    return spec.cropped(config.eval_crop or weights.get("eval_crop") or EVAL_CROP)


def _per_channel(
    flag: str, given: list[float] | None, default: list[float], channels: int
) -> list[float]:
    """The values, or for a different number of channels, their mean for each channel."""
    values = given or default
    problem = f"{flag} has {len(values)} values for {channels} channels"
    fix = "give one value, or one for each channel"
    require(given is None or len(given) in (1, channels), problem, fix)
    if len(values) == channels:
        return list(values)
    return [sum(values) / len(values)] * channels


def build_model(
    config: ModelSettings,
    spec: InputSpec,
    classes: int,
    weight_bytes: float | None = None,
    names: Sequence[str] = (),
    images: ImageDataset | None = None,
) -> nn.Module:
    """The model, from images [n, C, H, W] to logits [n, classes]; in training, it may return more
    (`main_output`).

    Its weights are random, drawn with --seed. With --pretrained they are the published ones. If
    these have all of the classes `names`, their head is kept. If the model has a method
    `initialise`, this is called with the training `images` before weights are loaded.
    `weight_bytes` is None for a new model. Otherwise weights of this size will be loaded into it:
    it starts random, and a far larger model is refused before it fills the memory. Raises
    ValueError if --model_args are invalid or the model does not accept the images of training or
    evaluation.
    """
    check_model(config)  # again: the data may have chosen the model
    torch.manual_seed(fold_in(config.seed, "weights"))
    name = config.model
    arguments = dict(config.model_args)
    if name.startswith("timm/"):
        arguments = {"in_chans": spec.channels} | arguments
        arguments |= {} if config.drop_path is None else {"drop_path_rate": config.drop_path}
    elif name.startswith("vit_"):
        arguments = {"image_size": spec.height} | arguments
    try:
        with register_module_parameter_registration_hook(hook_for_size(weight_bytes or math.inf)):
            model = _create(config, spec, classes, arguments)
        initialise: Any = getattr(model, "initialise", None)
        if images is not None and initialise:
            initialise(images)
        if config.pretrained and weight_bytes is None:
            from utils.models.published import copy_published

            copy_published(model, config, arguments, names)
        check_output(model, config, spec, classes)
    except UserError:
        raise
    except Exception as error:  # invalid arguments can cause errors of any class
        if not config.model_args and not isinstance(error, TypeError | ValueError | RuntimeError):
            raise
        raise _cannot_build(config, error) from error
    return model.to(memory_format=torch.channels_last) if config.channels_last else model


def _cannot_build(config: ModelSettings, error: Exception) -> UserError:
    what = "--model"
    fix = "use another --model or --image_size"
    if config.model_args:
        what = "--model_args for"
        fix = "change or remove these arguments"
    reason = f"{type(error).__name__}: {one_line(error)[:200]}"
    return UserError(f"{what} {config.model}: {reason}", fix)


def _create(config: ModelSettings, spec: InputSpec, classes: int, arguments: dict) -> nn.Module:
    name = config.model
    if name in OWN_MODELS:
        return OWN_MODELS[name](spec, classes, **arguments)
    if name.startswith("timm/"):
        import timm

        model = timm.create_model(name[5:], num_classes=classes, **arguments)
        has_drop_path = any(type(layer).__name__ == "DropPath" for layer in model.modules())
        problem = f"--drop_path: {name} does not support it"
        require(has_drop_path or not config.drop_path, problem, _FOR_DROP_PATH)
        return model
    if name in OF_TENSORFLOW:
        # without init_weights torchvision warns; GoogLeNet's published weights lack auxiliary heads
        own = {"init_weights": True, "aux_logits": not config.pretrained or name == "inception_v3"}
        arguments = own | arguments
    model = torchvision.models.get_model(name, num_classes=classes, **arguments)
    if config.pretrained:
        problem = "--pretrained weights of torchvision take colour images"
        require(spec.channels == 3, problem, "leave out --channels 1")
    else:
        model.stem_change = _fit_stem(model, spec, config)
    return model


def _fit_stem(model: nn.Module, spec: InputSpec, config: ModelSettings) -> str:
    """Replace the first convolution with one that has the channels of the images and does not
    shrink small images.

    With the small stem, an overlapping stem (kernel larger than stride) becomes 3x3 with stride 1
    and its pooling is removed, as in the CIFAR networks of He et al., 2016. Patch stems keep their
    kernel and stride. Returns a description of the change; "" if there is none.
    """
    modules = dict(model.named_modules())
    name, conv = next(pair for pair in modules.items() if isinstance(pair[1], nn.Conv2d))
    geometry = {key: getattr(conv, key) for key in ("kernel_size", "stride", "padding")}
    small = spec.small if config.stem == "auto" else config.stem == "small"
    if small and max(conv.stride) > 1 and max(conv.kernel_size) > max(conv.stride):
        change = "small-image stem (3x3, stride 1: slower; --stem standard keeps torchvision's)"
        geometry = {"kernel_size": 3, "stride": 1, "padding": 1}
        for pool in ("maxpool", "features.pool0"):  # of ResNet and DenseNet
            if pool in modules:
                model.set_submodule(pool, nn.Identity())
    elif config.stem == "small":
        problem = f"--stem small: {config.model} has no stem that can be replaced"
        raise UserError(problem, "leave it out")
    elif conv.in_channels == spec.channels:
        return ""
    else:
        change = f"stem with {spec.channels} input channel"
    new = nn.Conv2d(spec.channels, conv.out_channels, **geometry, bias=conv.bias is not None)
    nn.init.kaiming_normal_(new.weight, mode="fan_out", nonlinearity="relu")
    model.set_submodule(name, new)
    return change
