"""Find images of a run that are in both splits, or in two classes of one of them."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import normalize

from utils.console import join_names, progress
from utils.data.splits import Data, Split, fingerprint_of

# The least correlation of two thumbnails of the same picture. The lowest of 40 re-encoded and
# resized photographs has 0.9989, and the highest of 153 x 245 pairs of different ones 0.79.
_SAME = 0.99
_BLOCK = 256  # rows of the matrix of correlations that are computed at once


class Copy(NamedTuple):
    """Two images: the same file (sign =) or the same picture (sign ~)."""

    same_class: bool
    same_split: bool
    path: str
    sign: str
    other: str


def find_copies(data: Data, thumbnails: Sequence[np.ndarray]) -> list[Copy]:
    """The images of evaluation that are also in training, and those with two classes in one split;
    those with two classes come first.

    The same pictures are found if the thumbnails of evaluation and training are given, float32
    [N, D] each. Raises OSError if a file cannot be read.
    """
    copies = _same_files(data)
    known = {copy.path for copy in copies}
    for row, best in _same_pictures(*map(torch.tensor, thumbnails)) if thumbnails else ():
        copy = _compare((data.evaluation, row), "~", (data.train, best))
        copies += [copy] * (copy.path not in known)
    return sorted(copies)


def _compare(sample: tuple[Split, int], sign: str, other: tuple[Split, int]) -> Copy:
    pair = sample, other
    same_class = np.array_equal(*(split.labels[position] for split, position in pair))
    path, of = ("/".join(split.describe(n).split("/")[-3:]) for split, n in pair)
    return Copy(same_class, sample[0] is other[0], path, sign, of)


def _same_files(data: Data) -> list[Copy]:
    """The images with the same bytes as one before them. Only files with equal checksums, which are
    those of both ends, are read.
    """
    splits = data.train, data.evaluation
    if any(split.checksums is None for split in splits):
        return []
    samples = [(split, n) for split in splits for n in range(len(split))]
    sums = np.concatenate([split.checksums[split.image_index] for split in splits])
    _, index, counts = np.unique(sums, return_inverse=True, return_counts=True)
    groups = defaultdict(list)
    copies = []
    for number in progress("comparing files")(np.flatnonzero(counts[index] > 1)):
        split, n = sample = samples[number]
        group = groups[fingerprint_of(split.images[int(split.image_index[n])])]
        copies += sorted(_compare(sample, "=", other) for other in group)[:1]
        group.append(sample)
    return [copy for copy in copies if not all(copy[:2])]


def _same_pictures(*thumbnails: torch.Tensor) -> list[tuple[int, int]]:
    """The rows of the first thumbnails that show the picture of one of the others, and its row."""
    some, others = (normalize(each - each.mean(1, keepdim=True)) for each in thumbnails)
    found = [(block @ others.T).max(1) for block in some.split(_BLOCK)]
    values, best = (torch.cat(parts).tolist() for parts in zip(*found, strict=True))
    return [(row, best[row]) for row, value in enumerate(values) if value > _SAME]


def describe_copies(copies: Sequence[Copy], most: int) -> list[str]:
    """A line with the numbers of copies and at most this many pairs, if there are any."""
    both = sum(not copy.same_split for copy in copies)
    several = sum(not copy.same_class for copy in copies)
    counts = f"{both} evaluation images are also in training, {several} images have two classes"
    names = (" ".join(copy[2:]) for copy in copies)
    return [f"{counts}: {join_names(names, most)}"] * bool(copies)
