"""The head of published weights, which is kept for classes that it knows."""

import importlib.util
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torchvision

from utils.config.settings import TrainConfig
from utils.models.matching import copy_matching, heads_of
from utils.models.published import loading_weights


def keep_head(model: Any, config: TrainConfig, names: Sequence[str]) -> None:
    """Copy the rows of the published head by class name if the published weights know all of the classes `names`."""
    there = _classes_of_weights(config.model, names)
    if not there:
        return
    arguments: dict[str, Any] = {key: value for key, value in config.model_args.items() if key != "num_classes"}
    with loading_weights(config):
        if config.model.startswith("timm/"):
            import timm

            published = timm.create_model(config.model[5:], pretrained=True, **arguments)
        else:
            published = torchvision.models.get_model(config.model, weights="DEFAULT", **arguments)
    heads = tuple(f"{name}." for name in heads_of(published))
    tensors = {name: tensor for name, tensor in published.state_dict().items() if name.startswith(heads)}
    copy_matching(model, tensors, there, names)
    model.head_change = f"head of the published weights for all {len(names)} classes"


def _classes_of_weights(name: str, wanted: Sequence[str]) -> list[str]:
    """The class names of the published weights, in the naming that has all the `wanted` ones; empty if none has.

    timm knows the WordNet ids and the names of ImageNet's classes, and torchvision has names of its own.
    """
    number = 1000
    namings: list[Any] = []
    if name.startswith("timm/"):
        import timm

        cfg = timm.get_pretrained_cfg(name[5:])
        number = cfg.num_classes if cfg else 0
        namings = [list(cfg.label_names)] if cfg and cfg.label_names else []
    else:
        namings = [torchvision.models.get_model_weights(name).DEFAULT.meta["categories"]]
    if importlib.util.find_spec("timm") is not None:
        from timm.data import ImageNetInfo, infer_imagenet_subset

        if subset := infer_imagenet_subset({"num_classes": number}):
            info = ImageNetInfo(subset)
            namings += [info.label_names(), info.label_descriptions()]
    for names in namings:
        counts = Counter(names)
        if wanted and all(counts[each] == 1 for each in wanted):
            return list(names)
    return []
