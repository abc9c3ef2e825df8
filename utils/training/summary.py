"""What is printed about a model and its data: classes, parameters, and what depends on the
topology.
"""

from collections.abc import Iterable

import numpy as np
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from utils.config.settings import TrainConfig
from utils.console import join_names, printable
from utils.data.splits import Data, Split
from utils.models.checking import has_batch_norm


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
    names = ("dropout", "drop_prob", "drop_rate", "attention_dropout")
    for layer in module.modules():
        rates = [getattr(layer, name, 0.0) for name in names]
        if isinstance(layer, _DropoutNd) or type(layer).__name__ == "StochasticDepth":
            rates.append(layer.p)
        if layer.training and any(isinstance(rate, int | float) and rate > 0 for rate in rates):
            return True
    return False


# evaluation images; with fewer, the 95 % interval of an accuracy of 90 % is wider than 8 points
FEW = 200
# times as many images; the smallest imbalance factor of the long-tailed CIFAR sets (Cui et al.,
# 2019)
_UNEQUAL = 10


def classes_row(data: Data) -> str:
    """The number of classes, and the smallest and the largest one in training and evaluation."""
    names, parts = data.class_names, ((data.train, "training"), (data.evaluation, "evaluation"))
    labels = data.train.labels
    several = f", {labels.sum() / len(labels):.1f} per image" if labels.ndim == 2 else ""
    counts = ", ".join(f"{_range(split, names)} {word} images" for split, word in parts)
    return f"{len(names)}{several}, each with {counts}"


def warn_about_data(data: Data, config: TrainConfig) -> list[str]:
    """Lines to print about the data at the start of a run."""
    lines, names = [*data.train.notes, *data.evaluation.notes], data.class_names
    if data.evaluation.name == "test":
        fix = "with --eval_fraction 0.1, a hold-out chooses it, and eval.py --split test then gives the score"
        lines.append(
            f"split test chooses the best checkpoint, so its score will be slightly too high; {fix}"
        )
    for split, word in ((data.train, "training"), (data.evaluation, "evaluation")):
        absent = [
            names[index] for index in np.flatnonzero(count_classes(split.labels, len(names)) == 0)
        ]
        if absent:
            lines.append(
                f"{len(absent)} of {len(names)} classes have no {word} image: {join_names(absent)}"
            )
    counts = count_classes(data.train.labels, len(names))
    rarest = int(np.where(counts, counts, len(data.train) + 1).argmin())
    if (always := always_answering(data)) and counts.max() >= _UNEQUAL * counts[rarest]:
        name, share = always
        problem = f"class {name} has {counts.max()} of {len(data.train)} training images, {names[rarest]} has "
        problem += f"{counts[rarest]}: always predicting {name} has an accuracy of {share:.4f}"
        fix = "; consider --sampler balanced or --class_weights balanced"
        lines.append(problem + fix * (config.sampler == "shuffle" and not config.class_weights))
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
    """For example `12 (class cat) to 40 (class dog)`, or `12` if all classes have the same number."""
    counts = count_classes(split.labels, len(names))
    least, most = int(counts.argmin()), int(counts.argmax())
    if counts[least] == counts[most]:
        return str(counts[least])
    return " to ".join(
        f"{counts[index]} (class {printable(names[index])})" for index in (least, most)
    )


def count_classes(labels: np.ndarray, classes: int) -> np.ndarray:
    """The number of samples of each class, int64 [classes]; `labels` are those of a split."""
    return (
        labels.sum(0, dtype=np.int64)
        if labels.ndim == 2
        else np.bincount(labels, minlength=classes)
    )
