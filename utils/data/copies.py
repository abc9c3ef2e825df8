"""Find images of a run that are in both splits, or in two classes of one of them."""

from collections import Counter, defaultdict
from typing import Any, NamedTuple

import numpy as np

from utils.console import join_names, progress
from utils.data.splits import Data, Split, fingerprint_of

# The least correlation of two thumbnails of the same picture. The lowest of 160 re-encoded and
# resized photographs has 0.9975, and the highest of 153 x 244 pairs of different ones 0.79. All 12
# pairs above it in CIFAR-10, of 5e8, are copies.
_SAME = 0.99


class Copy(NamedTuple):
    """Two images: the same file (sign =) or the same picture (sign ~)."""

    same_class: bool
    same_split: bool
    path: str
    sign: str
    other: str


def find_copies(data: Data, train_thumbnails: Any, eval_thumbnails: Any) -> list[Copy]:
    """The images of evaluation that are also in training, and those with two classes in one split;
    those with two classes come first.

    The same pictures are found if the thumbnails are given, float32 [N, D] each. Raises OSError if
    a file cannot be read.
    """
    copies = _same_files(data)
    if train_thumbnails is not None:
        known = {copy.path for copy in copies}
        for row, picture in enumerate(eval_thumbnails):
            mirrored = picture.reshape(16, 16)[:, ::-1].ravel()  # as cached views may be
            found = (train_thumbnails @ np.stack([picture, mirrored], axis=1)).max(axis=1)
            copy = _compare(data.evaluation, row, "~", data.train, int(found.argmax()))
            if found.max() > _SAME and copy.path not in known:
                copies.append(copy)
    return sorted(copies)


def _compare(split: Split, position: int, sign: str, other: Split, place: int) -> Copy:
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
    groups: dict = defaultdict(list)
    copies = []
    for split, n, row, ends in progress("comparing files")(rows):
        if counts[ends] > 1:
            group = groups[fingerprint_of(split.images[row])]
            copies += sorted(_compare(split, n, "=", *other) for other in group)[:1]
            group.append((split, n))
    return [copy for copy in copies if not all(copy[:2])]


def describe_copies(copies: list[Copy]) -> list[str]:
    """A line with the numbers of copies and the names of some, if there are any."""
    both = sum(not copy.same_split for copy in copies)
    several = sum(not copy.same_class for copy in copies)
    line = f"{both} evaluation images are also in training, {several} images have two classes"
    return [f"{line}: {join_names((' '.join(copy[2:]) for copy in copies), 3)}"] * bool(copies)
