"""Read Hugging Face tables from files: parquet and arrow files, and save_to_disk folders."""

import errno
import glob
import re
import sys
from collections import defaultdict
from pathlib import Path

from utils.config.bounds import require
from utils.console import join_names
from utils.data.splits import EVAL_NAMES, fingerprint_of, stamp_of
from utils.errors import UserError, one_line

# A folder with one of these holds tables.
TABLE_FILES = ("*.parquet", "*.arrow", "dataset_dict.json", "state.json")


def has_tables(folder: Path) -> bool:
    """Whether a folder directly contains tables."""
    return any(_visible(folder, name) for name in TABLE_FILES)


def _visible(folder: Path, pattern: str) -> list[Path]:
    """The files that match the pattern, without hidden ones such as ._train.parquet of macOS."""
    return sorted(file for file in folder.glob(pattern) if not file.name.startswith("."))


def _is_saved(path: Path) -> bool:
    """Whether save_to_disk wrote this folder."""
    return (path / "dataset_dict.json").exists() or (path / "state.json").exists()


def read_table_files(path: Path):
    """The splits of a save_to_disk folder, a folder of parquet or arrow files, or one such file."""
    if path.is_file() and path.suffix not in (".parquet", ".arrow"):
        fix = "give a folder, a .parquet or .arrow file, or a .csv file that lists images"
        raise UserError(f"{path}: is neither a folder nor a table", fix)
    _check_files(path)
    try:
        return _read(path)
    except UserError:
        raise
    except Exception as error:  # the libraries raise errors of any class for damaged files
        cause = error.__cause__ or error
        _check_cache(cause, path)
        fix = "fix or remove the damaged file (a table must have rows)"
        raise UserError(f"{path}: cannot be read ({one_line(cause)[:300]})", fix) from error


def _check_cache(cause: BaseException, path: Path) -> None:
    """Raise ValueError if `datasets` cannot write its cache; the data may be undamaged."""
    from datasets import config

    if not isinstance(cause, OSError):
        return
    elsewhere = cause.filename and not Path(cause.filename).resolve().is_relative_to(path.resolve())
    if elsewhere or cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG):
        folder = f"{config.HF_DATASETS_CACHE}: the cache of Hugging Face data sets"
        problem = f"{folder} cannot be written ({cause.strerror})"
        raise UserError(problem, "set HF_HOME to a writable folder with free space") from cause


def _read(path: Path):
    from datasets import Dataset, config, load_dataset, load_from_disk

    # Otherwise it would report the read to the Hub, and wait if there is no network.
    config.HF_UPDATE_DOWNLOAD_COUNTS = False
    hide_bars_without_terminal()
    if _is_saved(path):
        return load_from_disk(str(path))
    if path.is_file() and path.suffix == ".arrow":
        return {"train": Dataset.from_file(str(path))}
    parquet = [path] if path.is_file() else _visible(path, "*.parquet")
    files = parquet or _visible(path, "*.arrow")
    data_files = {"train": [str(path)]} if path.is_file() else _files_by_split(files)
    # The cache of `datasets` compares only paths and times, which another file can have, too.
    kind, stamps = "parquet" if parquet else "arrow", fingerprint_of(*map(stamp_of, files))
    splits: dict = {}
    # each alone, because all would get the class names of one of them
    for name, paths in data_files.items():
        _check_class_names(paths)
        # In a path, * ? and [ ] would be patterns.
        splits |= load_dataset(kind, stamps, data_files={name: [*map(glob.escape, paths)]})
    return splits


def _check_class_names(paths: list[str]) -> None:
    """Raise ValueError if the files of a split have other names for the same integers."""
    from datasets import Features

    found: dict[str, tuple[str, list[str]]] = {}
    for path in paths:
        for column, kind in Features.from_arrow_schema(_schema_of(path)).items():
            if names := names_of_feature(kind):
                first, other = found.setdefault(column, (path, names))
                problem = f"{path}: {column} has the classes {join_names(names)}, but in {first} {join_names(other)}"
                require(names == other, problem, "write all files of a split with the same classes")


def _schema_of(path: str):
    from pyarrow import ipc, parquet

    if not path.endswith(".arrow"):
        return parquet.read_schema(path)
    with open(path, "rb") as file:
        # a file of the IPC file format is a stream after 8 bytes
        file.seek(8 if file.read(6) == b"ARROW1" else 0)
        return ipc.read_schema(file)


def names_of_feature(feature) -> list[str]:
    """The names that a column, or the lists in it, have for integers; empty if there are none."""
    return list(map(str, getattr(getattr(feature, "feature", feature), "names", None) or []))


def _check_files(path: Path) -> None:
    """Raise ValueError if a table is not a regular file, or if a shard is missing or duplicated."""
    if path.is_file():
        return
    for file in (file for pattern in TABLE_FILES for file in _visible(path, pattern)):
        if not file.is_file():
            raise UserError(f"{file}: is not a regular file", "remove or replace it")
    if not _is_saved(path):  # `datasets` names what such a folder lacks
        _check_shards(_visible(path, "*.parquet") or _visible(path, "*.arrow"))


def _check_shards(files: list[Path]) -> None:
    """Check that each of the shards NAME-00000-of-00010, and so on, exists exactly once."""
    # By name and total, then by number.
    sets: dict[tuple[str, int], dict[int, Path]] = defaultdict(dict)
    for file in files:
        if shard := re.fullmatch(r"(.+)-(\d+)-of-(\d+)(.*)", file.stem):
            other = sets[shard[1], int(shard[3])].setdefault(int(shard[2]), file)
            if other != file:
                raise UserError(f"{file}: duplicates {other.name}", "remove one of the two")
    for (name, total), numbers in sets.items():
        first = 1 if 0 not in numbers and total in numbers else 0
        # Enough to list the first missing ones.
        expected = range(first, first + min(total, len(numbers) + 13))
        absent = [number for number in expected if number not in numbers]
        missing = [f"{name}-{number:05}-of-{total:05}" for number in absent]
        if missing:
            count = f"{files[0].parent}: {total - len(numbers)} of {total} shards not found"
            fix = f"add them, or remove -of-{total:05} from the names of the others"
            raise UserError(f"{count}: {join_names(missing, 3)}", fix)


def _files_by_split(files: list[Path]) -> dict[str, list[str]]:
    """Group files by the split in their names, as train-00000-of-00002.parquet or val.parquet."""
    groups: dict[str, list[str]] = {}
    for file in files:
        shard = re.fullmatch(r"(?:.*-)?(\w+)-\d+-of-\d+(-\w+)?", file.stem)
        word = re.split("[^a-z]", file.name.lower())[0]
        name = shard[1] if shard else word if word in EVAL_NAMES else "train"
        groups.setdefault(name, []).append(str(file))
    return groups


def hide_bars_without_terminal() -> None:
    """Turn off the progress bars of `datasets` if standard error is not a terminal."""
    from datasets import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
