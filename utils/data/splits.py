"""A split: samples whose labels are in memory and whose images are still encoded; and how one is made of another."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from utils.data.order import mix

EVAL_NAMES = ("validation", "valid", "val", "eval", "test")  # tried in this order


@dataclass(frozen=True)
class Split:
    """The samples of one split: `images[rows[i]]` is sample i still encoded, `labels[i]` its class (int64 [N]).

    `images` is any sequence of encoded files (bytes), paths, arrays (HxW or CxHxW uint8) or Pillow images;
    `fingerprint` changes when an image may have changed.
    """

    name: str
    images: Sequence
    labels: np.ndarray
    rows: np.ndarray
    fingerprint: str

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, positions: np.ndarray) -> "Split":
        """The samples at these positions, in this order."""
        return replace(self, labels=self.labels[positions], rows=self.rows[positions])

    @property
    def cache_key(self) -> str:
        """Names the selected samples in their order, for a file that holds something derived from them."""
        return fingerprint_of(self.fingerprint, np.ascontiguousarray(self.rows).tobytes())

    def read(self, positions: Sequence[int]) -> list:
        """The encoded images of several samples."""
        rows = [int(self.rows[position]) for position in positions]
        return self.images.many(rows) if hasattr(self.images, "many") else [self.images[row] for row in rows]

    def describe(self, position: int) -> str:
        """The path or the index that a user finds sample `position` by."""
        row = int(self.rows[position])
        return str(self.images.paths[row]) if isinstance(self.images, Files) else f"image {row} of split {self.name!r}"


@dataclass(frozen=True)
class Data:
    """A data set to train on: two splits and the names of the classes that their labels count."""

    train: Split
    evaluation: Split
    class_names: list[str]


class Files:
    """Image files by path; reading one gives its bytes."""

    def __init__(self, paths: list[str]):
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, row: int) -> bytes:
        return Path(self.paths[row]).read_bytes()


class Source:
    """The splits of a data set by name, opened when asked for."""

    def __init__(self, name: str, openers: dict, class_names: list[str] | None = None):
        self.name, self.openers, self.class_names, self._opened = name, openers, class_names, {}

    def split(self, name: str) -> Split:
        if name not in self._opened:
            self._opened[name] = self.openers[name]()
        return self._opened[name]


def whole_split(name: str, images: Sequence, labels, fingerprint: str) -> Split:
    labels = np.ascontiguousarray(labels, dtype=np.int64)
    return Split(name, images, labels, np.arange(len(labels)), fingerprint)


def check_labels(split: Split, classes: int) -> None:
    """Raise ValueError when the split is empty or a label lies outside 0 .. classes - 1."""
    if not len(split):
        raise ValueError(f"split {split.name!r} is empty; choose another with --train_split or --eval_split")
    wrong = np.flatnonzero((split.labels < 0) | (split.labels >= classes))
    if len(wrong):
        raise ValueError(
            f"{split.describe(wrong[0])} has the label {split.labels[wrong[0]]}, outside 0..{classes - 1}"
            + (" (an unlabelled split? choose another with --eval_split)" if split.labels[wrong[0]] < 0 else "")
        )


def hold_out(split: Split, fraction: float, seed: int) -> tuple[Split, Split]:
    from sklearn.model_selection import train_test_split

    positions = np.arange(len(split))
    try:
        train, held = train_test_split(
            positions, test_size=fraction, random_state=mix(seed, "hold-out") % 2**32, stratify=split.labels
        )
    except ValueError as error:
        raise ValueError(f"a hold-out of {fraction} of split {split.name!r} cannot be made: {error}") from None
    held_split = replace(split.select(np.sort(held)), name=f"{split.name} hold-out")
    return split.select(np.sort(train)), held_split


def random_subset(split: Split, count: int | None, seed: int) -> Split:
    if count is None or count >= len(split):
        return split
    random = np.random.Generator(np.random.Philox(mix(seed, "subset", split.name)))
    return split.select(np.sort(random.permutation(len(split))[:count]))


def renumber(split: Split, own: list[str], wanted: list[str]) -> Split:
    """Count the labels as `wanted` does; ValueError when a class that occurs is not in it."""
    if own == wanted:
        return split
    number = {name: index for index, name in enumerate(wanted)}
    table = np.asarray([number.get(name, -1) for name in own])
    unknown = sorted({own[label] for label in np.unique(split.labels) if table[label] < 0})
    if unknown:
        raise ValueError(f"the checkpoint does not know the class {unknown[0]!r}; its classes are {listed(wanted)}")
    return replace(split, labels=table[split.labels])


def listed(names, most: int = 12) -> str:
    names = [str(name) for name in names]
    return ", ".join(names[:most]) + (f", ... ({len(names)} in all)" if len(names) > most else "")


def fingerprint_of(*parts) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:32]
