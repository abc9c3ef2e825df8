"""Hugging Face data sets: from the Hub, from parquet and arrow files, and from save_to_disk folders."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from utils.config import TrainConfig
from utils.data.splits import EVAL_NAMES, Source, Split, fingerprint_of, listed, whole_split
from utils.errors import one_line

TABLE_FILES = ("*.parquet", "*.arrow", "dataset_dict.json", "state.json")  # what tells such a folder
LABEL_NAMES = ("label", "labels", "class", "category", "target", "fine_label")


class Table:
    """The image column of a Hugging Face data set; reading a row gives the encoded bytes."""

    def __init__(self, dataset, column: str):
        from datasets import Image

        self.column, self.dataset = column, dataset.select_columns(column).cast_column(column, Image(decode=False))

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int) -> bytes:
        return self.many([row])[0]

    def many(self, rows: Sequence[int]) -> list[bytes]:
        """Several rows at once, many times faster than one after the other."""
        values = self.dataset[rows][self.column]
        return [v["bytes"] if v["bytes"] is not None else Path(v["path"]).read_bytes() for v in values]


def read_table_files(path: Path):
    """The splits of a save_to_disk folder, of parquet or arrow files in a folder, or of one such file."""
    from datasets import Dataset, load_dataset, load_from_disk
    from datasets.exceptions import DatasetGenerationError

    try:
        if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            return load_from_disk(str(path))
        if path.is_file():
            if path.suffix == ".arrow":
                return {"train": Dataset.from_file(str(path))}
            if path.suffix != ".parquet":
                raise ValueError(f"{path}: give a folder, or a .parquet or .arrow file")
            return load_dataset("parquet", data_files={"train": str(path)})
        kind = "parquet" if any(path.glob("*.parquet")) else "arrow"
        return load_dataset(kind, data_files=_files_by_split(sorted(path.glob(f"*.{kind}"))))
    except DatasetGenerationError as error:
        raise ValueError(f"{path}: not readable ({one_line(error.__cause__ or error)})") from error


def _files_by_split(files: list[Path]) -> dict[str, list[str]]:
    """Group files such as train-00000-of-00002.parquet by the word before the first dash, dot or digit."""
    groups: dict[str, list[str]] = {}
    for file in files:
        word = re.match(r"[A-Za-z]+", file.name)
        known = word and word[0].lower() in ("train", *EVAL_NAMES)
        groups.setdefault(word[0].lower() if known else "train", []).append(str(file))
    return groups


def load_hub(config: TrainConfig) -> Source:
    """A data set of the Hugging Face Hub; none of its code is executed."""
    from datasets import load_dataset

    try:
        return hugging_face(load_dataset(config.data, config.data_subset), config)
    except Exception as error:
        if isinstance(error, ValueError) and str(error).startswith("--"):
            raise
        raise ValueError(f"--data {config.data}: cannot be loaded from the Hub ({one_line(error)[:300]})") from error


def hugging_face(splits, config: TrainConfig) -> Source:
    """The splits of a `DatasetDict`, or a single `Dataset`."""
    splits = splits if isinstance(splits, dict) else {"train": splits}
    first = next(iter(splits.values()))
    image_column = _image_column(first.features, config.image_column)
    label_column = _label_column(first.features, config.label_column)
    train_name = config.train_split if config.train_split in splits else next(iter(splits))
    train_name = "train" if config.train_split is None and "train" in splits else train_name
    class_names = _class_names(splits[train_name], label_column)
    number = {name: index for index, name in enumerate(class_names)}

    def make(name: str) -> Split:
        dataset = splits[name]
        for column in (image_column, label_column):
            if column not in dataset.features:
                raise ValueError(f"split {name!r} has no column {column!r}; it has {listed(dataset.features)}")
        labels = dataset.with_format("numpy", columns=[label_column])[label_column][:]
        if labels.dtype.kind not in "iu":
            labels = np.asarray([number.get(str(label), -1) for label in labels])
        fingerprint = fingerprint_of(dataset._fingerprint, image_column)
        return whole_split(name, Table(dataset, image_column), labels, fingerprint)

    return Source(config.data, {name: (lambda name=name: make(name)) for name in splits}, class_names)


def _image_column(features, wanted: str | None) -> str:
    from datasets import Image

    if wanted is not None:
        if wanted not in features:
            raise ValueError(f"--image_column {wanted}: no such column; there are {listed(features)}")
        return wanted
    found = [name for name, feature in features.items() if isinstance(feature, Image)]
    if not found:  # a plain struct of bytes, as files written without datasets hold
        found = [name for name, feature in features.items() if isinstance(feature, dict) and "bytes" in feature]
    if len(found) != 1:
        raise ValueError(f"{len(found)} image columns; name one with --image_column out of {listed(features)}")
    return found[0]


def _label_column(features, wanted: str | None) -> str:
    from datasets import ClassLabel

    if wanted is not None:
        if wanted not in features:
            raise ValueError(f"--label_column {wanted}: no such column; there are {listed(features)}")
        return wanted
    found = [name for name, feature in features.items() if isinstance(feature, ClassLabel)]
    if not found:
        found = [name for name in LABEL_NAMES if name in features][:1]
    if len(found) != 1:
        raise ValueError(f"{len(found)} label columns; name one with --label_column out of {listed(features)}")
    return found[0]


def _class_names(dataset, column: str) -> list[str]:
    names = getattr(dataset.features[column], "names", None)
    if names:
        return [str(name) for name in names]
    values = dataset.unique(column)
    if all(isinstance(value, int) for value in values):
        return [str(i) for i in range(max(values, default=-1) + 1)]
    if not all(isinstance(value, str) for value in values):
        raise ValueError(f"--label_column {column}: labels must be whole numbers or names, not {type(values[0])}")
    return sorted(values)
