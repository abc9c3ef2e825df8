"""The head of published weights, which is kept for classes that it knows."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from utils.config.settings import TrainConfig
from utils.errors import UserError
from utils.models.imagenet import CLASSES, names_as_in, published_model
from utils.models.matching import copy_matching, heads_of


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
