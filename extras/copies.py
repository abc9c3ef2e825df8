"""Find images of a run that are in both splits, or in two classes of one of them."""

from collections import Counter, defaultdict
from typing import Any, NamedTuple

import numpy as np

from utils.console import join_names, progress
from utils.data import Data, Split, fingerprint_of
from utils.training import Run

# The least correlation of two thumbnails of the same picture. The lowest of 160 re-encoded and
# resized photographs has 0.9975, and the highest of 153 x 244 pairs of different ones 0.79. All 12
# pairs above it in CIFAR-10, of 5e8, are copies.
_SAME = 0.99
_BLOCK = 128  # thumbnails that are compared with all others together


class Copy(NamedTuple):
    """Two images: the same file (sign =) or the same picture (sign ~)."""

    same_class: bool
    same_split: bool
    path: str
    sign: str
    other: str


def copies_of(run: Run) -> tuple[list[Copy], list[str]]:
    """The copies among a run's images, and lines about them, on the main process; collective."""
    copies: list[Copy] = []
    with run.ranks.agree("looking for copies", no_timeout=True):
        if run.ranks.is_main:
            batches = run.train_batches, run.evaluator.batches
            copies = find_duplicates(run.data, *(each.dataset.thumbnails for each in batches))
    return copies, describe_copies(copies)


def find_duplicates(data: Data, train_thumbnails: Any, eval_thumbnails: Any) -> list[Copy]:
    """The images of evaluation that are also in training, and those with two classes in one split;
    those with two classes come first.

    The same pictures are found if the thumbnails are given, float32 [N, D] each. Raises OSError if
    a file cannot be read.
    """
    copies = _same_files(data)
    if train_thumbnails is not None:
        known = {copy.path for copy in copies}
        for start in range(0, len(eval_thumbnails), _BLOCK):
            block = np.asarray(eval_thumbnails[start : start + _BLOCK])
            mirrored = block.reshape(-1, 16, 16)[:, :, ::-1].reshape(block.shape)  # as some views
            found = np.maximum(block @ train_thumbnails.T, mirrored @ train_thumbnails.T)
            for row in np.flatnonzero(found.max(axis=1) > _SAME).tolist():
                other = int(found[row].argmax())
                copy = _copy_of(data.evaluation, start + row, "~", data.train, other)
                if copy.path not in known:
                    copies.append(copy)
    return sorted(copies)


def _copy_of(split: Split, position: int, sign: str, other: Split, place: int) -> Copy:
    same_class = np.array_equal(split.labels[position], other.labels[place])
    names = split.describe(position), sign, other.describe(place)
    return Copy(same_class, split is other, *names)


def _same_files(data: Data) -> list[Copy]:
    """The images with the same bytes as one before them. Only files with equal checksums, which are
    those of both ends, are read.
    """
    if data.train.checksums is None:  # then those of evaluation are not known either
        return []
    rows = [
        (split, n, int(row), split.checksums[row])
        for split in (data.train, data.evaluation)
        for n, row in enumerate(split.image_index)
    ]
    counts = Counter(row[-1] for row in rows)
    seen: dict = defaultdict(list)  # the split and position of each image, by its bytes
    copies: list[Copy] = []
    for split, n, row, ends in progress("comparing files")(rows):
        if counts[ends] > 1:
            same_bytes = seen[fingerprint_of(split.images[row])]
            own = [_copy_of(split, n, "=", *other) for other in same_bytes]
            by_class_and_split = {(copy.same_class, copy.same_split): copy for copy in own}
            copies += by_class_and_split.values()
            if (True, True) not in by_class_and_split:  # one of each class and split is enough
                same_bytes.append((split, n))
    return [copy for copy in copies if not (copy.same_class and copy.same_split)]


def describe_copies(copies: list[Copy]) -> list[str]:
    """A line with the numbers of copies and the names of some, if there are any."""
    if not copies:
        return []
    both = len({copy.path for copy in copies if not copy.same_split})
    several = len({copy.path for copy in copies if not copy.same_class})
    line = f"{both} evaluation images are also in training, {several} images have two classes"
    pairs = (f"{copy.path} {copy.sign} {copy.other}" for copy in copies)
    return [f"{line}: {join_names(pairs, 3)}"]
