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
    lines, names = [*data.train.notes, *data.evaluation.notes], data.class_names
    for split, word in ((data.train, "training"), (data.evaluation, "evaluation")):
        absent = [names[index] for index in np.flatnonzero(_counts(split, len(names)) == 0)]
        if absent:
            lines.append(f"{len(absent)} of {len(names)} classes have no {word} image: {join_names(absent)}")
    count = int(data.evaluation.readable.sum())
    if count < _FEW:
        fix = "give more with --eval_fraction or --eval_split"
        lines.append(f"{count} evaluation images are too few to compare models or checkpoints; {fix}")
    return [printable(line) for line in dict.fromkeys(lines)]


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
