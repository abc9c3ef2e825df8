"""A split of a data set, with labels in memory and images still encoded, and functions that derive
splits.
"""

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, BinaryIO, Protocol

import numpy as np

from utils.config import require
from utils.data.order import permutation
from utils.errors import UserError

EVAL_NAMES = ("validation", "valid", "val", "eval", "test")  # tried in this order


class Images(Protocol):
    """The images of a split: encoded files (bytes), arrays (HxW or CxHxW uint8) or Pillow images.

    If it has a method `many(rows)`, this reads several rows faster than one by one.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Any: ...


@dataclass(frozen=True)
class Split:
    """The samples of one split: `images[image_index[i]]` is the encoded image of sample i,
    `labels[i]` its class.

    `labels` and `image_index` are int64 [N]; several samples may share an image. If samples may
    have several classes or none, `labels` is multi-hot, uint8 [N, classes]. `fingerprint` changes
    if an image may have changed; image files have a stamp each instead. A check of the images adds
    four fields: `checksums`, one of each image, int64 [len(images)]; `stamps`, those of files,
    int64 [len(images), 3]; `errors`, those of unreadable images by their index in `images`; and
    `looks`, a row of Looks (utils/data/decode.py) for each.
    """

    name: str
    images: Images
    labels: np.ndarray
    image_index: np.ndarray
    fingerprint: str
    checksums: Any = None
    stamps: Any = None
    looks: Any = None
    errors: Mapping[int, str] = field(default_factory=dict)
    groups: Any = None  # the values of the column --group_by, one of each image
    notes: tuple[str, ...] = ()  # lines to print about how the data set was read
    bits: int = 16  # used bits of 16-bit grey images

    def __len__(self) -> int:
        return len(self.image_index)

    @cached_property
    def readable(self) -> np.ndarray:
        """bool [N]: False for each sample whose image is known to be unreadable."""
        return ~np.isin(self.image_index, list(self.errors))

    def unreadable(self) -> dict[str, str]:
        """The errors of its unreadable images, by their paths or indices."""
        bad = np.flatnonzero(~self.readable).tolist()
        return {self.describe(n): self.errors[int(self.image_index[n])] for n in bad}

    def replace_unreadable(self) -> "Split":
        """The split with another image of the same classes in the place of each unreadable one.

        So the order of the other samples does not change. The next readable image in a fixed random
        order is used, so it stays the same if others become unreadable. Raises UserError if there
        is no such image.
        """
        _, kinds = np.unique(self.labels, return_inverse=True, axis=0)
        order = permutation(len(self), 0, 0)
        index = self.image_index.copy()
        is_usable = self.readable[order]
        kinds = kinds[order]
        for place in np.flatnonzero(~is_usable):
            same = np.flatnonzero(is_usable & (kinds == kinds[place]))
            problem = "no other image has the same label and can be used"
            fix = "restore it, or start a new run"
            require(len(same), f"{self.describe(order[place])}: {problem}", fix)
            found = order[same[np.searchsorted(same, place) % len(same)]]
            index[order[place]] = self.image_index[found]
        return replace(self, image_index=index)

    def select(self, positions: np.ndarray) -> "Split":
        """A split of the samples at these positions, in this order."""
        return replace(self, labels=self.labels[positions], image_index=self.image_index[positions])

    @property
    def cache_key(self) -> str:
        """Identifies the images and their order; part of the name of the file that caches them."""
        if not isinstance(self.images, Files):
            errors = sorted(self.errors)
            return fingerprint_of(self.fingerprint, self.bits, self.image_index, *errors)
        root = os.path.abspath(self.images.root)
        names = (self.images.names[row] for row in self.image_index.tolist())
        rows = self.image_index[self.readable]
        stamps = self.stamps[rows] if self.stamps is not None else [*map(self.images.stamp, rows)]
        return fingerprint_of(self.bits, self.readable, np.asarray(stamps), root, *names)

    @cached_property
    def label_fingerprint(self) -> str:
        """A hash of the labels and the order of the samples.

        Computed once, because every checkpoint stores it.
        """
        return fingerprint_of(self.labels)

    @cached_property
    def content(self) -> str:
        """A hash of the images, which does not change if they move; empty if they have not been
        checked.
        """
        if isinstance(self.images, np.ndarray):
            return fingerprint_of(self.images, self.image_index)
        return "" if self.checksums is None else fingerprint_of(self.checksums[self.image_index])

    def read_ahead(self, positions: Sequence[int]) -> list:
        """The encoded images of several samples; None for images that are read one by one."""
        if not hasattr(self.images, "many"):
            return [None] * len(positions)
        return self.images.many([int(self.image_index[position]) for position in positions])

    def describe(self, position: int) -> str:
        """The path of the image of sample `position`, or its index in the split."""
        row = int(self.image_index[position])
        if isinstance(self.images, Files):
            return self.images.path(row)
        return f"image {row} of split {self.name!r}"


@dataclass(frozen=True)
class Data:
    """A data set to train on: two splits and the names of their classes, by label.

    `table` has the samples of the run: a SampleTable of utils/data/table.py. `bad_images` lists the
    images that cannot be read, {path or index: reason}.
    """

    train: Split
    evaluation: Split
    class_names: list[str]
    table: Any = None
    bad_images: dict[str, str] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """A hash of the samples of both splits, which does not change if the data set moves."""
        splits = (self.train, self.evaluation)
        texts = (text for split in splits for text in (split.label_fingerprint, split.content))
        return fingerprint_of(*texts)


@dataclass(eq=False)
class Files:
    """Image files by name, which is their path below the folder `root`, or the whole path of a file
    elsewhere; indexing returns the bytes of a file.
    """

    names: list[str]
    root: str = ""

    def __len__(self) -> int:
        return len(self.names)

    def path(self, row: int) -> str:
        """The path of a file; for a name that is a whole path, this path."""
        return os.path.join(self.root, self.names[row])

    @property
    def paths(self) -> list[str]:
        return [*map(self.path, range(len(self)))]

    def select(self, rows: np.ndarray) -> "Files":
        """The files of these rows, in this order."""
        return replace(self, names=[self.names[row] for row in rows.tolist()])

    def stamp(self, row: int) -> tuple[int, int, int]:
        """Size in bytes, modification and change time in ns. Raises OSError as `stamp_of`."""
        return stamp_of(self.path(row))

    def open(self, row: int) -> BinaryIO:
        """A file to read a part of an image. Raises OSError."""
        return open(self.path(row), "rb")

    def __getitem__(self, row: int) -> bytes:
        with open(self.path(row), "rb", buffering=0) as file:  # a buffer would cost a copy
            return file.read()


def stamp_of(path: str | int | os.PathLike) -> tuple[int, int, int]:
    """Size in bytes, modification and change time in ns.

    Raises OSError for a missing or special file.
    """
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", path)
    # The change time changes even if a tool restores the size and the modification time.
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


@dataclass
class Source:
    """The splits of a data set by name, each opened when it is first needed.

    `aliases` are other names that users may give for splits. `notes` are lines to print about all
    splits. `check` is applied to each split when it is opened.
    """

    openers: Mapping[str, Callable[[], Split]]
    class_names: list[str]
    aliases: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    check: Callable[[Split], Split] = lambda split: split
    opened: dict[str, Split] = field(default_factory=dict)

    def split(self, name: str) -> Split:
        """The split of this name, which must exist.

        Raises ValueError if it is empty or a label is out of range.
        """
        if name not in self.opened:
            split = self.openers[name]()
            classes = len(self.class_names)
            fix = "set another --train_split or --eval_split (eval.py: another --split)"
            require(len(split), f"split {name!r} is empty", fix)
            wrong = np.flatnonzero((split.labels < 0) | (split.labels >= classes))
            if len(wrong) and split.labels.ndim == 1:
                label = split.labels[wrong[0]]
                problem = f"has the label {label}, outside 0..{classes - 1}"
                fix = "if it has none, set another --eval_split; eval.py: another --split"
                raise UserError(
                    f"{split.describe(wrong[0])} {problem}", f"correct the labels ({fix})"
                )
            self.opened[name] = self.check(replace(split, notes=(*self.notes, *split.notes)))
        return self.opened[name]


def whole_split(name: str, images: Images, labels, fingerprint: str, groups=None) -> Split:
    """A split with all images in order; `labels` are classes, [N], or multi-hot, [N, classes]."""
    given = np.asarray(labels)
    labels = np.ascontiguousarray(given, np.uint8 if given.ndim == 2 else np.int64)
    problem = f"split {name!r} has labels that are not integers"
    require((labels == given).all(), problem, "give class numbers")
    return Split(name, images, labels, np.arange(len(labels)), fingerprint, groups=groups)


def fingerprint_of(*parts) -> str:
    """A hash of the parts: bytes, memoryviews, arrays, or any values, of which `str` is hashed."""
    digest = hashlib.sha256()
    for part in parts:
        part = np.ascontiguousarray(part).data if isinstance(part, np.ndarray) else part
        is_raw = isinstance(part, bytes | memoryview)
        data = memoryview(part if is_raw else str(part).encode("utf-8", "surrogatepass"))
        digest.update(data.nbytes.to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()[:32]
