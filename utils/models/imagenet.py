"""Published weights with ImageNet's classes: the names of the classes, and the head, kept for known classes."""

import importlib.util
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torchvision
from torch import nn

from utils.config.settings import TrainConfig
from utils.errors import UserError
from utils.models.matching import copy_matching, heads_of
from utils.models.published import loading_weights

CLASSES: list[str] = torchvision.models.get_model_weights("resnet18").DEFAULT.meta["categories"]
"""Names of the 1,000 classes of ImageNet-1k, in the order of the outputs of all torchvision models."""
_ENDS = ["n01440764", "n15075141"]  # the first and the last synset


def check_classes(config: TrainConfig) -> None:
    """Raise UserError unless the published weights of this model have ImageNet's 1,000 classes."""
    if config.model.startswith("timm/"):
        import timm

        cfg = timm.get_pretrained_cfg(config.model[5:])
        classes = cfg.num_classes if cfg else 0
        if classes != len(CLASSES):
            counts = f"{classes or 'no'} classes, not ImageNet's {len(CLASSES)}"
            fix = "use weights whose tag ends in in1k, or train a model on your classes"
            raise UserError(f"--model {config.model}: its weights have {counts}", fix)


def names_as_in(names: Sequence[str]) -> list[str]:
    """ImageNet's 1,000 classes in the order of the outputs, by the names that a data set uses.

    `names` are the data set's classes: some or all of `CLASSES`, some or all synsets such as n01440764, or lists of
    words such as "tench, Tinca tinca" of all 1,000 classes in ImageNet's order, or of some if timm is installed.
    ImageNet's order is that of the sorted synsets. Raises UserError for other names.
    """
    synsets = [name for name in names if re.fullmatch(r"n\d{8}", name)]
    complete = len(names) == len(CLASSES)
    if len(synsets) == len(names):
        known = sorted(synsets) if complete and [min(names), max(names)] == _ENDS else _from_timm().label_names()
    elif complete and sum(a in b.split(", ") for a, b in zip(CLASSES, names, strict=True)) > 0.9 * len(CLASSES):
        known = list(names)  # torchvision changed a few names, because they would occur twice
    elif set(names) <= set(CLASSES) or importlib.util.find_spec("timm") is None:
        known = CLASSES
    else:
        words = _from_timm().label_descriptions()
        known = words if all(words.count(name) == 1 for name in names) else CLASSES
    unknown = sorted(set(names) - set(known))
    if unknown:
        problem = f"the class {unknown[0]!r} of --data is not a class of ImageNet"
        raise UserError(problem, f"name classes by synset, such as n01440764, or as torchvision does: {CLASSES[0]!r}")
    return known


def _from_timm() -> Any:
    """The synsets and the lists of words of ImageNet's classes in the order of the outputs."""
    if importlib.util.find_spec("timm") is None:
        problem = "--data has some of ImageNet's synsets as classes, and timm, which lists all, is not installed"
        raise UserError(problem, "pip install timm, or use data with all 1,000 classes")
    from timm.data import ImageNetInfo

    return ImageNetInfo("imagenet-1k")


def published_model(config: TrainConfig, **arguments: Any) -> nn.Module:
    """The network of --model with its published weights and their head."""
    with loading_weights(config):
        if config.model.startswith("timm/"):
            import timm

            return timm.create_model(config.model[5:], pretrained=True, **arguments)
        return torchvision.models.get_model(config.model, weights="DEFAULT", **arguments)


def load_published(config: TrainConfig, model: nn.Module) -> None:
    """Load the published weights of --model, with their head, into a model of `build_model` with 1,000 outputs."""
    tensors = published_model(config).state_dict()  # some have extra heads for training
    model.load_state_dict({name: tensors[name] for name in model.state_dict()})


def version_of(config: TrainConfig) -> str:
    """The tag of the published weights, such as IMAGENET1K_V1."""
    if config.model.startswith("timm/"):
        import timm

        cfg = timm.get_pretrained_cfg(config.model[5:])
        return (cfg and cfg.tag) or ""
    return torchvision.models.get_model_weights(config.model).DEFAULT.name


def keep_head(model: Any, config: TrainConfig, names: Sequence[str]) -> None:
    """Copy the rows of the published head by class name if the published weights know all of the classes `names`."""
    there = _classes_of_weights(config.model, names) if names else []
    if not there:
        return
    arguments: dict[str, Any] = {key: value for key, value in config.model_args.items() if key != "num_classes"}
    published = published_model(config, **arguments)
    heads = tuple(f"{name}." for name in heads_of(published))
    tensors = {name: tensor for name, tensor in published.state_dict().items() if name.startswith(heads)}
    copy_matching(model, tensors, there, names)
    model.head_change = f"head of the published weights for all {len(names)} classes"


def _classes_of_weights(name: str, wanted: Sequence[str]) -> list[str]:
    """The classes of the published weights, by the names that the data uses; empty if not all `wanted` are known."""
    if name.startswith("timm/"):
        import timm
        from timm.data import ImageNetInfo, infer_imagenet_subset

        cfg = timm.get_pretrained_cfg(name[5:])
        number = cfg.num_classes if cfg else 0
        namings: list[Any] = [cfg.label_names] if cfg and cfg.label_names else []
        if number != len(CLASSES) and (subset := infer_imagenet_subset({"num_classes": number})):
            info = ImageNetInfo(subset)
            namings += [info.label_names(), info.label_descriptions()]
        for names in namings:
            counts = Counter(names)
            if all(counts[each] == 1 for each in wanted):
                return list(names)
        if number != len(CLASSES):
            return []
    try:
        return names_as_in(wanted)
    except UserError:
        return []
