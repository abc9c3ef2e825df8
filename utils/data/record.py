"""Record in checkpoints which samples a run trains and evaluates on, find them again later, and report changes.

Image files are recorded by name, so new files do not move other samples, and missing files are detected. The rows of a
table have no names, so tables are only compared as a whole.
"""

import gzip
import io
import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from utils.config.settings import TrainConfig
from utils.console import join_names
from utils.data.multi_hot import SEPARATOR, multi_hot
from utils.data.splits import Files, Split
from utils.errors import UserError

FILE = "samples.json.gz"
_MOST_PACKED = 100  # most bytes that one byte of the file may unpack to; about ten in real records
_LARGEST = 2**30  # most bytes of the unpacked file; enough for ten million samples with long names
_CHOICES = ("train_split", "eval_split", "eval_fraction", "seed")  # settings that decide which samples are in a split


@dataclass(frozen=True)
class RecordedSplit:
    """One split of a run: its samples in order, and `source`, the split of the data set that they were taken from.

    For a table, `count`, `labels` and `content` describe the whole split `source`. For files, they describe these
    samples, and each file also has a name, a checksum of both ends, and a class, or a list of classes for multi-hot
    labels.
    """

    name: str
    source: str
    count: int
    labels: str
    content: str
    names: list[str] | None = None
    ends: list[int] | None = None
    classes: list | None = None

    @classmethod
    def of(cls, split: Split, whole: Split) -> "RecordedSplit":
        """Describe `split`, which was taken from `whole`."""
        if not isinstance(split.images, Files):
            return cls(split.name, whole.name, len(whole), whole.label_fingerprint, whole.content)
        names, rows = split.images.names, split.rows.tolist()
        ends = [] if split.ends is None else split.ends[split.rows].tolist()
        labels = split.labels.tolist()
        if split.labels.ndim == 2:
            labels = [np.flatnonzero(row).tolist() for row in split.labels]
        lists = [names[row] for row in rows], ends, labels
        return cls(split.name, whole.name, len(split), split.label_fingerprint, split.content, *lists)

    def check(self, classes: int) -> None:
        """Raise ValueError if a field is invalid."""
        texts = all(isinstance(text, str) for text in (self.name, self.source, self.labels, self.content))
        fits = texts and type(self.count) is int and self.count >= 0
        if fits and self.names is not None:
            flat = self.classes or []
            flat = list(chain(*flat)) if _is_list(flat, list) else flat
            fits = all(_is_list(v, kind) for v, kind in ((self.names, str), (self.ends, int), (flat, int)))
            names, ends, labels = self.files() if fits else ([], [], [])
            fits = fits and len(names) == len(labels) == self.count and len(ends) in (0, self.count)
            fits = fits and all(0 <= label < classes for label in flat)
        if not fits:
            raise ValueError("malformed")

    def files(self) -> tuple[list[str], list[int], list]:
        """The names, checksums and classes of the files. All are empty for a table; checksums are empty if unknown."""
        return self.names or [], self.ends or [], self.classes or []


def _is_list(values, kind: type) -> bool:
    return isinstance(values, list) and all(type(value) is kind for value in values)


@dataclass(frozen=True)
class Record:
    """The samples of a run, before --max_train_samples and --max_eval_samples reduce them."""

    train: RecordedSplit
    evaluation: RecordedSplit
    class_names: list[str]
    choices: dict

    @property
    def parts(self) -> tuple[RecordedSplit, RecordedSplit]:
        return self.train, self.evaluation

    def check(self) -> None:
        """Raise ValueError if a field is invalid."""
        names = self.class_names
        if not _is_list(names, str) or self.choices.keys() != set(_CHOICES):
            raise ValueError("malformed")
        train_split, eval_split, fraction, seed = (self.choices[name] for name in _CHOICES)
        fits = all(name is None or isinstance(name, str) for name in (train_split, eval_split)) and type(seed) is int
        if not fits or not (fraction is None or (type(fraction) is float and 0 < fraction < 1)):
            raise ValueError("malformed")
        for part in self.parts:
            part.check(len(names))

    def has_same_choices(self, config: TrainConfig) -> bool:
        """Whether these settings split the data set in the same way as the recorded ones."""
        return self.choices == _choices(config)

    @cached_property
    def data(self) -> bytes:
        """The contents of the file in a checkpoint, computed once. Equal records give equal bytes."""
        parts = {"train": vars(self.train), "evaluation": vars(self.evaluation)}
        values = {"format": 1, **parts, "class_names": self.class_names, "choices": self.choices}
        text = json.dumps(values, separators=(",", ":"))
        return gzip.compress(text.encode(), 1, mtime=0)


