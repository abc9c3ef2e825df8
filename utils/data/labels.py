"""Labels and the names of classes."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from utils.console import join_names, nfc


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
