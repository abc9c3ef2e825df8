"""Models by name: two small ones of our own, every torchvision classification model, and timm's."""

import importlib.util
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from difflib import get_close_matches

import torch
import torchvision
from torch import nn

from utils.config.settings import TrainConfig
from utils.data.spec import SMALL, InputSpec
from utils.errors import one_line
from utils.models.small import MLP, MnistCNN

MINIMUM_SIZE = {"mnist_cnn": 28, "mlp": 1}  # smaller images are enlarged to it; for other models it is 32
STEM_POOLS = ("maxpool", "maxpool1", "features.pool0")  # the pooling right after a stem, in ResNet, GoogLeNet, DenseNet


OWN_MODELS = {"mnist_cnn": MnistCNN, "mlp": MLP}


def check_model(config: TrainConfig) -> None:
    """Raise ValueError when no model has this name, or it has no pretrained weights; builds nothing."""
    name = config.model
    if name in OWN_MODELS:
        if config.pretrained:
            raise ValueError(f"--pretrained: {name} has no published weights; use a torchvision model or timm/NAME")
    elif name.startswith("timm/"):
        if importlib.util.find_spec("timm") is None:
            raise ValueError(f"--model {name}: timm is not installed; pip install timm")
        import timm

        if not timm.is_model(name[5:]):
            near = [f"timm/{model}" for model in get_close_matches(name[5:], timm.list_models(), n=3)]
            raise ValueError(f"--model {name}: timm has no such model{_did_you_mean(near)}")
        if config.pretrained and not timm.is_model_pretrained(name[5:]):
            raise ValueError(f"--pretrained: timm has no weights for {name[5:]}; leave it out or take another model")
    elif name not in torchvision_models():
        near = get_close_matches(name, [*OWN_MODELS, *torchvision_models()], n=3)
        raise ValueError(f"--model {name}: no such model{_did_you_mean(near)}")


def _did_you_mean(names: list[str]) -> str:
    return f"; did you mean {' or '.join(names)}" if names else ""


def torchvision_models() -> list[str]:
    """Names of torchvision's classification models."""
    return torchvision.models.list_models(module=torchvision.models)


def input_spec(config: TrainConfig, seen_channels: int, seen_size: tuple[int, int] | None) -> InputSpec:
    """What the model is to be fed, from the flags, its pretrained weights, and a look at the data."""
    own = _pretrained_input(config.model) if config.pretrained else {}
    channels = config.channels or own.get("channels") or seen_channels
    if config.image_size or own.get("size"):
        height = width = config.image_size or own["size"]
    elif seen_size is not None and max(seen_size) <= SMALL:
        enlarge = max(1.0, MINIMUM_SIZE.get(config.model, 32) / min(seen_size))
        height, width = (round(side * enlarge) for side in seen_size)
    else:
        height = width = 224
    given = {"mean": config.mean, "std": config.std}
    for flag, values in given.items():
        if values and len(values) not in (1, channels):
            raise ValueError(f"--{flag} has {len(values)} values for {channels} channels; give one or {channels}")
    mean, std = (_per_channel(given[key] or own.get(key) or [0.5], channels) for key in given)
    return InputSpec(height, width, channels, mean, std)


def _per_channel(values: Sequence[float], channels: int) -> list[float]:
    """The values, or for another number of channels their mean for each."""
    return list(values) if len(values) == channels else [sum(values) / len(values)] * channels


def build_model(config: TrainConfig, spec: InputSpec, classes: int, load: bool = True) -> nn.Module:
    """The model that takes [n, C, H, W] images and gives [n, classes] logits.

    Its weights are random, or with --pretrained the published ones; `load=False` leaves out their download.

    Raises ValueError when --model_args do not fit or the model cannot take the images.
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
        raise ValueError(f"--model_args for {name}: {one_line(error)}") from error
    _try(model, name, spec, classes)
    return model.to(memory_format=torch.channels_last) if config.channels_last else model


def seed_layers(device: torch.device, seed: int) -> None:
    """Start the layers' random numbers (dropout) afresh: they then depend on no history, so resuming needs no state."""
    # torch.manual_seed would do, but takes 100 us; a CPU generator uses only the low 32 bits.
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
        raise ValueError("--model_args checkpoint_path: timm would unpickle that file; use --pretrained")
    arguments = {"num_classes": classes, "in_chans": spec.channels, **config.model_args}
    with _weights_of(config.model) if config.pretrained and load else nullcontext():
        return timm.create_model(config.model[5:], pretrained=config.pretrained and load, **arguments)


