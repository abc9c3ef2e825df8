"""Hugging Face data sets, from the Hub or from files: their splits, images, labels and class names."""

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from utils.config.settings import TrainConfig
from utils.console import join_names
from utils.data.splits import (
    Source,
    Split,
    fingerprint_of,
    indices_in,
    multi_hot,
    split_that_defines_classes,
    stamp_of,
    whole_split,
)
from utils.data.table_files import hide_bars_without_terminal
from utils.errors import UserError, one_line

LABEL_NAMES = ("label", "labels", "class", "category", "target", "fine_label")
IMAGE_TYPES = ("binary", "large_binary", "string")  # encoded files, or their paths


class Table:
    """The image column of a Hugging Face data set; indexing returns the encoded bytes of a row."""

    def __init__(self, dataset, column: str):
        from datasets import Image

        self.column, self.dataset = column, dataset.select_columns(column).cast_column(column, Image(decode=False))

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int) -> bytes | None:
        value = self.dataset[row][self.column] or {}
        if value.get("bytes") is None and value.get("path"):
            if not Path(value["path"]).is_file():  # reading a pipe or a device may never end
                raise ValueError(f"{value['path']} is missing or not a regular file")
            return Path(value["path"]).read_bytes()
        return value.get("bytes")

    def files(self) -> list[str]:
        """The files of the table, and those of images that it stores only as paths."""
        from pyarrow.compute import struct_field

        column = self.dataset.data.column(self.column)
        paths = struct_field(column, "path").filter(struct_field(column, "bytes").is_null()).drop_null()
        return [*(file["filename"] for file in self.dataset.cache_files), *paths.to_pylist()]

    def many(self, rows: Sequence[int]) -> list[bytes | None]:
        """Several rows at once, many times faster than one by one; None for images that are stored only as paths."""
        return [value and value["bytes"] for value in self.dataset[rows][self.column]]


def load_hub(config: TrainConfig) -> Source:
    """A data set of the Hugging Face Hub. Its code is not executed."""
    from datasets import load_dataset

    hide_bars_without_terminal()
    try:
        splits = load_dataset(config.data, config.data_subset)
    except Exception as error:  # the network, the cache or a file can cause errors of any class
        reason = one_line(error)[:300]
        raise UserError(
            f"--data {config.data}: no such file or folder, and it cannot be loaded from the Hub ({reason})",
            "check the name and the network, or give a local folder",
        ) from error
    return table_source(splits, config)


def table_source(splits, config: TrainConfig) -> Source:
    """The splits of a `DatasetDict`, or of a single `Dataset`."""
    splits = splits if isinstance(splits, dict) else {"train": splits}
    train = splits[split_that_defines_classes(splits, config.train_split)]
    image_column = _image_column(train.features, config.image_column)
    label_column = _label_column(train.features, config.label_column)
    class_names, label_values, notes = _classes(train, label_column)

    def make(name: str) -> Split:
        dataset = splits[name]
        for column in (image_column, label_column):
            if column not in dataset.features:
                has = join_names(dataset.features)
                raise UserError(f"split {name!r} has no column {column!r}, only {has}", "choose another split")
        values, counts = _values(dataset, label_column)
        labels = _labels(name, values, counts, label_values, len(class_names))
        images = Table(dataset, image_column)
        stamps = [stamp_of(file) for file in images.files() if Path(file).is_file()]
        split = whole_split(name, images, labels, fingerprint_of(dataset._fingerprint, *stamps))
        return replace(split, notes=notes)

    return Source({name: partial(make, name) for name in splits}, class_names)


def _image_column(features, wanted: str | None) -> str:
    from datasets import Image

    found = [name for name, feature in features.items() if isinstance(feature, Image)]
    # In files that were not written by `datasets`, images are a plain struct of bytes.
    found = found or [name for name, feature in features.items() if _is_struct(feature)]
    name = _choose("image", features, wanted, found)
    if name not in found and not _is_struct(features[name]) and getattr(features[name], "dtype", "") not in IMAGE_TYPES:
        problem = f"--image_column {name}: holds {features[name]}, not images"
        raise UserError(problem, f"use one of {join_names(features)}")
    return name


def _is_struct(feature) -> bool:
    return isinstance(feature, dict) and "bytes" in feature


