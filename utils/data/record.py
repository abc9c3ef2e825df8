"""Record in checkpoints which samples a run trains and evaluates on, find them again later, and report changes.

Image files are known by their names, so new files do not move other samples, and missing files are noticed. The rows of
a table have no names: there only the whole split can be compared.
"""

import gzip
import io
import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from utils.config.settings import TrainConfig
from utils.console import join_names
from utils.data.splits import Files, Split

FILE = "samples.json.gz"
_MOST_PACKED = 100  # bytes unpacked for each one in the file: real records have about ten
_LARGEST = 2**30  # bytes of such a file when unpacked: ten million samples with long names
_CHOICES = ("train_split", "eval_split", "eval_fraction", "seed")  # settings that split the samples


@dataclass(frozen=True)
class Part:
    """One split of a run: where it comes from, and its samples in order.

    For a table, `count`, `labels` and `content` describe the whole split `source`; for files, they describe these
    samples. Each file also has a name, a checksum of both ends, and a class.
    """

    name: str
    source: str
    count: int
    labels: str
    content: str
    names: list[str] | None = None
    ends: list[int] | None = None
    classes: list[int] | None = None

    @classmethod
    def of(cls, split: Split, whole: Split) -> "Part":
        """Describe `split`, which was taken from `whole`."""
        if not isinstance(split.images, Files):
            return cls(split.name, whole.name, len(whole), whole.label_fingerprint, whole.content)
        names, rows = split.images.names, split.rows.tolist()
        ends = [] if split.ends is None else split.ends[split.rows].tolist()
        lists = [names[row] for row in rows], ends, split.labels.tolist()
        return cls(split.name, whole.name, len(split), split.label_fingerprint, split.content, *lists)

    def check(self, classes: int) -> None:
        """Raise ValueError if a field is invalid."""
        texts = all(isinstance(text, str) for text in (self.name, self.source, self.labels, self.content))
        fits = texts and type(self.count) is int and self.count >= 0
        if fits and self.names is not None:
            kinds = ((self.names, str), (self.ends, int), (self.classes, int))
            fits = all(isinstance(v, list) and all(type(x) is kind for x in v) for v, kind in kinds)
            fits = fits and len(self.names) == len(self.classes) == self.count and len(self.ends) in (0, self.count)
            fits = fits and all(0 <= label < classes for label in self.classes)
        if not fits:
            raise ValueError("malformed")


@dataclass(frozen=True)
class Record:
    """The samples of a run, before --max_train_samples and --max_eval_samples reduce them."""

    train: Part
    evaluation: Part
    class_names: list[str]
    choices: dict

    @property
    def parts(self) -> tuple[Part, Part]:
        return self.train, self.evaluation

    def check(self) -> None:
        """Raise ValueError if a field is invalid."""
        names = self.class_names
        fits = isinstance(names, list) and all(isinstance(name, str) for name in names)
        if not fits or self.choices.keys() != set(_CHOICES):
            raise ValueError("malformed")
        train_split, eval_split, fraction, seed = (self.choices[name] for name in _CHOICES)
        fits = all(name is None or isinstance(name, str) for name in (train_split, eval_split)) and type(seed) is int
        if not fits or not (fraction is None or (type(fraction) is float and 0 < fraction < 1)):
            raise ValueError("malformed")
        for part in self.parts:
            part.check(len(names))

    def has_same_choices(self, config: TrainConfig) -> bool:
        """Whether these settings split the data set in the same way."""
        return self.choices == _choices(config)

    @cached_property
    def data(self) -> bytes:
        """The contents of the file in a checkpoint, made once; equal records give equal bytes."""
        parts = {"train": vars(self.train), "evaluation": vars(self.evaluation)}
        values = {"format": 1, **parts, "class_names": self.class_names, "choices": self.choices}
        text = json.dumps(values, separators=(",", ":"))
        return gzip.compress(text.encode(), 1, mtime=0)


def make_record(
    config: TrainConfig, class_names: list[str], train: tuple[Split, Split], evaluation: tuple[Split, Split]
) -> Record:
    """Describe both splits, each given with the whole one that it was taken from."""
    return Record(Part.of(*train), Part.of(*evaluation), list(class_names), _choices(config))


def _choices(config: TrainConfig) -> dict:
    return {name: getattr(config, name) for name in _CHOICES}


def read_record(path: Path) -> Record:
    """The record in a file of a verified checkpoint; ValueError if it is invalid."""
    try:
        packed = path.read_bytes()
        largest = min(_LARGEST, _MOST_PACKED * len(packed) + 2**16)
        with gzip.GzipFile(fileobj=io.BytesIO(packed)) as file:
            data = file.read(largest + 1)
        if len(data) > largest:
            raise ValueError("too large")
        values = json.loads(data)
        parts = [Part(**{f.name: values[part][f.name] for f in fields(Part)}) for part in ("train", "evaluation")]
        record = Record(*parts, values["class_names"], dict(values["choices"]))
        record.check()
        return record
    except (ValueError, TypeError, KeyError, OSError, EOFError, RecursionError, OverflowError, zlib.error) as error:
        raise ValueError(f"{path}: damaged ({str(error)[:80]}); take another checkpoint") from None


