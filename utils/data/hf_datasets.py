"""Hugging Face data sets, from the Hub or from files: splits, images, labels and class names."""

import re
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from utils.config import require
from utils.console import join_names
from utils.data.labels import (
    distinct,
    indices_in,
    lacks_class,
    multi_hot,
    split_that_defines_classes,
)
from utils.data.parquet_files import hide_bars_without_terminal, names_of_feature
from utils.data.splits import Source, Split, fingerprint_of, stamp_of, whole_split
from utils.errors import UserError, one_line
from utils.hub import use_hub
from utils.settings.data import DataSettings

LABEL_NAMES = ("label", "labels", "class", "category", "target", "fine_label")
IMAGE_TYPES = ("binary", "large_binary", "string")  # encoded files, or their paths


class Table:
    """The image column of a Hugging Face data set; indexing returns the encoded bytes of a row."""

    def __init__(self, dataset, column: str):
        from datasets import Image

        self.column = column
        self.dataset = dataset.select_columns(column).cast_column(column, Image(decode=False))

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
        is_path = struct_field(column, "bytes").is_null()
        paths = struct_field(column, "path").filter(is_path).drop_null().to_pylist()
        return [*(file["filename"] for file in self.dataset.cache_files), *paths]

    def many(self, rows: Sequence[int]) -> list[bytes | None]:
        """Several rows at once, much faster than one by one; None for images without bytes."""
        return [value and value["bytes"] for value in self.dataset[rows][self.column]]


def load_hub(config: DataSettings) -> Source:
    """A data set of the Hugging Face Hub. Its code is not executed."""
    from datasets import load_dataset

    hide_bars_without_terminal()
    try:
        use_hub()
        splits = load_dataset(config.data, config.data_subset)
    except Exception as error:  # the network, the cache or a file can cause errors of any class
        problem = "no such file or folder, and it cannot be loaded from the Hub"
        raise UserError(
            f"--data {config.data}: {problem} ({one_line(error)[:300]})",
            "check the name and the network, or give a local folder",
        ) from error
    return table_source(splits, config)


def table_source(splits, config: DataSettings) -> Source:
    """The splits of a `DatasetDict`, or of a single `Dataset`."""
    splits = splits if isinstance(splits, dict) else {"train": splits}
    train = splits[split_that_defines_classes(splits, config.train_split)]
    image_column = _image_column(train.features, config.image_column)
    label_column = _label_column(train.features, config.label_column)
    class_names, classes = _classes(train, label_column)
    train_names = names_of_feature(train.features[label_column])

    def make(name: str) -> Split:
        dataset = splits[name]
        for column in (image_column, label_column):
            problem = (
                f"split {name!r} has no column {column!r}, only {join_names(dataset.features)}"
            )
            require(column in dataset.features, problem, "choose another split")
        labels = _labels(name, dataset, label_column, classes, train_names)
        images = Table(dataset, image_column)
        files = [file for file in images.files() if Path(file).is_file()]
        stamps: list = [(file, *stamp_of(file)) for file in files]
        if not dataset.cache_files:  # the table is in memory
            stamps += images.many(range(len(images)))
        groups = dataset[config.group_by] if config.group_by in dataset.features else None
        return whole_split(
            name, images, labels, fingerprint_of(name, image_column, *stamps), groups
        )

    return Source({name: partial(make, name) for name in splits}, class_names)


def _image_column(features, wanted: str | None) -> str:
    from datasets import Image

    found = [name for name in features if isinstance(features[name], Image)]
    # In files that were not written by `datasets`, images are a plain struct of bytes.
    structs = [n for n in features if isinstance(features[n], dict) and "bytes" in features[n]]
    texts = [n for n in features if getattr(features[n], "dtype", "") in IMAGE_TYPES]
    return _choose("image", features, wanted, found or structs, [*found, *structs, *texts])


def _label_column(features, wanted: str | None) -> str:
    from datasets import ClassLabel

    # of the elements of lists
    kinds = {name: getattr(each, "feature", each) for name, each in features.items()}
    found = [name for name in features if isinstance(kinds[name], ClassLabel)]
    known = [name for name in LABEL_NAMES if name in features][:1]
    valid = re.compile(r"u?int\d+|bool|(large_)?string(_view)?")
    fitting = [n for n in features if valid.fullmatch(getattr(kinds[n], "dtype", ""))]
    return _choose("label", features, wanted, found or known, fitting)


def _choose(
    kind: str, features, wanted: str | None, found: list[str], fitting: Collection[str]
) -> str:
    """The column that a flag names, or the only one found.

    Raises ValueError if there is none, or if its type is not `fitting`.
    """
    fix = f"set --{kind}_column to one of {join_names(features)}"
    flag = f"--{kind}_column"
    if wanted is None:
        require(found != [], f"there is no {kind} column", fix)
        require(len(found) == 1, f"each of {join_names(found)} may be the {kind} column", fix)
    name = wanted or found[0]
    require(name in features, f"{flag} {name}: no such column", fix)
    fix = "convert labels to integers or strings, and images to binary, or choose another column"
    require(name in fitting, f"{flag} {name}: holds {features[name]}, not {kind}s", fix)
    return name


def _values(dataset, column: str):
    """The labels of a column, those in lists one after the other, and the lengths of the lists."""
    from pyarrow import compute

    values = dataset.select_columns(column).with_format("arrow")[:][column]
    if not hasattr(dataset.features[column], "feature"):
        return values, None
    return compute.list_flatten(values), compute.list_value_length(values)


def _classes(dataset, column: str) -> tuple[list[str], Sequence]:
    """The names of the classes; and the names or the integers in the column that stand for them.

    Without names, the classes are the labels that occur, in order, except for negative ones.
    """
    if names := distinct(names_of_feature(dataset.features[column])):
        return names, names
    values = distinct(sorted(_values(dataset, column)[0].unique().drop_null().to_pylist()))
    if not values or not isinstance(values[0], str):
        values = [int(value) for value in values if value >= 0]
    return list(map(str, values)), values


def _labels(split: str, dataset, column: str, classes: Sequence, names: list[str]) -> np.ndarray:
    """The labels as class indices, int64 [N], -1 for negative ones; lists as multi-hot rows.

    `classes` are the classes of the training split, as names or integers. Labels match by name if
    both splits have names: the integers of a split stand for its own names, or for the training
    split's `names` if it has none. Raises ValueError for a null label.
    """
    values, counts = _values(dataset, column)
    nulls = values.null_count + (0 if counts is None else counts.null_count)
    fix = "fill them in (if a label is a list, with an empty one), or choose another split"
    require(nulls == 0, f"split {split!r} has null labels ({nulls})", fix)
    own = names_of_feature(dataset.features[column])
    unique = values.unique().to_pylist()
    called = dict(enumerate(own or names))
    found = [called.get(value, value) for value in unique]
    numbers = indices_in(classes, found)
    for value, number in zip(found, numbers, strict=True):
        if number < 0 and (isinstance(value, str) or value >= 0 or counts is not None):
            problem = lacks_class(value, classes, split, own or found)
            raise UserError(problem, "correct the labels, or choose another split")
    labels = numbers[indices_in(unique, values.to_numpy())]
    if counts is not None:
        labels = multi_hot(counts.to_numpy(), labels, len(classes))
    return labels
