"""Divide a split: hold-outs and folds, also of groups of samples that stay together."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from utils.config import require
from utils.console import join_names, say
from utils.data.order import fold_in, permutation
from utils.data.spelling import alike
from utils.data.splits import Split
from utils.errors import UserError


def hold_out(
    split: Split, fraction: float, seed: int, fold: str | None = None, keys: Sequence[str] = ()
) -> tuple[Split, Split]:
    """Hold out a random `fraction` of each class, or a fold such as "1/5"; returns (the rest, the
    hold-out).

    The size of the hold-out is exact to one sample, per class and in total. A single sample of a
    class is not held out, except in a fold: the folds of a split share no sample, and have all of
    them together. Multi-hot labels are divided by their sets of classes, of which single ones may
    be held out. Samples with the same key stay together if there are `keys`. Then all this holds
    for groups instead of samples; the class of a group is that of its first sample. Raises
    ValueError if either part would be empty.
    """
    key = fold_in(seed, "hold-out")
    is_multi = split.labels.ndim == 2
    kinds = np.packbits(split.labels, axis=1) if is_multi else split.labels
    # the first sample of each group, the group of each sample, and the sizes
    _, first, groups, sizes = np.unique(keys or range(len(split)), True, True, True)
    _, labels, counts = np.unique(kinds[first], return_inverse=True, return_counts=True, axis=0)
    order = permutation(len(first), key, 0)
    # class by class, the largest groups first, in random order among those of equal size
    order = order[np.lexsort((-sizes[order], labels[order]))]
    if fold:
        is_held = _in_fold(fold, order, labels, sizes)
    else:
        # In this order, every (1/fraction)-th sample is held out, from a random start.
        steps = np.floor(np.arange(len(first) + 1) * fraction + key / 2**64)
        is_held = np.zeros(len(first), bool)
        is_held[order] = np.diff(steps) > 0
        is_held &= (counts[labels] > 1) | is_multi
    is_held = is_held[groups]
    kind = f"fold {fold}" if fold else "hold-out"
    name = f"{kind} of {split.name}"
    if keys:
        name += f", {len(sizes)} groups of up to {sizes.max()}"
    problem = f"{name}: would have {is_held.sum()} of {len(split)} samples"
    fix = "change --eval_fraction, --fold or --group_by, or add samples"
    require(0 < is_held.sum() < len(split), problem, fix)
    held = split.select(np.flatnonzero(is_held))
    return split.select(np.flatnonzero(~is_held)), replace(held, name=name)


def _in_fold(fold: str, order: np.ndarray, labels: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Which groups are in the fold, bool [groups].

    In this order, each goes to the fold with the fewest samples of its class. Ties go to the
    fold with the fewest samples in all.
    """
    number, count = map(int, fold.split("/"))
    is_held = np.zeros(len(order), bool)
    filled = np.zeros((labels.max() + 1, count))  # samples of each class in each fold
    for group in order:
        own = filled[labels[group]]
        least = np.lexsort((filled.sum(0), own))[0]
        own[least] += sizes[group]
        is_held[group] = least == number - 1
    return is_held


def group_keys(split: Split, by: str, class_names: Sequence[str]) -> list[str]:
    """The group of each sample by --group_by; one that has none is a group of its own.

    Folders of the same name are one group, as a series may have several classes. A folder that has
    the name of a class is none. Groups whose names only a computer tells apart are joined, with a
    line.
    """
    names = [*map(split.describe, range(len(split)))]
    if split.groups is not None:
        values = [*split.groups]
        found = [values[row] for row in split.image_index]
    elif by == "folder":
        found = [Path(name).parent.name for name in names]
        found = ["" if folder in class_names else folder for folder in found]
    else:
        try:
            pattern = re.compile(by)
        except re.error as error:
            raise UserError(f"--group_by {by}: {error}", "give a regular expression") from None
        matches = [pattern.search(Path(name).name) for name in names]
        found = [match and match[min(1, pattern.groups)] for match in matches]
    keys = [*map(group_text, found)]
    if same := alike(keys):
        pairs = join_names(map(" and ".join, same.items()))
        say(f"--group_by {by}: groups that may be the same are joined: {pairs}")
    return [same.get(key, key) or name for key, name in zip(keys, names, strict=True)]


def group_text(value: object) -> str:
    """The name of the group that a column gives; empty for None and NaN."""
    return "" if value is None or value != value else str(value)


def random_subset(split: Split, count: int | None, seed: int) -> Split:
    """`count` random samples in their original order; all samples if there are fewer, or if `count`
    is None.
    """
    if count is None or count >= len(split):
        return split
    order = permutation(len(split), fold_in(seed, "subset", split.name), 0)
    return split.select(np.sort(order[:count]))