def _torchvision(config: TrainConfig, spec: InputSpec, classes: int, load: bool) -> nn.Module:
    name, arguments = config.model, dict(config.model_args)
    if name in ("googlenet", "inception_v3"):
        if "aux_logits" in arguments:
            raise ValueError(f"--model_args aux_logits: the extra heads of {name} are not trained here; leave it out")
        # What loading weights implies has to be said where they are left out, for the same network to come of both.
        arguments = {"transform_input": config.pretrained, "init_weights": not config.pretrained, **arguments}
    if name.startswith("vit_"):
        arguments = {"image_size": spec.height, **arguments}
    if config.pretrained:
        if spec.channels != 3:
            raise ValueError("--pretrained weights of torchvision take colour images; leave out --channels 1")
        with _weights_of(name) if load else nullcontext():
            model = torchvision.models.get_model(name, weights="DEFAULT" if load else None, **arguments)
        _replace_head(model, classes)
    else:
        model = torchvision.models.get_model(name, num_classes=classes, **arguments)
        _fit_stem(model, spec)
    if name in ("googlenet", "inception_v3"):
        model.aux_logits = False  # in training, the extra heads would give three outputs for one
        model.aux1 = model.aux2 = model.AuxLogits = None
    return model


@contextmanager
def _weights_of(name: str) -> Iterator[None]:
    """Turn what goes wrong when weights are downloaded and loaded into one ValueError."""
    try:
        yield
    except (ValueError, OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        where = "the Hugging Face cache" if name.startswith("timm/") else f"{torch.hub.get_dir()}/checkpoints"
        raise ValueError(
            f"--pretrained: the weights of {name} cannot be loaded ({one_line(error)[:200]}); leave out --image_size "
            f"and --model_args, delete a damaged file, or without a network put the file into {where}"
        ) from error


def _replace_head(model: nn.Module, classes: int) -> None:
    """Put a new layer of `classes` outputs in the place of the last linear one (or 1x1 convolution)."""
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}
    name, head = list(layers.items())[-1]
    bias = head.bias is not None
    if isinstance(head, nn.Linear):
        model.set_submodule(name, nn.Linear(head.in_features, classes, bias))
    else:
        model.set_submodule(name, nn.Conv2d(head.in_channels, classes, head.kernel_size, bias=bias))


def _fit_stem(model: nn.Module, spec: InputSpec) -> None:
    """Let the first convolution take the images' channels, and keep it from shrinking small images.

    For small images an overlapping stem (kernel larger than stride) becomes 3x3 with stride 1 and its pooling goes, as
    in the CIFAR networks of He et al., 2016; patch stems stay as they are.
    """
    name, conv = next((n, m) for n, m in model.named_modules() if isinstance(m, nn.Conv2d))
    kernel, stride, padding = conv.kernel_size, conv.stride, conv.padding
    if spec.small and max(stride) > 1 and max(kernel) > max(stride):
        kernel, stride, padding = 3, 1, 1
        for pool in STEM_POOLS:
            if pool in dict(model.named_modules()):
                model.set_submodule(pool, nn.Identity())
    elif conv.in_channels == spec.channels:
        return
    new = nn.Conv2d(spec.channels, conv.out_channels, kernel, stride, padding, bias=conv.bias is not None)
    nn.init.kaiming_normal_(new.weight, mode="fan_out", nonlinearity="relu")
    model.set_submodule(name, new)


def _try(model: nn.Module, name: str, spec: InputSpec, classes: int) -> None:
    """One image through the model, and none, so that a misfit is found before training."""
    training = model.training
    model.eval()
    for count in (1, 0):  # a rank without a sample runs an empty batch
        try:
            with torch.no_grad():
                logits = model(torch.zeros(count, spec.channels, spec.height, spec.width))
        except (RuntimeError, AssertionError, ValueError) as error:
            what = f"{spec.height}x{spec.width}x{spec.channels} images" if count else "an empty batch"
            fix = f"try --image_size {_usual_size(name)}" if count else "which some ranks need; take another model"
            raise ValueError(f"{name} cannot take {what} ({one_line(error)[:100]}); {fix}") from error
        if logits.shape != (count, classes):
            raise ValueError(f"{name} gives an output of shape {list(logits.shape)}, not one score per class")
    model.train(training)


def _usual_size(name: str) -> int:
    """A side length in pixels that the model is known to take."""
    if name.startswith("timm/"):
        return _pretrained_input(name).get("size", 224)
    return MINIMUM_SIZE.get(name, 224)
