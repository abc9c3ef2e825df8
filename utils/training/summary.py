"""What is printed about a model and its data: classes, parameters, and what depends on the
topology.
"""

from collections.abc import Iterable

import numpy as np
from torch import nn

from utils.console import join_names, printable
from utils.data import Data, Split
from utils.models import has_batch_norm
from utils.settings.train import TrainConfig


def describe_parameters(module: nn.Module) -> str:
    """How many parameters a model has, and how many of them are trained, if not all."""
    total = count_parameters(module.parameters())
    trained = count_parameters(p for p in module.parameters() if p.requires_grad)
    return f"{total:,} parameters" + (f", {trained:,} of them trained" if trained < total else "")


def count_parameters(parameters: Iterable[nn.Parameter]) -> int:
    """The number of values in these parameters."""
    return sum(parameter.numel() for parameter in parameters)


def differences(config: TrainConfig, module: nn.Module, grad_accum: int, microbatches: int) -> str:
    """What would differ on another number of processes, besides rounding, and how to avoid it;
    empty if nothing.
    """
    if config.microbatches:
        return ""
    parts = []
    if has_batch_norm(module) and not config.sync_batchnorm:
        parts.append("batch statistics (unless --sync_batchnorm)")
    elif has_batch_norm(module) and grad_accum > 1:
        parts.append("batch statistics (unless --grad_accum 1)")
    if has_dropout(module):
        parts.append(f"dropout masks (unless processes x accumulation is {microbatches})")
    if config.comm_hook != "no":
        parts.append(f"gradients, rounded to {config.comm_hook} (unless --comm_hook no)")
    if not parts:
        return ""
    return f"on another number of processes, besides rounding: {', '.join(parts)}"


def has_dropout(module: nn.Module) -> bool:
    """Whether a layer draws random numbers in training: dropout, also of attention weights, or
    stochastic depth.
    """
    names = ("p", "dropout", "drop_prob", "drop_rate", "attention_dropout")
    rates = [getattr(each, name, 0) for each in module.modules() if each.training for name in names]
    return any(isinstance(rate, int | float) and 0 < rate <= 1 for rate in rates)


# evaluation images; with fewer, the 95 % interval of an accuracy of 90 % is wider than 8 points
FEW_IMAGES = 200


def classes_row(data: Data) -> str:
    """The number of classes, and the smallest and the largest one in training and evaluation."""
    names = data.class_names
    parts = ((data.train, "training"), (data.evaluation, "evaluation"))
    labels = data.train.labels
    several = f", {labels.sum() / len(labels):.1f} per image" if labels.ndim == 2 else ""
    counts = ", ".join(f"{_range(split, names)} {word} images" for split, word in parts)
    return f"{len(names)}{several}, each with {counts}"


def warn_about_data(data: Data) -> list[str]:
    """Lines to print about the data at the start of a run."""
    lines = [*data.train.notes, *data.evaluation.notes]
    names = data.class_names
    if data.evaluation.name == "test":
        problem = "split test chooses the best checkpoint, so its score will be slightly too high"
        fix = "with --eval_fraction 0.1, a hold-out chooses it, "
        fix += "and eval.py --split test then gives the score"
        lines.append(f"{problem}; {fix}")
    for split, word in ((data.train, "training"), (data.evaluation, "evaluation")):
        counts = count_classes(split.labels, len(names))
        if absent := [name for name, count in zip(names, counts, strict=True) if not count]:
            problem = f"{len(absent)} of {len(names)} classes have no {word} image"
            lines.append(f"{problem}: {join_names(absent)}")
    return [printable(line) for line in dict.fromkeys(lines)]


def always_answering(data: Data) -> tuple[str, float] | None:
    """The most frequent class of the training images, and the evaluation accuracy of always
    predicting it.

    None for multi-label data.
    """
    labels = data.train.labels
    if labels.ndim == 2:
        return None
    most = int(np.bincount(labels).argmax())
    return data.class_names[most], float((data.evaluation.labels == most).mean())


def _range(split: Split, names: list[str]) -> str:
    """For example `12 (class cat) to 40 (class dog)`, or `12` if all have the same number."""
    counts = count_classes(split.labels, len(names))
    least = int(counts.argmin())
    most = int(counts.argmax())
    if counts[least] == counts[most]:
        return str(counts[least])
    ends = (f"{counts[index]} (class {printable(names[index])})" for index in (least, most))
    return " to ".join(ends)


def count_classes(labels: np.ndarray, classes: int) -> np.ndarray:
    """The number of samples of each class, int64 [classes]; `labels` are those of a split."""
    if labels.ndim == 2:
        return labels.sum(0, dtype=np.int64)
    return np.bincount(labels, minlength=classes)
