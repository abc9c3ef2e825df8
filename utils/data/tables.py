"""Hugging Face data sets: from the Hub, from parquet and arrow files, and from save_to_disk folders."""

import errno
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from utils.config import TrainConfig
from utils.data.splits import EVAL_NAMES, Source, Split, fingerprint_of, likely_train, listed, whole_split
from utils.errors import one_line

TABLE_FILES = ("*.parquet", "*.arrow", "dataset_dict.json", "state.json")  # what tells such a folder
LABEL_NAMES = ("label", "labels", "class", "category", "target", "fine_label")
IMAGE_TYPES = ("binary", "large_binary", "string")  # encoded files, or paths of them
MOST_CLASSES = 10**6  # labels above are identifiers, not numbers of classes


class Table:
    """The image column of a Hugging Face data set; reading a row gives the encoded bytes."""

    def __init__(self, dataset, column: str):
        from datasets import Image

        self.column, self.dataset = column, dataset.select_columns(column).cast_column(column, Image(decode=False))

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int) -> bytes | None:
        value = self.dataset[row][self.column] or {}
        if value.get("bytes") is None and value.get("path"):
            return Path(value["path"]).read_bytes()
        return value.get("bytes")

    def many(self, rows: Sequence[int]) -> list[bytes | None]:
        """Several rows at once, many times faster than one after the other; None where the bytes lie elsewhere."""
        return [value and value["bytes"] for value in self.dataset[rows][self.column]]


def has_tables(folder: Path) -> bool:
    return any(any(folder.glob(name)) for name in TABLE_FILES)


def read_table_files(path: Path):
    """The splits of a save_to_disk folder, of parquet or arrow files in a folder, or of one such file."""
    if path.is_file() and path.suffix not in (".parquet", ".arrow"):
        raise ValueError(f"{path}: give a folder, or a .parquet or .arrow file")
    try:
        return _read(path)
    except Exception as error:  # broken files make the libraries below raise anything
        _check_cache(error, path)
        reason = one_line(error.__cause__ or error)[:300]
        raise ValueError(
            f"{_unreadable(path)}: cannot be read ({reason}); it must have rows: mend or remove it"
        ) from error


def _check_cache(error: Exception, path: Path) -> None:
    """Raise ValueError when reading failed because `datasets` cannot write its own cache: then the data are fine."""
    from datasets import config

    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            elsewhere = cause.filename and not Path(cause.filename).resolve().is_relative_to(path.resolve())
            if elsewhere or cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG):
                raise ValueError(
                    f"{config.HF_DATASETS_CACHE}: the cache of Hugging Face data sets cannot be written "
                    f"({cause.strerror}); set HF_HOME to a folder with free space that this user may write to"
                ) from error
        cause = cause.__cause__ or cause.__context__


def _read(path: Path):
    from datasets import Dataset, config, load_dataset, load_from_disk

    config.HF_UPDATE_DOWNLOAD_COUNTS = False  # or it would tell the Hub, and wait for it where there is no network
    _no_bars_without_a_terminal()
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        return load_from_disk(str(path))
    if path.is_file() and path.suffix == ".arrow":
        return {"train": Dataset.from_file(str(path))}
    if path.is_file():
        return load_dataset("parquet", data_files={"train": str(path)})
    kind = "parquet" if any(path.glob("*.parquet")) else "arrow"
    return load_dataset(kind, data_files=_files_by_split(sorted(path.glob(f"*.{kind}"))))


def _unreadable(path: Path) -> Path:
    """The parquet file whose footer is damaged or tells of no rows, if that is what is wrong with `path`."""
    from pyarrow.parquet import read_metadata

    for file in sorted(path.glob("*.parquet")):
        try:
            if read_metadata(file).num_rows:
                continue
        except (ValueError, OSError):
            pass
        return file
    return path


def _files_by_split(files: list[Path]) -> dict[str, list[str]]:
    """Group files by split: train-00000-of-00002.parquet as the Hub names them, else val.parquet, test_1.parquet."""
    groups: dict[str, list[str]] = {}
    for file in files:
        shard = re.fullmatch(r"(?:.*-)?(\w+)-\d+-of-\d+(-\w+)?", file.stem)
        word = re.match(r"[a-z]*", file.name.lower())[0]
        name = shard[1] if shard else word if word in EVAL_NAMES else "train"
        groups.setdefault(name, []).append(str(file))
    return groups


def _no_bars_without_a_terminal() -> None:
    from datasets import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()


