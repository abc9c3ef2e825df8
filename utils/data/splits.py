"""A split: samples whose labels are in memory and whose images are still encoded; and how one is made of another."""

import hashlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from utils.console import join_names
from utils.data.order import fold_in, permutation

EVAL_NAMES = ("validation", "valid", "val", "eval", "test")  # tried in this order


@dataclass(frozen=True)
class Split:
    """The samples of one split: `images[rows[i]]` is sample i still encoded, `labels[i]` its class (int64 [N]).

    `images` is any sequence of encoded files (bytes), arrays (HxW or CxHxW uint8) or Pillow images, and `rows` may
    repeat. With it, `fingerprint` (and for files their stamps) changes when an image may have changed. The results
    of a check of the images are stored by row: `ends`, a checksum of each image (int64 [len(images)]), and `bad`, the
    errors of unreadable images.
    """

    name: str
    images: Sequence
    labels: np.ndarray
    rows: np.ndarray
    fingerprint: str
    ends: np.ndarray | None = None
    bad: Mapping[int, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # lines to print about how the split was found

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def readable(self) -> np.ndarray:
        """Whether each sample's image can be read, as far as that is known: bool [N]."""
        return ~np.isin(self.rows, list(self.bad)) if self.bad else np.ones(len(self), bool)

    def select(self, positions: np.ndarray) -> "Split":
        """The samples at these positions, in this order."""
        return replace(self, labels=self.labels[positions], rows=self.rows[positions])

    @property
    def cache_key(self) -> str:
        """Names the selected images in their order, for a file that holds something derived from them."""
        stamps = self.images.stamps(self.rows[self.readable]) if isinstance(self.images, Files) else ()
        return fingerprint_of(self.fingerprint, np.ascontiguousarray(self.rows).data, *sorted(self.bad), *stamps)

    @cached_property
    def label_fingerprint(self) -> str:
        """Changes when a label or the order of the samples does; computed once, as every checkpoint has it."""
        return fingerprint_of(np.ascontiguousarray(self.labels).data)

    @cached_property
    def content(self) -> str:
        """Changes when an image changes, wherever the images are stored; empty if they have not been checked."""
        if isinstance(self.images, np.ndarray):
            return fingerprint_of(np.ascontiguousarray(self.images).data, np.ascontiguousarray(self.rows).data)
        return "" if self.ends is None else fingerprint_of(self.ends[self.rows].data)

    def read_ahead(self, positions: Sequence[int]) -> list:
        """The encoded images of several samples, or None where reading them together gains nothing."""
        if not hasattr(self.images, "many"):
            return [None] * len(positions)
        return self.images.many([int(self.rows[position]) for position in positions])

    def describe(self, position: int) -> str:
        """The path or the index that a user finds sample `position` by."""
        row = int(self.rows[position])
        return str(self.images.paths[row]) if isinstance(self.images, Files) else f"image {row} of split {self.name!r}"


@dataclass(frozen=True)
class Data:
    """A data set to train on: two splits and the names of the classes that their labels count.

    `record` describes the samples for checkpoints: a Record of utils/data/record.py. `bad_images` has the images that
    cannot be read, {path or index: reason}.
    """

    train: Split
    evaluation: Split
    class_names: list[str]
    record: Any = None
    bad_images: Mapping[str, str] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """Changes when a sample of either split changes, wherever the data is stored."""
        splits = (self.train, self.evaluation)
        return fingerprint_of(*(text for split in splits for text in (split.label_fingerprint, split.content)))


class Files:
    """Image files by path, below a folder `root`; reading one gives its bytes."""

    left_out = None  # for image folders: a LeftOut of utils/data/scan.py

    def __init__(self, paths: list[str], root: str = ""):
        self.paths, self.root = paths, root

    def __len__(self) -> int:
        return len(self.paths)

    @cached_property
    def names(self) -> list[str]:
        """The paths relative to the root, which stay the same when the data set is moved."""
        start = len(os.path.join(self.root, ""))
        return [path[start:] for path in self.paths]

    def __getitem__(self, row: int) -> bytes:
        with open(self.paths[row], "rb", buffering=0) as file:  # whole anyway; a buffer costs a copy
            return file.read()

    def stamps(self, rows: np.ndarray) -> Iterator[str]:
        """What changes when one of these files does; asked for only where needed, as a million files take a while."""
        for row in rows:
            status = os.stat(self.paths[row])
            # The last one changes even if a tool restores the size and the modification time.
            times = f"{status.st_mtime_ns}:{status.st_ctime_ns}"
            yield f"{os.fsencode(self.paths[row])!r}:{status.st_size}:{times}"


class Source:
    """The splits of a data set by name, opened when asked for.

    `class_names` may be filled by the first opener that runs; `aliases` are other names of splits that users may give.
    `check` is applied to each split when it is opened.
    """

    def __init__(
        self, openers: dict[str, Callable[[], Split]], class_names: list[str], aliases: dict[str, str] | None = None
    ):
        self.openers, self.class_names, self.aliases, self._opened = openers, class_names, aliases or {}, {}
        self.check: Callable[[Split], Split] = lambda split: split

    @property
    def opened(self) -> list[Split]:
        """The splits that are open."""
        return list(self._opened.values())

    def split(self, name: str) -> Split:
        """The split of this name, which exists; ValueError when it is empty or its labels are out of range."""
        if name not in self._opened:
            split = self.openers[name]()
            check_labels(split, len(self.class_names))
            self._opened[name] = self.check(split)
        return self._opened[name]


def likely_train(names: Collection[str], wanted: str | None) -> str:
    """Of the split names, the one that tells the classes: the training split, as far as there is one."""
    return next((name for name in (wanted, "train") if name in names), next(iter(names)))


def whole_split(name: str, images: Sequence, labels, fingerprint: str) -> Split:
    labels = np.ascontiguousarray(labels, dtype=np.int64)
    return Split(name, images, labels, np.arange(len(labels)), fingerprint)


def check_labels(split: Split, classes: int) -> None:
    """Raise ValueError when the split is empty or a label lies outside 0 .. classes - 1."""
    if not len(split):
        raise ValueError(f"split {split.name!r} is empty; choose another with --train_split or --eval_split")
    wrong = np.flatnonzero((split.labels < 0) | (split.labels >= classes))
    if len(wrong):
        label = split.labels[wrong[0]]
        fix = "an unlabelled split? choose another with --eval_split" if label < 0 else "fix the labels"
        raise ValueError(f"{split.describe(wrong[0])} has the label {label}, outside 0..{classes - 1} ({fix})")


def hold_out(split: Split, fraction: float, seed: int) -> tuple[Split, Split]:
    """Set a random `fraction` of each class aside, to one sample exact; returns (the rest, what was set aside).

    The total is exact to one sample too, less classes of a single sample, which stay in the rest. Raises ValueError
    when nothing would be set aside or left.
    """
    key = fold_in(seed, "hold-out")
    _, labels, counts = np.unique(split.labels, return_inverse=True, return_counts=True)
    order = permutation(len(split), key, 0)
    order = order[np.argsort(labels[order], kind="stable")]  # class after class, at random within each
    # Along that line every 1/fraction-th sample is taken, from a random start.
    steps = np.floor(np.arange(len(split) + 1) * fraction + key / 2**64)
    is_held = np.zeros(len(split), bool)
    is_held[order] = np.diff(steps) > 0
    is_held &= counts[labels] > 1
    if not is_held.any() or is_held.all():
        raise ValueError(
            f"split {split.name!r} has too few samples ({len(split)}) to hold out {fraction:g} of them; "
            "change --eval_fraction or name an --eval_split"
        )
    held = replace(split.select(np.flatnonzero(is_held)), name=f"hold-out of {split.name}")
    return split.select(np.flatnonzero(~is_held)), held


def random_subset(split: Split, count: int | None, seed: int) -> Split:
    """`count` samples at random, in their old order; all when there are no more, or `count` is None."""
    if count is None or count >= len(split):
        return split
    return split.select(np.sort(permutation(len(split), fold_in(seed, "subset", split.name), 0)[:count]))


def renumber(split: Split, own: list[str], wanted: list[str]) -> Split:
    """Count the labels as `wanted` does; ValueError when a class that occurs is not in it."""
    if own == wanted:
        return split
    number = {name: index for index, name in enumerate(wanted)}
    table = np.asarray([number.get(name, -1) for name in own])
    unknown = sorted({own[label] for label in np.unique(split.labels) if table[label] < 0})
    if unknown:
        raise ValueError(f"the checkpoint does not know the class {unknown[0]!r}; its classes are {join_names(wanted)}")
    return replace(split, labels=table[split.labels])


def fingerprint_of(*parts) -> str:
    """A hash of the parts, each bytes (or a memoryview) or anything that `str` describes."""
    digest = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes | memoryview) else str(part).encode("utf-8", "surrogatepass")
        digest.update((data.nbytes if isinstance(data, memoryview) else len(data)).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()[:32]