def make_record(
    config: TrainConfig, class_names: list[str], train: tuple[Split, Split], evaluation: tuple[Split, Split]
) -> Record:
    """Describe both splits. Each is passed together with the whole split that it was taken from."""
    return Record(RecordedSplit.of(*train), RecordedSplit.of(*evaluation), list(class_names), _choices(config))


def _choices(config: TrainConfig) -> dict:
    return {name: getattr(config, name) for name in _CHOICES}


def read_record(path: Path) -> Record:
    """The record in a file of a verified checkpoint. Raises ValueError if it is invalid."""
    try:
        packed = path.read_bytes()
        largest = min(_LARGEST, _MOST_PACKED * len(packed) + 2**16)
        with gzip.GzipFile(fileobj=io.BytesIO(packed)) as file:
            data = file.read(largest + 1)
        if len(data) > largest:
            raise ValueError("too large")
        values = json.loads(data)
        train, evaluation = (
            RecordedSplit(**{field.name: values[name][field.name] for field in fields(RecordedSplit)})
            for name in ("train", "evaluation")
        )
        record = Record(train, evaluation, values["class_names"], dict(values["choices"]))
        record.check()
        return record
    except (ValueError, TypeError, KeyError, OSError, EOFError, RecursionError, OverflowError, zlib.error) as error:
        raise UserError(f"{path}: damaged ({str(error)[:80]})", "use another checkpoint") from None


class MatchedFiles(NamedTuple):
    """The current state of a recorded split, the positions of changed images, and lines to print about the changes."""

    split: Split
    changed: np.ndarray
    image_changes: list[str]
    label_changes: list[str]
    new_files: list[str]


def match_files(record: Record, part: RecordedSplit, whole: Split, class_names: Sequence[str]) -> MatchedFiles:
    """Find the files of a recorded split in `whole`, the current state of the split that they were taken from.

    Labels are indices into `class_names`, the classes of `whole`. Missing files keep their positions and are marked
    unreadable.
    """
    names, recorded_ends, _ = part.files()
    files = whole.images if isinstance(whole.images, Files) else Files([])
    row_of = {name: row for row, name in enumerate(files.names)}
    rows = np.asarray([row_of.get(name, -1) for name in names], np.int64)
    there, gone = np.flatnonzero(rows >= 0), np.flatnonzero(rows < 0)
    recorded = _recorded_labels(record, part, class_names)
    if recorded.ndim != whole.labels.ndim:
        problem = f"split {whole.name!r}: one label for each image, or several, unlike when the run started"
        raise UserError(problem, "use the same labels and the same --task")
    labels, label_of = recorded.copy(), np.zeros((len(files), *recorded.shape[1:]), recorded.dtype)
    label_of[whole.rows] = whole.labels
    labels[there] = label_of[rows[there]]

    rows[gone] = len(files) + np.arange(len(gone))
    paths = [*files.paths, *(os.path.join(files.root, names[position]) for position in gone)]
    bad = {**whole.bad, **dict.fromkeys(rows[gone].tolist(), files.missing)}
    ends = np.append(np.zeros(len(files), np.int64) if whole.ends is None else whole.ends, np.zeros_like(gone))
    images = Files(paths, files.root)
    weights = None
    if whole.weights is not None:
        weight_of = np.full(len(paths), np.nan)
        weight_of[whole.rows] = whole.weights
        weights = weight_of[rows]
    split = replace(whole, name=part.name, images=images, labels=labels, rows=rows, ends=ends, bad=bad, weights=weights)

    compared = recorded_ends if recorded_ends and whole.ends is not None else ends[rows]
    changed = np.flatnonzero((ends[rows] != compared) & split.readable)
    relabelled = np.flatnonzero((labels != recorded).reshape(len(labels), -1).any(1))
    label_changes = _count_and_names(part, relabelled, "changed class")
    if label_changes:
        first = relabelled[0]
        before, now = _label(part.files()[2][first], record.class_names), _label(labels[first], class_names)
        label_changes[0] += f" ({before!r}, now {now!r})"
    known = {name for other in record.parts if other.source == part.source for name in other.files()[0]}
    new = [name for name, row in row_of.items() if name not in known and row not in whole.bad]
    line = f"split {whole.name!r} has new files since training, which are left out: {join_names(new, 3)}"
    image_changes = _count_and_names(part, changed, "changed")
    return MatchedFiles(split, changed, image_changes, label_changes, [line] if new else [])