def load_hub(config: TrainConfig) -> Source:
    """A data set of the Hugging Face Hub; none of its code is executed."""
    from datasets import load_dataset

    _no_bars_without_a_terminal()
    try:
        splits = load_dataset(config.data, config.data_subset)
    except Exception as error:  # from a network, a cache and files, all of them others'
        reason = one_line(error)[:300]
        raise ValueError(
            f"--data {config.data}: no such file or folder, and it cannot be loaded from the Hub ({reason}); "
            "check the name and the network, or give a local folder"
        ) from error
    return hugging_face(splits, config)


def hugging_face(splits, config: TrainConfig) -> Source:
    """The splits of a `DatasetDict`, or a single `Dataset`."""
    splits = splits if isinstance(splits, dict) else {"train": splits}
    train = splits[likely_train(splits, config.train_split)]
    image_column = _image_column(train.features, config.image_column)
    label_column = _label_column(train.features, config.label_column)
    class_names = _class_names(train, label_column)

    def make(name: str) -> Split:
        dataset = splits[name]
        for column in (image_column, label_column):
            if column not in dataset.features:
                has = listed(dataset.features)
                raise ValueError(f"split {name!r} has no column {column!r}, only {has}; choose another split")
        labels = _labels(name, dataset, label_column, class_names)
        return whole_split(name, Table(dataset, image_column), labels, fingerprint_of(dataset._fingerprint))

    return Source({name: (lambda name=name: make(name)) for name in splits}, class_names)


def _image_column(features, wanted: str | None) -> str:
    from datasets import Image

    if wanted is None:
        found = [name for name, feature in features.items() if isinstance(feature, Image)]
        # else a plain struct of bytes, as files written without datasets hold
        return _only(found or [name for name, feature in features.items() if _is_struct(feature)], "image", features)
    _check_column(features, wanted, "--image_column")
    feature = features[wanted]
    if not (isinstance(feature, Image) or _is_struct(feature) or getattr(feature, "dtype", "") in IMAGE_TYPES):
        raise ValueError(f"--image_column {wanted}: holds no images but {feature}; there are {listed(features)}")
    return wanted


def _is_struct(feature) -> bool:
    return isinstance(feature, dict) and "bytes" in feature


def _label_column(features, wanted: str | None) -> str:
    from datasets import ClassLabel

    if wanted is None:
        found = [name for name, feature in features.items() if isinstance(feature, ClassLabel)]
        wanted = _only(found or [name for name in LABEL_NAMES if name in features][:1], "label", features)
    _check_column(features, wanted, "--label_column")
    dtype = getattr(features[wanted], "dtype", "")
    if not re.fullmatch(r"u?int\d+|bool|(large_)?string", dtype):
        raise ValueError(f"--label_column {wanted}: labels must be whole numbers or names, not {features[wanted]}")
    return wanted


def _only(found: list[str], kind: str, features) -> str:
    if len(found) != 1:
        which = f"{listed(found)} may each be the {kind} column" if found else f"there is no {kind} column"
        raise ValueError(f"{which}; name one with --{kind}_column out of {listed(features)}")
    return found[0]


def _check_column(features, name: str, flag: str) -> None:
    if name not in features:
        raise ValueError(f"{flag} {name}: no such column; there are {listed(features)}")


def _class_names(dataset, column: str) -> list[str]:
    names = getattr(dataset.features[column], "names", None)
    if names:
        return [str(name) for name in names]
    values = [value for value in dataset.unique(column) if value is not None]
    if values and isinstance(values[0], str):
        return sorted(values)
    highest = int(max(values, default=-1))
    if highest >= MOST_CLASSES:
        raise ValueError(f"--label_column {column}: labels go up to {highest}; number the classes from 0 on")
    return [str(number) for number in range(highest + 1)]


def _labels(split: str, dataset, column: str, class_names: list[str]) -> np.ndarray:
    """The classes' numbers, int64 [N], -1 where there is no label."""
    import pyarrow as pa
    from pyarrow import compute

    values = dataset.select_columns(column).with_format("arrow")[:][column]
    if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        numbers = compute.index_in(values, value_set=pa.array(class_names, values.type))
        unknown = values.filter(compute.and_(numbers.is_null(), values.is_valid()))
        if len(unknown):
            raise ValueError(
                f"split {split!r} has the class {unknown[0].as_py()!r}, which the training split does not have; "
                f"its classes are {listed(class_names)}"
            )
        values = numbers
    return values.cast(pa.int64()).fill_null(-1).to_numpy()
