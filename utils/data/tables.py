"""Hugging Face data sets: from the Hub, from parquet and arrow files, and from save_to_disk folders."""

import errno
import json
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from utils.config.settings import TrainConfig
from utils.console import join_names
from utils.data.splits import EVAL_NAMES, Source, Split, fingerprint_of, likely_train, whole_split
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
            if not Path(value["path"]).is_file():  # reading a pipe or a device may never end
                raise ValueError(f"{value['path']} is missing or not a regular file")
            return Path(value["path"]).read_bytes()
        return value.get("bytes")

    def many(self, rows: Sequence[int]) -> list[bytes | None]:
        """Several rows at once, many times faster than one after the other; None where the bytes lie elsewhere."""
        return [value and value["bytes"] for value in self.dataset[rows][self.column]]


def has_tables(folder: Path) -> bool:
    return any(_visible(folder, name) for name in TABLE_FILES)


def _visible(folder: Path, pattern: str) -> list[Path]:
    """The files that match the pattern, without hidden ones such as those of macOS (._train.parquet)."""
    return sorted(file for file in folder.glob(pattern) if not file.name.startswith("."))


def read_table_files(path: Path):
    """The splits of a save_to_disk folder, of parquet or arrow files in a folder, or of one such file."""
    if path.is_file() and path.suffix not in (".parquet", ".arrow"):
        raise ValueError(f"{path}: give a folder, or a .parquet or .arrow file")
    _check_files(path)
    try:
        return _read(path)
    except Exception as error:  # broken files make the libraries below raise anything
        _check_cache(error, path)
        reason = one_line(error.__cause__ or error)[:300]
        raise ValueError(
            f"{_unreadable(path)}: cannot be read ({reason}); it must have rows: fix or remove it"
        ) from error


