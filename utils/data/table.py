"""The table of a run's samples: a parquet file that a run writes once, that its checkpoints hold,
and from which a resumed run takes its samples.

A row is a sample of training, then of evaluation, in their order: the row of its image in the split
of the data set, the name of its file, its label, its group, and what shows whether the image has
changed.
"""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from utils.config import require
from utils.data.labels import multi_hot
from utils.data.splits import Files, Split
from utils.errors import UserError, one_line
from utils.files import link_or_copy, sha256_of, write_file
from utils.settings.data import DataSettings

if TYPE_CHECKING:
    import pyarrow

_PARTS = ("train", "evaluation")
TABLE_FILE = "samples.parquet"  # in a checkpoint
# The settings that decide which samples are in a split.
_CHOICES = ("train_split", "eval_split", "eval_fraction", "fold", "group_by", "seed")
# the columns of the numbers that a split has for each image, by its field
_NUMBERS = {
    "checksums": ("checksum",),
    "stamps": ("size", "modified", "changed"),
    "looks": ("height", "width", "largest", "coloured"),
}
_OF_SOURCE = {"source": str, "count": int, "labels": str, "content": str}


@dataclass(frozen=True, eq=False)
class Part:
    """The samples of training or of evaluation, in order, and `source`, the split of the data set
    that they were taken from.

    `count`, `labels` and `content` describe that whole split. In a table that was read, the images
    of `split` are the files of its rows, by names without a root, or None. Two parts of one split
    share them.
    """

    split: Split
    source: str
    count: int
    labels: str
    content: str
    checksums: np.ndarray | None  # of each sample, int64 [N]

    @classmethod
    def of(cls, split: Split, whole: Split) -> "Part":
        """Describe `split`, which was taken from `whole`."""
        known = split.checksums
        checksums = None if known is None else known[split.image_index]
        labels = whole.label_fingerprint
        return cls(split, whole.name, len(whole), labels, whole.content, checksums)

    @property
    def has_files(self) -> bool:
        """Whether the images are files, not those of a table or an array."""
        return isinstance(self.split.images, Files)

    @property
    def names(self) -> list[str]:
        """The names of the samples' files."""
        images: Any = self.split.images
        return [images.names[row] for row in self.split.image_index.tolist()]


@dataclass(eq=False)
class SampleTable:
    """The samples of a run, before --max_train_samples and --max_eval_samples reduce them.

    `choices` are the settings that they follow from. `left_out` has the images that could not be
    read on the day `listed`, {path or index: reason}.
    """

    train: Part
    evaluation: Part
    class_names: list[str]
    choices: dict
    left_out: dict[str, str] = field(default_factory=dict)
    listed: str = field(default_factory=lambda: date.today().isoformat())
    file: Path | None = None  # that holds it, if one does

    @property
    def parts(self) -> tuple[Part, Part]:
        return self.train, self.evaluation

    @property
    def count(self) -> int:
        return len(self.train.split) + len(self.evaluation.split)

    def with_errors(self, *splits: Split) -> "SampleTable":
        """The table with the errors of its samples as they were found again."""
        parts = []
        for part, found in zip(self.parts, splits, strict=True):
            is_new = part.has_files and found.errors != part.split.errors
            split = replace(part.split, errors=found.errors) if is_new else part.split
            parts.append(replace(part, split=split))
        if all(part.split is old.split for part, old in zip(parts, self.parts, strict=True)):
            return self
        train, evaluation = parts
        return replace(self, train=train, evaluation=evaluation, file=None)

    def keep_in(self, folder: Path) -> Path:
        """The file of the table in a run folder, samples-SHA256.parquet, written or linked if it is
        not there.
        """
        if self.file is None:
            self.file = self._write(folder)
        path = folder / name_of_table(sha256_of(self.file))
        if not path.exists():
            link_or_copy(self.file, path)
        self.file = path
        return path

    def _write(self, folder: Path) -> Path:
        import pyarrow
        from pyarrow import parquet

        described: dict[str, Any] = {
            "classes": self.class_names,
            "choices": self.choices,
            "left_out": self.left_out,
            "listed": self.listed,
        }
        for name, part in zip(_PARTS, self.parts, strict=True):
            described[name] = {"name": part.split.name, "samples": len(part.split)}
            described[name] |= {key: getattr(part, key) for key in _OF_SOURCE}
        try:
            tables = [pyarrow.table(_columns(part.split, str)) for part in self.parts]
        except UnicodeEncodeError:  # a name is not UTF-8
            tables = [pyarrow.table(_columns(part.split, os.fsencode)) for part in self.parts]
        table = pyarrow.concat_tables(tables, promote_options="default")
        table = table.replace_schema_metadata({"lockstep": json.dumps(described)})
        sink = pyarrow.BufferOutputStream()
        parquet.write_table(table, sink, compression="zstd")
        contents = sink.getvalue()
        path = folder / name_of_table(hashlib.sha256(contents).hexdigest())
        write_file(path, contents)
        return path


def make_table(
    config: DataSettings,
    class_names: list[str],
    pairs: tuple[tuple[Split, Split], ...],
    left_out: dict[str, str],
) -> SampleTable:
    """The table of both splits, each passed with the whole split that it was taken from."""
    train, evaluation = (Part.of(*pair) for pair in pairs)
    choices = {name: getattr(config, name) for name in _CHOICES}
    return SampleTable(train, evaluation, class_names, choices, left_out)