class Found(NamedTuple):
    """A recorded split as it is now, the positions of images that changed, and lines about the changes."""

    split: Split
    changed: np.ndarray
    images: list[str]
    labels: list[str]
    new: list[str]


def match_files(record: Record, part: Part, whole: Split, class_names: Sequence[str]) -> Found:
    """Find the files of a recorded part in `whole`, the split that they were taken from, as it is now.

    Labels are indices into `class_names`, the classes of `whole`. Missing files keep their place and count as
    unreadable.
    """
    files = whole.images if isinstance(whole.images, Files) else Files([])
    row_of = {name: row for row, name in enumerate(files.names)}
    rows = np.asarray([row_of.get(name, -1) for name in part.names], np.int64)
    there, gone = np.flatnonzero(rows >= 0), np.flatnonzero(rows < 0)
    number = {name: index for index, name in enumerate(class_names)}
    recorded = np.asarray([number.get(name, -1) for name in record.class_names], np.int64)[part.classes]
    labels, label_of = recorded.copy(), np.zeros(len(files), np.int64)
    label_of[whole.rows] = whole.labels
    labels[there] = label_of[rows[there]]

    rows[gone] = len(files) + np.arange(len(gone))
    paths = [*files.paths, *(os.path.join(files.root, part.names[position]) for position in gone)]
    bad = {**whole.bad, **dict.fromkeys(rows[gone].tolist(), "the file is gone")}
    ends = np.append(np.zeros(len(files), np.int64) if whole.ends is None else whole.ends, np.zeros_like(gone))
    split = replace(
        whole, name=part.name, images=Files(paths, files.root), labels=labels, rows=rows, ends=ends, bad=bad
    )

    compared = part.ends if part.ends and whole.ends is not None else ends[rows]
    changed = np.flatnonzero((ends[rows] != compared) & split.readable)
    images, other_labels = _told(part, changed, "changed"), []
    relabelled = np.flatnonzero(labels != recorded)
    for position in relabelled[:1]:
        told = _told(part, relabelled, "changed class")[0]
        was, now = record.class_names[part.classes[position]], class_names[labels[position]]
        other_labels.append(f"{told} ({was!r}, now {now!r})")
    known = {name for other in record.parts if other.source == part.source for name in other.names}
    new = [name for name, row in row_of.items() if name not in known and row not in whole.bad]
    told = [f"split {whole.name!r} has new files since training, which are left out: {join_names(new, 3)}"]
    return Found(split, changed, images, other_labels, told if new else [])


def _told(part: Part, positions: np.ndarray, what: str) -> list[str]:
    names = ", ".join(part.names[position] for position in positions[:3]) + ", ..." * (len(positions) > 3)
    return [f"{len(positions)} of {part.count} images of {part.name!r} {what}: {names}"] if len(positions) else []


def table_changes(part: Part, whole: Split) -> list[str]:
    """Lines about how a split of a table differs from the recorded one."""
    if part.count != len(whole):
        return [f"split {part.source!r} had {part.count} samples and now has {len(whole)}"]
    changes = []
    if part.labels != whole.label_fingerprint:
        changes.append(f"the labels of split {part.source!r} changed")
    if part.content and whole.content and part.content != whole.content:
        changes.append(f"the images of split {part.source!r} changed")
    return changes


def is_same(part: Part, whole: Split) -> bool:
    """Whether `whole` holds all samples of a part unchanged, wherever it is stored."""
    if part.names is None:
        return bool(part.content) and not isinstance(whole.images, Files) and not table_changes(part, whole)
    if not isinstance(whole.images, Files) or whole.ends is None or not part.ends:
        return False
    ends = dict(zip(whole.images.names, whole.ends.tolist(), strict=True))
    return all(ends.get(name) == end for name, end in zip(part.names, part.ends, strict=True))


def differences(part: Part, fresh: Part, whole: Split) -> list[str]:
    """Lines about how the training samples that these settings choose differ from the recorded ones."""
    if part.names is None or fresh.names is None:
        if (part.names, fresh.names) != (None, None) or part.source != fresh.source:
            return [f"the run trained on split {part.source!r} of another data set"]
        return table_changes(part, whole)
    gone, new = set(part.names) - set(fresh.names), set(fresh.names) - set(part.names)
    changes = [f"training images were removed: {join_names(sorted(gone), 3)}"] if gone else []
    changes += [f"training images were added: {join_names(sorted(new), 3)}"] if new else []
    if not changes and part.content != fresh.content:
        ends = zip(part.names, part.ends, fresh.ends, strict=True) if part.ends and fresh.ends else ()
        other = [name for name, before, now in ends if before != now]
        changes += [f"training images changed: {join_names(other, 3)}"] if other else []
    return changes
