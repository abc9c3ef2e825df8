"""Labels and the names of classes."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from utils.config import require
from utils.console import join_names, nfc
from utils.data.splits import Split
from utils.errors import UserError
from utils.settings.data import DataSettings


def multi_hot(counts: np.ndarray, flat: np.ndarray, classes: int) -> np.ndarray:
    """The multi-hot rows of samples with `counts` [N] classes each, listed one after the other in
    `flat`.
    """
    rows = np.zeros((len(counts), classes), np.uint8)
    rows[np.repeat(np.arange(len(counts)), counts), flat] = 1
    return rows


def indices_in(names: Sequence, labels: Iterable) -> np.ndarray:
    """The index in `names` of each label, int64 [n], or of its NFC form; -1 for one that is not
    there.
    """
    number = {nfc(name): index for index, name in enumerate(names)}
    number |= {name: index for index, name in enumerate(names)}  # two files may differ only in form
    return np.asarray([number.get(label, number.get(nfc(label), -1)) for label in labels], np.int64)


def distinct(names: Iterable) -> list:
    """The names in their order; of those that are equal in NFC form, the first."""
    first: dict = {}
    for name in names:
        first.setdefault(nfc(name), name)
    return list(first.values())


def lacks_class(label: Any, classes: Iterable, split: str, found: Iterable) -> str:
    """The problem that the training split has no class of a label, with its classes and those of
    the label's split.
    """
    form = repr if str(label) in map(str, classes) else str  # '0' is not 0
    only = join_names(map(form, classes))
    own = join_names(map(form, found))
    return f"the training split has no class {label!r}, only {only} (split {split!r}: {own})"


def split_that_defines_classes(names: Collection[str], wanted: str | None) -> str:
    """`wanted` if it is one of these split names, else train, else the first name."""
    return next((name for name in (wanted, "train") if name and name in names), next(iter(names)))


def renumber(split: Split, class_names: list[str], wanted: list[str]) -> Split:
    """Map labels, indices into `class_names`, to indices into `wanted`.

    Raises ValueError if `wanted` lacks a class of the split.
    """
    if class_names == wanted:
        return split
    numbers = indices_in(wanted, class_names)
    is_multi = split.labels.ndim == 2
    present = np.flatnonzero(split.labels.any(0)) if is_multi else np.unique(split.labels)
    if unknown := sorted(class_names[label] for label in present if numbers[label] < 0):
        problem = (
            f"the checkpoint does not have the class {unknown[0]!r}, only {join_names(wanted)}"
        )
        raise UserError(problem, "evaluate data with these classes")
    one_hot = np.eye(len(wanted), dtype=np.uint8)[numbers]
    return replace(split, labels=split.labels @ one_hot if is_multi else numbers[split.labels])


def check_kind(split: Split, config: DataSettings) -> None:
    """Raise ValueError if the labels of a split do not suit --task, or if none of its images has
    a label.
    """
    several = split.labels.ndim == 2
    task = config.task
    problem = f"--task multilabel: each image of --data {config.data} has one label"
    fix = "use lists of labels, or train with --task classification"
    require(several or task != "multilabel", problem, fix)
    problem = f"--task {task}: an image of --data {config.data} may have several labels"
    fix = "give another --data, or train with --task multilabel"
    require(not several or task in ("auto", "multilabel"), problem, fix)
    problem = f"no image of split {split.name!r} has a label"
    require(not several or split.labels.any(), problem, "correct the labels")