def _recorded_labels(record: Record, part: RecordedSplit, class_names: Sequence[str]) -> np.ndarray:
    """The labels of a recorded split of files, with indices into `class_names`; -1 for a class that is not there."""
    number = {name: index for index, name in enumerate(class_names)}
    numbers = np.asarray([number.get(name, -1) for name in record.class_names], np.int64)
    classes = part.files()[2]
    if not _is_list(classes, list):
        return numbers[classes]
    counts, flat = np.asarray([len(own) for own in classes]), numbers[np.fromiter(chain(*classes), np.int64)]
    # Rows have one more column, for the classes that are not there.
    return multi_hot(part.name, counts, flat % (len(class_names) + 1), len(class_names) + 1)[:, :-1]


def _label(label: Any, class_names: Sequence[str]) -> str:
    """The class of a sample, or its classes, by name."""
    if isinstance(label, np.ndarray):
        label = np.flatnonzero(label).tolist()
    return SEPARATOR.join(class_names[index] for index in label) if isinstance(label, list) else class_names[label]


def _count_and_names(part: RecordedSplit, positions: np.ndarray, what: str) -> list[str]:
    """A line with the number and the names of the files at these positions; no line if there are none."""
    if not len(positions):
        return []
    names = ", ".join(part.files()[0][position] for position in positions[:3]) + ", ..." * (len(positions) > 3)
    return [f"{len(positions)} of {part.count} images of {part.name!r} {what}: {names}"]


def table_changes(part: RecordedSplit, whole: Split) -> list[str]:
    """Lines about how a split of a table differs from the recorded one."""
    if part.count != len(whole):
        return [f"split {part.source!r} had {part.count} samples and now has {len(whole)}"]
    changes = []
    if part.labels != whole.label_fingerprint:
        changes.append(f"the labels of split {part.source!r} changed")
    if part.content and whole.content and part.content != whole.content:
        changes.append(f"the images of split {part.source!r} changed")
    return changes


def is_same(part: RecordedSplit, whole: Split) -> bool:
    """Whether `whole` holds all samples of a recorded split unchanged, wherever it is stored."""
    if part.names is None:
        return bool(part.content) and not isinstance(whole.images, Files) and not table_changes(part, whole)
    if not isinstance(whole.images, Files) or whole.ends is None or not part.ends:
        return False
    ends = dict(zip(whole.images.names, whole.ends.tolist(), strict=True))
    return all(ends.get(name) == end for name, end in zip(part.names, part.ends, strict=True))


def differences(part: RecordedSplit, fresh: RecordedSplit, whole: Split) -> list[str]:
    """Lines about the differences between the recorded training samples and those that these settings select."""
    if part.names is None or fresh.names is None:
        if (part.names, fresh.names) != (None, None) or part.source != fresh.source:
            return [f"the run used split {part.source!r} of a different data set"]
        return table_changes(part, whole)
    (names, ends, _), (fresh_names, fresh_ends, _) = part.files(), fresh.files()
    gone, new = set(names) - set(fresh_names), set(fresh_names) - set(names)
    changes = [f"training images were removed: {join_names(sorted(gone), 3)}"] if gone else []
    changes += [f"training images were added: {join_names(sorted(new), 3)}"] if new else []
    if not changes and part.content != fresh.content:
        pairs = zip(names, ends, fresh_ends, strict=True) if ends and fresh_ends else ()
        other = [name for name, before, now in pairs if before != now]
        changes += [f"training images changed: {join_names(other, 3)}"] if other else []
    return changes