def name_of_table(sha256: str) -> str:
    """The name of the file of a table in a run folder."""
    return f"samples-{sha256}.parquet"


def sha256_in(path: Path) -> str:
    """The SHA-256 in the name of such a file."""
    return path.stem.removeprefix("samples-")


def read_table(path: Path) -> SampleTable:
    """The table in a file of a verified checkpoint. Raises UserError if it is malformed."""
    from pyarrow import parquet

    try:
        table = parquet.read_table(path)
        described = json.loads(table.schema.metadata[b"lockstep"])
        class_names = described["classes"]
        parts = _read_parts(table, [described[name] for name in _PARTS], len(class_names))
        are_names = all(type(name) is str for name in class_names)
        require(are_names and sorted(described["choices"]) == sorted(_CHOICES), "malformed")
        left_out = {str(name): str(reason) for name, reason in described["left_out"].items()}
        listed = date.fromisoformat(described["listed"]).isoformat()
        train, evaluation = parts
        choices = described["choices"]
        return SampleTable(train, evaluation, class_names, choices, left_out, listed, path)
    except Exception as error:  # the library raises errors of any class for damaged files
        problem = f"{path}: damaged ({one_line(error)[:80]})"
        raise UserError(problem, "use another checkpoint") from None


def _columns(split: Split, encode: Callable[[str], str | bytes]) -> dict[str, Any]:
    """The columns of the samples of a split, with encoded names."""
    index = split.image_index
    rows = index.tolist()
    columns: dict[str, Any] = {"row": index, "label": split.labels}
    if split.labels.ndim == 2:
        columns["label"] = [np.flatnonzero(row) for row in split.labels]
    if isinstance(split.images, Files):
        columns["name"] = [encode(split.images.names[row]) for row in rows]
    for name, written in _NUMBERS.items():
        values = getattr(split, name)
        if values is not None:
            of_samples = np.atleast_2d(values[index].T)
            columns |= dict(zip(written, of_samples, strict=False))
    if split.groups is not None:
        groups = [*split.groups]
        columns["group"] = [_group(groups[row]) for row in rows]
    columns["error"] = [split.errors.get(row) for row in rows]
    return columns


def _read_parts(table: "pyarrow.Table", described: list[dict], classes: int) -> list[Part]:
    """The parts of a table that was read, and that its file describes so.

    Raises errors of any class for malformed values.
    """
    train, evaluation = (own["samples"] for own in described)
    require(min(train, evaluation) >= 0 and train + evaluation == len(table), "malformed")
    tables = [table.slice(0, train), table.slice(train)]
    images = [*map(_read_images, tables)]
    if described[0]["source"] == described[1]["source"]:
        images = [_read_images(table)] * 2
    parts = []
    for rows, own, (numbers, of_images) in zip(tables, described, images, strict=True):
        index = _integers(rows["row"])
        if "images" in of_images:
            index = np.searchsorted(numbers, index)
        checksums = _integers(rows["checksum"]) if _has(rows, "checksum") else None
        labels = _read_labels(rows["label"].combine_chunks(), classes)
        fields = {"images": None, **of_images, "labels": labels, "image_index": index}
        split = Split(name=str(own["name"]), fingerprint="", **fields)
        of_source: dict[str, Any] = {name: kind(own[name]) for name, kind in _OF_SOURCE.items()}
        parts.append(Part(split, **of_source, checksums=checksums))
    return parts


def _has(rows: "pyarrow.Table", name: str) -> bool:
    """Whether rows have this column: one of the other part has only null values here."""
    return name in rows.column_names and rows[name].null_count < len(rows)


def _integers(column: Any) -> np.ndarray:
    return column.to_numpy().astype(np.int64, casting="safe")


def _read_images(rows: "pyarrow.Table") -> tuple[np.ndarray, dict[str, Any]]:
    """The images of these rows, each once, in the order of the split: their rows in it, and the
    fields of a Split for those in files.
    """
    numbers, first = np.unique(_integers(rows["row"]), return_index=True)
    if not _has(rows, "name"):
        return numbers, {}
    rows = rows.take(first)
    fields: dict[str, Any] = {
        name: np.stack([_integers(rows[each]) for each in columns], 1)
        for name, columns in _NUMBERS.items()
    }
    fields["checksums"] = fields["checksums"][:, 0]
    fields["images"] = Files([*map(os.fsdecode, rows["name"].to_pylist())])
    errors = enumerate(rows["error"].to_pylist())
    fields["errors"] = {row: str(text) for row, text in errors if text}
    if _has(rows, "group"):
        fields["groups"] = rows["group"].to_pylist()
    return numbers, fields


def _read_labels(column: Any, classes: int) -> np.ndarray:
    """The labels of a column: a class, or a list of classes, for each sample."""
    is_list = hasattr(column, "value_lengths")
    flat = (column.flatten() if is_list else column).to_numpy(zero_copy_only=False)
    require(not len(flat) or (flat.min() >= 0 and flat.max() < classes), "wrong labels")
    flat = flat.astype(np.int64, casting="safe")
    return multi_hot(column.value_lengths().to_numpy(), flat, classes) if is_list else flat


def _group(value: Any) -> str | None:
    """The group that a column names; None and NaN name none."""
    return None if value is None or value != value else str(value)
