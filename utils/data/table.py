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
from utils.data.hold_out import group_text
from utils.data.labels import multi_hot
from utils.data.splits import Files, Split
from utils.errors import UserError, one_line
from utils.files import link_or_copy, sha256_of, write_file

if TYPE_CHECKING:
    import pyarrow

_PARTS = ("train", "evaluation")
TABLE_FILE = "samples.parquet"  # in a checkpoint
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

    `count`, `labels` and `content` describe that whole split: its length and two hashes. After
    `read_table`, the images of `split` are files without a root, or None if they are not files.
    Two parts that come from one split share them.
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

    `left_out` has the images that could not be read on the day `listed`, {path or index: reason}.
    """

    train: Part
    evaluation: Part
    class_names: list[str]
    left_out: dict[str, str] = field(default_factory=dict)
    listed: str = field(default_factory=lambda: date.today().isoformat())
    file: Path | None = None  # that holds it; None if it is not written yet

    @property
    def parts(self) -> tuple[Part, Part]:
        return self.train, self.evaluation

    @property
    def count(self) -> int:
        return len(self.train.split) + len(self.evaluation.split)

    def renewed(self, *found: Split) -> "SampleTable":
        """The table with the new errors and stamps of its files; itself if none has changed."""

        def is_new(part: Part, split: Split) -> bool:
            old = part.split
            return part.has_files and (
                old.errors != split.errors or not np.array_equal(old.stamps, split.stamps)
            )

        pairs = [*zip(self.parts, found, strict=True)]
        if not any(is_new(*pair) for pair in pairs):
            return self
        train, evaluation = (replace(part, split=new) for part, new in pairs)
        return replace(self, train=train, evaluation=evaluation, file=None)

    def keep_in(self, folder: Path) -> None:
        """Write it to a run folder as samples-SHA256.parquet, or link the file that holds it."""
        if self.file is None:
            contents = self._contents()
            path = folder / name_of_table(hashlib.sha256(contents).hexdigest())
            write_file(path, contents)
        else:
            path = folder / name_of_table(sha256_of(self.file))
            if not (path.exists() and path.samefile(self.file)):  # replaces a damaged one
                link_or_copy(self.file, path)
        self.file = path

    def _contents(self) -> Any:
        import pyarrow
        from pyarrow import parquet

        described: dict[str, Any] = {
            "classes": self.class_names,
            "left_out": self.left_out,
            "listed": self.listed,
        }
        for name, part in zip(_PARTS, self.parts, strict=True):
            described[name] = {"name": part.split.name}
            described[name] |= {key: getattr(part, key) for key in _OF_SOURCE}

        def columns_of(encode: Callable[[str], str | bytes]) -> list[pyarrow.Table]:
            pairs = zip(_PARTS, self.parts, strict=True)
            return [pyarrow.table(_columns(name, part.split, encode)) for name, part in pairs]

        try:
            tables = columns_of(str)
        except UnicodeEncodeError:  # a name is not UTF-8
            tables = columns_of(os.fsencode)
        table = pyarrow.concat_tables(tables, promote_options="default")
        table = table.replace_schema_metadata({"lockstep": json.dumps(described)})
        sink = pyarrow.BufferOutputStream()
        parquet.write_table(table, sink, compression="zstd")
        return sink.getvalue()


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
        require(all(type(name) is str for name in class_names), "malformed")
        left_out = {str(name): str(reason) for name, reason in described["left_out"].items()}
        listed = date.fromisoformat(described["listed"]).isoformat()
        train, evaluation = parts
        return SampleTable(train, evaluation, class_names, left_out, listed, path)
    except Exception as error:  # the library raises errors of any class for damaged files
        problem = f"{path}: damaged ({one_line(error)[:80]})"
        raise UserError(problem, "use another checkpoint") from None


def _columns(part: str, split: Split, encode: Callable[[str], str | bytes]) -> dict[str, Any]:
    """The columns of the samples of a part, with encoded names."""
    index = split.image_index
    rows = index.tolist()
    columns: dict[str, Any] = {"split": [part] * len(rows), "row": index, "label": split.labels}
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
        columns["group"] = [group_text(groups[row]) for row in rows]
    columns["error"] = [encode(split.errors.get(row, "")) for row in rows]
    return columns


def _read_parts(table: "pyarrow.Table", described: list[dict], classes: int) -> list[Part]:
    """The two parts of a table; `described` is what its file says about each.

    Raises errors of any class for malformed values.
    """
    split = table["split"].to_pylist()
    train, evaluation = map(split.count, _PARTS)
    require(min(train, evaluation) > 0 and train + evaluation == len(table), "malformed")
    tables = [table.slice(0, train), table.slice(train)]
    if described[0]["source"] == described[1]["source"]:
        images = [_read_images(table)] * 2
    else:
        images = [*map(_read_images, tables)]
    parts = []
    for rows, own, (numbers, of_images) in zip(tables, described, images, strict=True):
        index = _integers(rows["row"])
        if "images" in of_images:
            index = np.searchsorted(numbers, index)
        checksums = _integers(rows["checksum"]) if _has(rows, "checksum") else None
        labels = _read_labels(rows["label"].combine_chunks(), classes)
        fields = {"images": None, **of_images, "labels": labels, "image_index": index}
        of_source: dict[str, Any] = {name: kind(own[name]) for name, kind in _OF_SOURCE.items()}
        own_split = Split(name=str(own["name"]), fingerprint="", **fields)
        parts.append(Part(own_split, **of_source, checksums=checksums))
    return parts


def _has(rows: "pyarrow.Table", name: str) -> bool:
    """Whether rows have this column. If only the other part has it, all its values are null."""
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
    errors = enumerate(map(os.fsdecode, rows["error"].to_pylist()))
    fields["errors"] = {row: text for row, text in errors if text}
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
