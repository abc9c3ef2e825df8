"""Models by name: two small ones (small.py), every torchvision classification model, and timm's."""

import importlib.util
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from difflib import get_close_matches
from typing import Any

import torch
import torchvision
from torch import nn

from utils.config.settings import TrainConfig
from utils.config.table import Table
from utils.data.spec import SMALL, InputSpec
from utils.errors import UserError, one_line
from utils.models.small import MLP, MnistCNN

MINIMUM_SIZE = {"mnist_cnn": 28, "mlp": 1}  # smaller images are enlarged to this size; 32 for other models
STEM_POOLS = ("maxpool", "maxpool1", "features.pool0")  # the pooling after the stem of ResNet, GoogLeNet, DenseNet
OWN_MODELS = Table(
    "model",
    {"mnist_cnn": MnistCNN, "mlp": MLP},
    others="any torchvision classification model or timm/NAME",
)


def check_model(config: TrainConfig) -> None:
    """Raise ValueError if there is no model of this name, or no pretrained weights for it. Does not build it."""
    name = config.model
    if name is None:  # chosen from the data
        return
    if name in OWN_MODELS:
        if config.pretrained:
            raise UserError(f"--pretrained: {name} has no published weights", "use a torchvision model or timm/NAME")
    elif name.startswith("timm/"):
        if importlib.util.find_spec("timm") is None:
            raise UserError(f"--model {name}: timm is not installed", "pip install timm")
        import timm

        if not timm.is_model(name[5:]):
            near = [f"timm/{model}" for model in get_close_matches(name[5:], timm.list_models(), n=3)]
            raise UserError(f"--model {name}: timm has no such model", _did_you_mean(near))
        if config.pretrained and not timm.is_model_pretrained(name[5:]):
            raise UserError(f"--pretrained: timm has no weights for {name[5:]}", "leave it out or use another model")
    elif name not in torchvision_models():
        near = get_close_matches(name, [*OWN_MODELS, *torchvision_models()], n=3)
        raise UserError(f"--model {name}: no such model", _did_you_mean(near))


def _did_you_mean(names: list[str]) -> str:
    if names:
        return f"did you mean {' or '.join(names)}"
    return f"use {OWN_MODELS.listed()}"


def torchvision_models() -> list[str]:
    """Names of torchvision's classification models."""
    return torchvision.models.list_models(module=torchvision.models)


def input_spec(config: TrainConfig, seen_channels: int, seen_size: tuple[int, int] | None) -> InputSpec:
    """The model's input, from the flags, its pretrained weights, and the channels and size of the images.

    `seen_size` is None if the images differ in size.
    """
    weights = _pretrained_input(config.model) if config.pretrained else {}
    channels = config.channels or weights.get("channels") or seen_channels
    if config.image_size or weights.get("size"):
        height = width = config.image_size or weights["size"]
    elif seen_size is not None and max(seen_size) <= SMALL:
        enlarge = max(1.0, MINIMUM_SIZE.get(config.model, 32) / min(seen_size))
        height, width = (round(side * enlarge) for side in seen_size)
    else:
        height = width = 224
    given = {"mean": config.mean, "std": config.std}
    for flag, values in given.items():
        if values and len(values) not in (1, channels):
            raise UserError(
                f"--{flag} has {len(values)} values for {channels} channels", "give one value, or one for each channel"
            )
    mean, std = (_per_channel(given[key] or weights.get(key) or [0.5], channels) for key in given)
    return InputSpec(height, width, channels, mean, std)


def _per_channel(values: Sequence[float], channels: int) -> list[float]:
    """The values, or for a different number of channels, their mean for each channel."""
    return list(values) if len(values) == channels else [sum(values) / len(values)] * channels


def build_model(config: TrainConfig, spec: InputSpec, classes: int, load: bool = True) -> nn.Module:
    """The model, from images [n, C, H, W] to logits [n, classes].

    Its weights are random. With --pretrained they are the published ones, unless `load` is False. Raises ValueError if
    --model_args are invalid or the model does not accept the images.
    """
    name = config.model
    try:
        if name in OWN_MODELS:
            model = OWN_MODELS[name](spec, classes, **config.model_args)
        elif name.startswith("timm/"):
            model = _timm(config, spec, classes, load)
        else:
            model = _torchvision(config, spec, classes, load)
    except (TypeError, RuntimeError) as error:
        raise UserError(f"--model_args for {name}: {one_line(error)}", "change or remove these arguments") from error
    _check_output(model, name, spec, classes)
    return model.to(memory_format=torch.channels_last) if config.channels_last else model


def seed_layers(device: torch.device, seed: int) -> None:
    """Seed the random numbers of layers (dropout), so that a resumed run does not need the state of the generators."""
    # torch.manual_seed does the same in 100 us; a CPU generator uses only the low 32 bits.
    if device.type == "cuda":
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed % 2**32)
    torch.default_generator.manual_seed(seed % 2**32)


def _pretrained_input(name: str) -> dict:
    if name.startswith("timm/"):
        import timm

        cfg = timm.get_pretrained_cfg(name[5:])
        if cfg is None:
            return {}
        return {"channels": cfg.input_size[0], "size": cfg.input_size[1], "mean": cfg.mean, "std": cfg.std}
    preset = torchvision.models.get_model_weights(name).DEFAULT.transforms()
    return {"channels": 3, "size": preset.crop_size[0], "mean": preset.mean, "std": preset.std}