def _label_column(features, wanted: str | None) -> str:
    from datasets import ClassLabel

    found = [name for name, feature in features.items() if isinstance(_element(feature), ClassLabel)]
    name = _choose("label", features, wanted, found or [name for name in LABEL_NAMES if name in features][:1])
    if not re.fullmatch(r"u?int\d+|bool|(large_)?string", getattr(_element(features[name]), "dtype", "")):
        raise UserError(
            f"--label_column {name}: labels must be integers or strings, or lists of them, not {features[name]}",
            f"use one of {join_names(features)}",
        )
    return name


def _choose(kind: str, features: Collection[str], wanted: str | None, found: list[str]) -> str:
    """The column that a flag names, or the only one found. Raises ValueError if there is none."""
    if wanted in features or (wanted is None and len(found) == 1):
        return wanted or found[0]
    problem = f"each of {join_names(found)} may be the {kind} column" if found else f"there is no {kind} column"
    if wanted is not None:
        problem = f"--{kind}_column {wanted}: no such column"
    raise UserError(problem, f"set --{kind}_column to one of {join_names(features)}")


def _is_list(feature) -> bool:
    from datasets import LargeList, List

    return isinstance(feature, List | LargeList)


def _element(feature):
    """The feature of the elements of lists; others unchanged."""
    return feature.feature if _is_list(feature) else feature


def _values(dataset, column: str):
    """The labels of a column, those in lists one after the other, and the length of each list, if there are any."""
    from pyarrow import compute

    values = dataset.select_columns(column).with_format("arrow")[:][column]
    if not _is_list(dataset.features[column]):
        return values, None
    return compute.list_flatten(values), compute.list_value_length(values)


def _classes(dataset, column: str) -> tuple[list[str], list | None, tuple[str, ...]]:
    """The names of the classes, their values in the label column (None for 0, 1, 2, ...), and lines to print.

    Integer labels are class numbers from 0 to the highest label. If fewer than half of these numbers occur, as with
    0, 1000, 2000, only the numbers that occur are classes, and are their names.
    """
    names = getattr(_element(dataset.features[column]), "names", None)
    if names:
        return [str(name) for name in names], None, ()
    try:
        unique = _values(dataset, column)[0].unique().to_pylist()
        values = sorted(value for value in unique if value is not None)
    except UnicodeDecodeError:
        raise UserError(f"--label_column {column}: a label is not UTF-8 text", "save the column as UTF-8") from None
    if values and isinstance(values[0], str):
        return values, values, ()
    values = [int(value) for value in values if value >= 0]
    highest = max(values, default=-1)
    if 2 * len(values) >= highest + 1:
        return [str(number) for number in range(highest + 1)], None, ()
    note = f"--label_column {column}: only the labels that occur are classes: {join_names(values, 3)}"
    return [str(value) for value in values], values, (note,)


def _labels(split: str, values, counts, label_values: list | None, classes: int) -> np.ndarray:
    """The labels as class indices, int64 [N], below 0 for negative ones; those in lists as multi-hot rows.

    `label_values` are the values of class 0, 1, ... Raises ValueError for a null label.
    """
    rows = np.arange(len(values if counts is None else counts))
    if counts is not None:
        _refuse_null(split, counts, rows)
        counts = counts.to_numpy()
        rows = np.repeat(rows, counts)
    _refuse_null(split, values, rows)
    labels = values.to_numpy()
    if label_values is not None:
        found, labels = labels, indices_in(label_values, labels)
        unknown = found[(labels < 0) & (True if isinstance(label_values[0], str) else found >= 0)]
        if len(unknown):
            problem = f"split {split!r} has the class {unknown.tolist()[0]!r}, but the training split has only"
            raise UserError(f"{problem} {join_names(label_values)}", "fix the labels, or choose another split")
    labels = labels.astype(np.int64)
    return labels if counts is None else multi_hot(split, counts, labels, classes)


def _refuse_null(split: str, values, rows: np.ndarray) -> None:
    """Raise ValueError if one of these labels is null; `rows` are the rows of their images."""
    from pyarrow import compute

    if values.null_count:
        row = rows[compute.index(compute.is_null(values), True).as_py()]
        raise UserError(
            f"image {row} of split {split!r} has a null label",
            "fill it in (if a label is a list, an empty one stands for no label), or choose another split",
        )