def _check_cache(error: Exception, path: Path) -> None:
    """Raise ValueError if reading failed because `datasets` cannot write its own cache: the data is fine then."""
    from datasets import config

    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            elsewhere = cause.filename and not Path(cause.filename).resolve().is_relative_to(path.resolve())
            if elsewhere or cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG):
                raise ValueError(
                    f"{config.HF_DATASETS_CACHE}: the cache of Hugging Face data sets cannot be written "
                    f"({cause.strerror}); set HF_HOME to a writable folder with free space"
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
    parquet = _visible(path, "*.parquet")
    return load_dataset(
        "parquet" if parquet else "arrow", data_files=_files_by_split(parquet or _visible(path, "*.arrow"))
    )


def _check_files(path: Path) -> None:
    """Raise ValueError if a table is not a regular file, or if a shard is missing or a duplicate."""
    if path.is_file():
        return
    for file in (file for pattern in TABLE_FILES for file in _visible(path, pattern)):
        if file.is_dir():
            raise ValueError(f"{file}: is a folder; for the tables in it, give --data {file}")
        if not file.is_file():
            raise ValueError(f"{file}: is not a regular file; remove or replace it")
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        _check_saved(path)
    else:
        _check_shards(_visible(path, "*.parquet") or _visible(path, "*.arrow"))


def _check_saved(path: Path) -> None:
    """Check that a save_to_disk folder holds all files that it lists; `datasets` reports damaged lists."""
    malformed = (OSError, ValueError, TypeError, KeyError, RecursionError)
    folders = [path]
    with suppress(*malformed):
        folders = [path / name for name in json.loads((path / "dataset_dict.json").read_text())["splits"]]
    for folder in folders:
        needed = [folder / "state.json", folder / "dataset_info.json"]
        with suppress(*malformed):
            if needed[0].is_file():
                listed_files = json.loads(needed[0].read_text())["_data_files"]
                needed += [folder / file["filename"] for file in listed_files]
        missing = [file for file in needed if not file.is_file()]
        if missing:
            raise ValueError(f"{path}: cannot be read, missing {join_names(missing, 3)}; copy or save the folder again")


def _check_shards(files: list[Path]) -> None:
    """Check that each of the shards NAME-00000-of-00010, and so on, exists exactly once."""
    sets: dict[str, dict[int, dict[int, Path]]] = {}  # by name, by total, by number
    for file in files:
        shard = re.fullmatch(r"(.+)-(\d+)-of-(\d+)(.*)", file.stem)
        if not shard:
            continue
        name, number, total = shard[1], int(shard[2]), int(shard[3])
        totals = sets.setdefault(name, {})
        numbers = totals.setdefault(total, {})
        other = numbers.get(number) or next((n for t in totals if t != total for n in totals[t].values()), None)
        if other:
            raise ValueError(
                f"{file}: duplicates {other.name} or belongs to another set of shards; remove one of the two"
            )
        numbers[number] = file
    for name, totals in sets.items():
        for total, numbers in totals.items():
            first = 1 if 0 not in numbers and total in numbers else 0
            expected = range(first, first + min(total, len(numbers) + 13))  # enough to name the first that are missing
            missing = [f"{name}-{number:05}-of-{total:05}" for number in expected if number not in numbers]
            if missing:
                raise ValueError(
                    f"{files[0].parent}: {total - len(numbers)} of {total} shards not found: {join_names(missing, 3)}; "
                    f"add them, or rename the others without -of-{total:05} to use only those"
                )


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
    class_names, known, notes = _classes(train, label_column)

    def make(name: str) -> Split:
        dataset = splits[name]
        for column in (image_column, label_column):
            if column not in dataset.features:
                has = join_names(dataset.features)
                raise ValueError(f"split {name!r} has no column {column!r}, only {has}; choose another split")
        labels = _labels(name, dataset, label_column, known)
        split = whole_split(name, Table(dataset, image_column), labels, fingerprint_of(dataset._fingerprint))
        return replace(split, notes=notes)

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
        raise ValueError(f"--image_column {wanted}: holds no images but {feature}; there are {join_names(features)}")
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
        which = f"{join_names(found)} may each be the {kind} column" if found else f"there is no {kind} column"
        raise ValueError(f"{which}; name one with --{kind}_column out of {join_names(features)}")
    return found[0]


def _check_column(features, name: str, flag: str) -> None:
    if name not in features:
        raise ValueError(f"{flag} {name}: no such column; there are {join_names(features)}")


def _classes(dataset, column: str) -> tuple[list[str], list | None, tuple[str, ...]]:
    """The names of the classes, the labels that stand for them (None for 0, 1, 2, ...), and lines to print.

    Integer labels stand for the classes from 0 up to the highest label. If fewer than half of these occur, as with
    0, 1000, 2000, only those that occur are classes, named by their numbers.
    """
    names = getattr(dataset.features[column], "names", None)
    if names:
        return [str(name) for name in names], None, ()
    try:
        values = sorted(value for value in dataset.unique(column) if value is not None)
    except UnicodeDecodeError:
        raise ValueError(f"--label_column {column}: a label is not UTF-8 text; save the column as UTF-8") from None
    if values and isinstance(values[0], str):
        return values, values, ()
    values = [int(value) for value in values if value >= 0]
    highest = max(values, default=-1)
    if highest >= MOST_CLASSES:
        raise ValueError(f"--label_column {column}: labels go up to {highest}; number the classes from 0 on")
    if 2 * len(values) >= highest + 1:
        return [str(number) for number in range(highest + 1)], None, ()
    note = f"--label_column {column}: only the labels that occur are classes: {join_names(values, 3)}"
    return [str(value) for value in values], values, (note,)


def _labels(split: str, dataset, column: str, known: list | None) -> np.ndarray:
    """The classes' numbers, int64 [N], -1 where there is no label; `known` are the labels of the classes 0, 1, ..."""
    import pyarrow as pa
    from pyarrow import compute

    values = dataset.select_columns(column).with_format("arrow")[:][column]
    if known is not None:
        is_text = isinstance(known[0], str)
        values = values if is_text else values.cast(pa.int64())
        numbers = compute.index_in(values, value_set=pa.array(known, values.type))
        labelled = values.is_valid() if is_text else compute.greater_equal(values, 0)
        unknown = values.filter(compute.and_(numbers.is_null(), labelled))
        if len(unknown):
            first = unknown[0].as_buffer().to_pybytes().decode("utf-8", "replace") if is_text else unknown[0].as_py()
            raise ValueError(
                f"split {split!r} has the class {first!r}, which the training split does not have; "
                f"its classes are {join_names(known)}"
            )
        values = numbers
    return values.cast(pa.int64()).fill_null(-1).to_numpy()
