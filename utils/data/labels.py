"""Labels of samples: classes, int64 [N], or multi-hot rows, uint8 [N, classes], for several classes or none."""

from dataclasses import replace

import numpy as np

from utils.config.settings import TrainConfig
from utils.console import join_names
from utils.data.splits import Split
from utils.errors import UserError


def multi_hot(split: str, counts: np.ndarray, flat: np.ndarray, classes: int) -> np.ndarray:
    """The multi-hot rows of samples with `counts` [N] classes each, listed one after the other in `flat`.

    Raises ValueError if one is outside 0 .. classes - 1.
    """
    samples = np.repeat(np.arange(len(counts)), counts)
    wrong = np.flatnonzero((flat < 0) | (flat >= classes))
    if len(wrong):
        problem = f"has the label {flat[wrong[0]]}, outside 0..{classes - 1}"
        raise UserError(f"image {samples[wrong[0]]} of split {split!r} {problem}", "fix the labels")
    rows = np.zeros((len(counts), classes), np.uint8)
    rows[samples, flat] = 1
    return rows


def renumber(split: Split, class_names: list[str], wanted: list[str]) -> Split:
    """Map labels, indices into `class_names`, to indices into `wanted`.

    Raises ValueError if `wanted` lacks a class of the split.
    """
    if class_names == wanted:
        return split
    number = {name: index for index, name in enumerate(wanted)}
    table = np.asarray([number.get(name, -1) for name in class_names])
    is_multi = split.labels.ndim == 2
    present = np.flatnonzero(split.labels.any(0)) if is_multi else np.unique(split.labels)
    unknown = sorted({class_names[label] for label in present if table[label] < 0})
    if unknown:
        raise UserError(
            f"the checkpoint does not have the class {unknown[0]!r}, only {join_names(wanted)}",
            "evaluate data with these classes",
        )
    if not is_multi:
        return replace(split, labels=table[split.labels])
    labels = np.zeros((len(split), len(wanted)), np.uint8)
    labels[:, table[present]] = split.labels[:, present]
    return replace(split, labels=labels)


def check_kind(split: Split, config: TrainConfig) -> None:
    """Raise ValueError if the labels of a split do not suit --task, or if none of its images has one."""
    if split.labels.ndim == 1:
        if config.task == "multilabel":
            problem = f"--task multilabel: each image of --data {config.data} has one label"
            raise UserError(problem, "use lists of labels, or train with --task classification")
    elif config.task not in ("auto", "multilabel"):
        problem = f"--task {config.task}: an image of --data {config.data} may have several labels"
        raise UserError(problem, "use other data, or train with --task multilabel")
    elif not split.labels.any():
        raise UserError(f"no image of split {split.name!r} has a label", "fix the labels")
