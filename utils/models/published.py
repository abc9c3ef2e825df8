"""Published weights of torchvision's and timm's models: their input, errors in loading them, and
ImageNet's classes.
"""

import importlib.util
import pickle
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn

from utils.errors import UserError, one_line
from utils.models.layers import OF_TENSORFLOW, head_prefixes
from utils.models.matching import copy_matching, zero_heads
from utils.settings.models import ModelSettings


def timm_weights(name: str) -> Any:
    """timm's description of the published weights of timm/NAME; None if it has none, and for
    torchvision's models.
    """
    if not name.startswith("timm/"):
        return None
    import timm

    return timm.get_pretrained_cfg(name[5:])


def torchvision_weights(name: str) -> Any:
    """torchvision's description of the published weights of a model."""
    return torchvision.models.get_model_weights(name).DEFAULT


def published_input(name: str) -> dict:
    """The settings of the input of the published weights: channels, size, mean, std, and how
    evaluation crops.

    Empty for a model that neither timm nor torchvision describes.
    """
    cfg = timm_weights(name)
    if cfg:
        return input_of(cfg.to_dict())
    if name not in torchvision.models.list_models():
        return {}
    preset = torchvision_weights(name).transforms()
    (side,) = preset.crop_size
    (resized,) = preset.resize_size
    is_half = name in OF_TENSORFLOW
    about = {
        "mean": [0.5, 0.5, 0.5] if is_half else preset.mean,
        "std": [0.5, 0.5, 0.5] if is_half else preset.std,
        "input_size": [3, side, side],
        "crop_pct": side / resized,
        "interpolation": preset.interpolation.value,
    }
    return input_of(about)


def input_of(cfg: Mapping) -> dict:
    """The settings of the input in timm's description of weights.

    Raises errors of many classes if it is malformed.
    """
    values: dict = {name: [*map(float, cfg[name])] for name in ("mean", "std") if name in cfg}
    if "input_size" in cfg:
        values |= {"channels": cfg["input_size"][0], "image_size": list(cfg["input_size"][1:])}
    if "crop_pct" in cfg:
        values |= {"eval_crop": float(cfg["crop_pct"]), "squash": cfg.get("crop_mode") == "squash"}
        values["interpolation"] = "bicubic" if cfg.get("interpolation") == "bicubic" else "bilinear"
    return values


def _fix_of_weights(config: ModelSettings) -> str:
    """What to do if published weights cannot be loaded."""
    arguments = "leave out --model_args, or " if config.model_args else ""
    cfg = timm_weights(config.model)
    if cfg:
        from huggingface_hub.constants import HF_HUB_CACHE

        get = f"run `hf download {cfg.hf_hub_id}` elsewhere and copy the files to {HF_HUB_CACHE}"
        return f"{arguments}without a network, {get}"
    url = torchvision_weights(config.model).url
    path = Path(torch.hub.get_dir()) / "checkpoints" / Path(url).name
    return f"{arguments}without a network, or if the file is damaged, save {url} as {path}"


CLASSES = torchvision_weights("resnet18").meta["categories"]
"""Names of the 1,000 classes of ImageNet-1k, in the order of the outputs of all torchvision
models."""
_ENDS = ["n01440764", "n15075141"]  # the first and the last synset


def published_outputs(name: str) -> int:
    """The number of outputs of the published weights of a model."""
    cfg = timm_weights(name)
    return cfg.num_classes if cfg else len(CLASSES)


def names_as_in(names: Sequence[str]) -> list[str]:
    """ImageNet's 1,000 classes in the order of the outputs, by the names that a data set uses.

    `names` are the data set's classes: some or all of `CLASSES`, some or all synsets such as
    n01440764, or lists of words such as "tench, Tinca tinca". timm has the synsets and the words.
    Without it, all 1,000 classes are needed; ImageNet's order is that of the sorted synsets. Raises
    UserError for other names.
    """
    orders = [CLASSES]
    has_all = len(names) == len(CLASSES)
    if importlib.util.find_spec("timm"):
        from timm.data import ImageNetInfo

        known: Any = ImageNetInfo("imagenet-1k")
        orders += [known.label_names(), known.label_descriptions()]
    elif has_all and [min(names), max(names)] == _ENDS:
        orders.append(sorted(names))
    for order in orders:
        if all(order.count(name) == 1 for name in names):
            return order
    # torchvision changed a few names, because they would occur twice
    same = [a in b.split(", ") for a, b in zip(CLASSES, names, strict=False)]
    if has_all and sum(same) > 0.9 * len(CLASSES):
        return list(names)
    unknown = min({*names} - {*CLASSES}, default=names[0])
    problem = f"the class {unknown!r} of --data is not a class of ImageNet"
    fix = f"name them as torchvision does, such as {CLASSES[0]!r}, or by synset, such as n01440764"
    raise UserError(problem, f"{fix} (some of the synsets need timm)")


def published_model(config: ModelSettings, **arguments: Any) -> nn.Module:
    """The network of --model with its published weights and their head.

    Raises UserError if they cannot be loaded.
    """
    try:
        if config.model.startswith("timm/"):
            import timm

            return timm.create_model(config.model[5:], pretrained=True, **arguments)
        return torchvision.models.get_model(config.model, weights="DEFAULT", **arguments)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = one_line(error)[:200]
        problem = f"--pretrained: the weights of {config.model} cannot be loaded ({reason})"
        raise UserError(problem, _fix_of_weights(config)) from error


def version_of(config: ModelSettings) -> str:
    """The tag of the published weights, such as IMAGENET1K_V1."""
    cfg = timm_weights(config.model)
    return cfg.tag or "" if cfg else torchvision_weights(config.model).name


def copy_published(
    model: Any, config: ModelSettings, arguments: dict, names: Sequence[str]
) -> None:
    """Copy the published weights into the model, whose head starts at zero.

    If all of the classes `names` are classes of ImageNet, and so are those of the weights, the rows
    of the head are copied by class name.
    """
    zero_heads(model)
    tensors = published_model(config, **arguments).state_dict()
    there = []
    if names and published_outputs(config.model) == len(CLASSES):
        with suppress(UserError):
            there = names_as_in(names)
            model.head_change = f"head of the published weights for all {len(names)} classes"
    if not there:
        heads = head_prefixes(model)
        tensors = {name: each for name, each in tensors.items() if not name.startswith(heads)}
    copy_matching(model, tensors, there, names)
