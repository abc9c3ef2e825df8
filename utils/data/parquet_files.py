"""Read Hugging Face tables from files: parquet and arrow files, and save_to_disk folders."""

import glob
import re
import sys
from collections import Counter
from pathlib import Path

from utils.config import require
from utils.data.splits import EVAL_NAMES, fingerprint_of, stamp_of
from utils.errors import UserError, one_line

_SAVED = ("dataset_dict.json", "state.json")  # save_to_disk writes one of these into a folder


def has_tables(folder: Path) -> bool:
    """Whether a folder directly contains tables."""
    return any(_visible(folder, name) for name in ("*.parquet", "*.arrow", *_SAVED))


def _visible(folder: Path, pattern: str) -> list[Path]:
    """The files that match the pattern, without hidden ones such as ._train.parquet of macOS."""
    return sorted(file for file in folder.glob(pattern) if not file.name.startswith("."))


def read_table_files(path: Path):
    """The splits of a save_to_disk folder, a folder of parquet or arrow files, or one such file."""
    if path.is_file() and path.suffix not in (".parquet", ".arrow"):
        fix = "give a folder, a .parquet or .arrow file, or a .csv file that lists images"
        raise UserError(f"{path}: is neither a folder nor a table", fix)
    try:
        return _load_splits(path)
    except UserError:
        raise
    except Exception as error:  # the libraries raise errors of any class for damaged files
        fix = (
            "write it again, or restore a damaged file (a table must have rows, and row groups of "
            "less than 2 GB; if the cache of Hugging Face data sets cannot be written, set HF_HOME "
            "to another folder)"
        )
        cause = one_line(error.__cause__ or error)[:300]
        if "chunked array" in cause:
            cause = "a row group has more than 2 GB"
        raise UserError(f"{path}: cannot be read ({cause})", fix) from error


def _load_splits(path: Path):
    from datasets import config, load_dataset, load_from_disk

    # Otherwise it would report the read to the Hub, and wait if there is no network.
    config.HF_UPDATE_DOWNLOAD_COUNTS = False
    hide_bars_without_terminal()
    if any((path / name).exists() for name in _SAVED):
        return load_from_disk(str(path))
    files = [path]
    data_files = {"train": [str(path)]}
    if not path.is_file():
        files = _visible(path, "*.parquet") or _visible(path, "*.arrow")
        _check_shards(files)
        data_files = _files_by_split(files)
    # The cache of `datasets` compares only paths and times, which another file can have, too.
    kind = files[0].suffix[1:]
    stamps = fingerprint_of(*map(stamp_of, files))
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

    found: dict = {}
    for path in paths:
        for column, kind in Features.from_arrow_schema(_schema_of(path)).items():
            if names := names_of_feature(kind):
                first, other = found.setdefault(column, (path, names))
                problem = f"{path}: {column} has other classes than in {first}"
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


def _check_shards(files: list[Path]) -> None:
    """Check the number of the shards NAME-00000-of-00010, and so on."""
    found = (re.fullmatch(r"(.+)-\d+-of-(\d+).*", file.stem) for file in files)
    for (name, total), count in Counter(shard.groups() for shard in found if shard).items():
        problem = f"{files[0].parent}: has {count} of {int(total)} shards {name}-...-of-{total}"
        fix = f"add or remove files, or remove -of-{total} from their names"
        require(count == int(total), problem, fix)


def _files_by_split(files: list[Path]) -> dict[str, list[str]]:
    """Group files by the split in their names, as train-00000-of-00002.parquet or val.parquet."""
    groups: dict[str, list[str]] = {}
    for file in files:
        shard = re.fullmatch(r"(?:.*-)?(\w+)-\d+-of-\d+(-\w+)?", file.stem)
        word = re.split("[^a-z]", file.name.lower())[0]
        name = "train"
        if shard:
            name = shard[1]
        elif word in EVAL_NAMES:
            name = word
        groups.setdefault(name, []).append(str(file))
    return groups


def hide_bars_without_terminal() -> None:
    """Turn off the progress bars of `datasets` if standard error is not a terminal."""
    from datasets import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
