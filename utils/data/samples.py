"""List in checkpoints which samples a run trains and evaluates on, find them again later, and
report changes.

Image files are listed by name, so new files do not move other samples, and missing files are
detected. The rows of a table have no names, so tables are only compared as a whole.
"""

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, compress
from pathlib import Path
from typing import Any

import numpy as np

from utils.console import join_names, nfc
from utils.data.labels import indices_in, multi_hot
from utils.data.splits import Files, Split
from utils.errors import UserError
from utils.settings.data import DataSettings

SAMPLES_FILE = "samples.json.gz"
_LARGEST = 2**30  # most bytes of the unpacked file; enough for ten million samples with long names
# The settings that decide which samples are in a split.
_CHOICES = ("train_split", "eval_split", "eval_fraction", "fold", "group_by", "seed")


@dataclass(frozen=True)
class ListedSplit:
    """One split of a run: its samples in order, and `source`, the split of the data set that they
    were taken from.

    For a table, `count`, `labels` and `content` describe the whole split `source`. For files, they
    describe these samples, and each file also has a name, a checksum of both ends, and a class, or
    a list of classes for multi-hot labels.
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
    def of(cls, split: Split, whole: Split) -> "ListedSplit":
        """Describe `split`, which was taken from `whole`."""
        if not isinstance(split.images, Files):
            return cls(split.name, whole.name, len(whole), whole.label_fingerprint, whole.content)
        names = split.images.names
        labels = split.labels.tolist()
        if split.labels.ndim == 2:
            labels = [np.flatnonzero(row).tolist() for row in split.labels]
        return cls(
            split.name,
            whole.name,
            len(split),
            split.label_fingerprint,
            split.content,
            names=[names[row] for row in split.image_index.tolist()],
            ends=split.checksums[split.image_index].tolist(),
            classes=labels,
        )

    def check(self, classes: int) -> None:
        """Raise ValueError if a field is invalid."""
        texts = [self.name, self.source, self.labels, self.content]
        names = self.names or []
        ends = self.ends or []
        labels = self.classes or []
        flat = list(chain(*labels)) if _is_list(labels, list) else labels
        is_text = _is_list([*texts, *names], str)
        is_int = _is_list([self.count, *ends, *flat], int)
        sizes = {len(names), len(ends), len(labels), self.count if names else 0}
        fits = is_text and is_int and len(sizes) == 1
        if not fits or not all(0 <= label < classes for label in flat):
            raise ValueError("malformed")


def _is_list(values: Any, kind: type) -> bool:
    return isinstance(values, list) and all(type(value) is kind for value in values)


@dataclass(frozen=True)
class SampleList:
    """The samples of a run, before --max_train_samples and --max_eval_samples reduce them."""

    train: ListedSplit
    evaluation: ListedSplit
    class_names: list[str]
    choices: dict

    @property
    def parts(self) -> tuple[ListedSplit, ListedSplit]:
        return self.train, self.evaluation

    def check(self) -> None:
        """Raise ValueError if a field is invalid."""
        if not _is_list(self.class_names, str) or sorted(self.choices) != sorted(_CHOICES):
            raise ValueError("malformed")
        for part in self.parts:
            part.check(len(self.class_names))

    @cached_property
    def data(self) -> bytes:
        """The contents of the file in a checkpoint, computed once.

        Equal lists give equal bytes.
        """
        text = json.dumps(vars(self), default=vars, separators=(",", ":"))
        return gzip.compress(text.encode(), 1, mtime=0)


def list_samples(
    config: DataSettings, class_names: list[str], *pairs: tuple[Split, Split]
) -> SampleList:
    """Describe both splits. Each is passed together with the whole split that it was taken from."""
    train, evaluation = (ListedSplit.of(*pair) for pair in pairs)
    choices = {name: getattr(config, name) for name in _CHOICES}
    return SampleList(train, evaluation, class_names, choices)


def read_samples(path: Path) -> SampleList:
    """The list in a file of a verified checkpoint. Raises ValueError if it is invalid."""
    try:
        with gzip.open(path) as file:
            data = file.read(_LARGEST + 1)
        if len(data) > _LARGEST:
            raise ValueError("too large")
        values = json.loads(data)
        train = ListedSplit(**values["train"])
        evaluation = ListedSplit(**values["evaluation"])
        choices = {"fold": None, "group_by": None} | values["choices"]  # older lists lack these
        samples = SampleList(train, evaluation, values["class_names"], choices)
        samples.check()
        return samples
    except Exception as error:  # the libraries raise errors of any class for damaged files
        raise UserError(f"{path}: damaged ({str(error)[:80]})", "use another checkpoint") from None


def match_files(
    samples: SampleList,
    part: ListedSplit,
    whole: Split,
    class_names: Sequence[str],
    skip_changed: bool = False,
) -> tuple[Split, list[str], list[str]]:
    """Find the files of a listed split in `whole`, the current state of the split that they were
    taken from. Returns the split, lines about changed samples, and the names of new files.

    Labels are indices into `class_names`, the classes of `whole`. Missing files get errors. With
    `skip_changed`, changed images do too, instead of being reported.
    """
    listed = _listed_labels(samples, part, class_names)
    files = whole.images
    names = part.names or []
    if not isinstance(files, Files) or listed.ndim != whole.labels.ndim:
        problem = (
            f"split {whole.name!r} has other kinds of images or labels than when the run started"
        )
        raise UserError(problem, "use the same --data and the same --task")
    index = indices_in(files.names, names)
    gone = np.flatnonzero(index < 0)
    labels = whole.labels[index]
    labels[gone] = listed[gone]
    index[gone] = len(files) + np.arange(len(gone))
    split = replace(
        whole,
        name=part.name,
        images=replace(files, names=files.names + [names[n] for n in gone]),
        labels=labels,
        image_index=index,
        checksums=np.append(whole.checksums, np.zeros_like(gone)),
        errors={**whole.errors, **dict.fromkeys(index[gone].tolist(), "no longer in the data set")},
    )
    is_changed = split.readable & (split.checksums[index] != part.ends)
    is_relabelled = (labels != listed).reshape(len(labels), -1).any(1)
    changes = _count_and_names(part, is_relabelled, "changed class")
    if skip_changed:
        changed = dict.fromkeys(index[is_changed].tolist(), "changed since the run started")
        split = replace(split, errors={**split.errors, **changed})
    else:
        changes += _count_and_names(part, is_changed, "changed")
    same = [other for other in samples.parts if other.source == part.source]
    known = {nfc(name) for other in same for name in other.names or []}
    new = [n for n, name in enumerate(files.names) if nfc(name) not in known]
    return split, changes, [files.names[n] for n in new if n not in whole.errors]


def _listed_labels(
    samples: SampleList, part: ListedSplit, class_names: Sequence[str]
) -> np.ndarray:
    """The labels of a listed split of files, with indices into `class_names`; -1 for a class that
    is not there.
    """
    numbers = indices_in(class_names, samples.class_names)
    classes = part.classes or []
    if not _is_list(classes, list):
        return numbers[classes]
    counts = np.asarray([len(own) for own in classes])
    flat = numbers[np.fromiter(chain(*classes), np.int64)]
    # Rows have one more column, the last, for the classes that are not there.
    return multi_hot(counts, flat, len(class_names) + 1)[:, :-1]


def _count_and_names(part: ListedSplit, chosen: np.ndarray, what: str) -> list[str]:
    """A line with the number and the names of the files that a mask chooses; no line if there are
    none.
    """
    if not chosen.any():
        return []
    names = [*compress(part.names or [], chosen)]
    some = join_names(names, 3)
    return [f"{len(names)} of {part.count} images of {part.name!r} {what}: {some}"]


def table_changes(part: ListedSplit, whole: Split) -> list[str]:
    """Lines about how a split of a table differs from the listed one."""
    if part.count != len(whole):
        return [f"split {part.source!r} had {part.count} samples and now has {len(whole)}"]
    pairs = (
        ("labels", part.labels, whole.label_fingerprint),
        ("images", part.content, whole.content),
    )
    return [
        f"the {what} of split {part.source!r} changed" for what, old, new in pairs if old != new
    ]


def is_same(part: ListedSplit, whole: Split) -> bool:
    """Whether `whole` holds all samples of a listed split unchanged, wherever it is stored."""
    if part.names is None or not isinstance(whole.images, Files):
        return part.names is None and bool(part.content) and not table_changes(part, whole)
    rows = indices_in(whole.images.names, part.names)
    return bool((rows >= 0).all() and (whole.checksums[rows] == part.ends).all())