def _timm(config: TrainConfig, spec: InputSpec, classes: int, load: bool) -> nn.Module:
    import timm

    if "checkpoint_path" in config.model_args:
        raise UserError("--model_args checkpoint_path: timm would unpickle that file", "use --pretrained")
    arguments: dict[str, Any] = {"num_classes": classes, "in_chans": spec.channels, **config.model_args}
    with _weights_of(config.model) if config.pretrained and load else nullcontext():
        return timm.create_model(config.model[5:], pretrained=config.pretrained and load, **arguments)


def _torchvision(config: TrainConfig, spec: InputSpec, classes: int, load: bool) -> nn.Module:
    name, arguments = config.model, dict(config.model_args)
    if name in ("googlenet", "inception_v3"):
        if "aux_logits" in arguments:
            raise UserError(f"--model_args aux_logits: the extra heads of {name} are not trained", "leave it out")
        # Loading weights sets these arguments. Set them in any case, so that the network is the same.
        arguments = {"transform_input": config.pretrained, "init_weights": not config.pretrained, **arguments}
    if name.startswith("vit_"):
        arguments = {"image_size": spec.height, **arguments}
    if config.pretrained:
        if spec.channels != 3:
            raise UserError("--pretrained weights of torchvision take colour images", "leave out --channels 1")
        with _weights_of(name) if load else nullcontext():
            model = torchvision.models.get_model(name, weights="DEFAULT" if load else None, **arguments)
        _replace_head(model, classes)
    else:
        model = torchvision.models.get_model(name, num_classes=classes, **arguments)
        _fit_stem(model, spec)
    if name in ("googlenet", "inception_v3"):
        model.aux_logits = False  # in training, the extra heads would give three outputs
        model.aux1 = model.aux2 = model.AuxLogits = None
    return model


@contextmanager
def _weights_of(name: str) -> Iterator[None]:
    """Turn any error of downloading or loading weights into one UserError."""
    try:
        yield
    except (ValueError, OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        where = "the Hugging Face cache" if name.startswith("timm/") else f"{torch.hub.get_dir()}/checkpoints"
        raise UserError(
            f"--pretrained: the weights of {name} cannot be loaded ({one_line(error)[:200]})",
            f"leave out --image_size and --model_args, delete a damaged file, or without a network put the file into "
            f"{where}",
        ) from error


def _replace_head(model: nn.Module, classes: int) -> None:
    """Replace the last linear layer (or 1x1 convolution) with a new one with `classes` outputs."""
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    name, head = layers[-1]
    bias = head.bias is not None
    if isinstance(head, nn.Linear):
        model.set_submodule(name, nn.Linear(head.in_features, classes, bias))
    else:
        model.set_submodule(name, nn.Conv2d(head.in_channels, classes, kernel_size=1, bias=bias))


def _fit_stem(model: nn.Module, spec: InputSpec) -> None:
    """Replace the first convolution with one that has the channels of the images and does not shrink small images.

    For small images an overlapping stem (kernel larger than stride) becomes 3x3 with stride 1 and its pooling is
    removed, as in the CIFAR networks of He et al., 2016. Patch stems keep their kernel and stride.
    """
    name, conv = next((name, module) for name, module in model.named_modules() if isinstance(module, nn.Conv2d))
    geometry: dict[str, Any] = {"kernel_size": conv.kernel_size, "stride": conv.stride, "padding": conv.padding}
    if spec.small and max(conv.stride) > 1 and max(conv.kernel_size) > max(conv.stride):
        geometry = {"kernel_size": 3, "stride": 1, "padding": 1}
        for pool in STEM_POOLS:
            if pool in dict(model.named_modules()):
                model.set_submodule(pool, nn.Identity())
    elif conv.in_channels == spec.channels:
        return
    new = nn.Conv2d(spec.channels, conv.out_channels, **geometry, bias=conv.bias is not None)
    nn.init.kaiming_normal_(new.weight, mode="fan_out", nonlinearity="relu")
    model.set_submodule(name, new)


def _check_output(model: nn.Module, name: str, spec: InputSpec, classes: int) -> None:
    """Run the model on one image and on an empty batch, to find errors before training."""
    training = model.training
    model.eval()
    for count in (1, 0):  # a rank without samples runs an empty batch
        try:
            with torch.no_grad():
                logits = model(torch.zeros(count, spec.channels, spec.height, spec.width))
        except (RuntimeError, AssertionError, ValueError) as error:
            what = f"{spec.height}x{spec.width}x{spec.channels} images" if count else "an empty batch"
            fix = f"try --image_size {_usual_size(name)}" if count else "use another model: a rank may get one"
            raise UserError(f"{name} does not accept {what} ({one_line(error)[:100]})", fix) from error
        if logits.shape != (count, classes):
            problem = f"{name} has an output of shape {list(logits.shape)}, not one score per class"
            raise UserError(problem, "leave out --model_args, or use another model")
    model.train(training)


def _usual_size(name: str) -> int:
    """A side length in pixels that the model accepts."""
    if name.startswith("timm/"):
        return _pretrained_input(name).get("size", 224)
    return MINIMUM_SIZE.get(name, 224)
