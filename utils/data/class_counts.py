"""How many samples each class has, for the table at the start of a run."""

import numpy as np

from utils.console import join_names, printable
from utils.data.splits import Data, Split

_FEW = 20  # evaluation samples; one of fewer changes the accuracy by more than 5 percent


def classes_row(data: Data) -> str:
    """The number of classes, and the smallest and the largest one in training and evaluation."""
    names, parts = data.class_names, ((data.train, "training"), (data.evaluation, "evaluation"))
    labels = data.train.labels
    several = f", {labels.sum() / len(labels):.1f} per image" if labels.ndim == 2 else ""
    counts = ", ".join(f"{_range(split, names)} {word} images" for split, word in parts)
    return f"{len(names)}{several}, each with {counts}"


def remarks(data: Data) -> list[str]:
    """Lines to print about the data at the start of a run."""
    lines = [*data.train.notes, *data.evaluation.notes, *absent_classes(data), *few_images(data)]
    return [printable(line) for line in dict.fromkeys(lines)]


def absent_classes(data: Data) -> list[str]:
    """A line for each of the two splits that lacks a class."""
    lines = []
    for split, word in ((data.train, "training"), (data.evaluation, "evaluation")):
        absent = [data.class_names[index] for index in np.flatnonzero(_counts(split, len(data.class_names)) == 0)]
        if absent:
            lines.append(f"{len(absent)} of {len(data.class_names)} classes have no {word} image: {join_names(absent)}")
    return lines


def few_images(data: Data) -> list[str]:
    """A line if the evaluation has so few samples that its accuracy means little."""
    count = int(data.evaluation.readable.sum())
    if count >= _FEW:
        return []
    fix = "give more with --eval_fraction or --eval_split"
    return [f"{count} evaluation images are too few to compare models or checkpoints; {fix}"]


def _range(split: Split, names: list[str]) -> str:
    """For example `12 (class cat) to 40 (class dog)`, or `12` if all classes have the same number."""
    counts = _counts(split, len(names))
    least, most = int(counts.argmin()), int(counts.argmax())
    if counts[least] == counts[most]:
        return str(counts[least])
    return " to ".join(f"{counts[index]} (class {printable(names[index])})" for index in (least, most))


def _counts(split: Split, classes: int) -> np.ndarray:
    """The number of readable samples of each class, int64 [classes]."""
    labels = split.labels[split.readable]
    return labels.sum(0, dtype=np.int64) if labels.ndim == 2 else np.bincount(labels, minlength=classes)
