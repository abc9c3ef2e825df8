"""CSV files that list images: a header such as `path,label,split`, then a row for each image."""

import os
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from utils.config.settings import TrainConfig
from utils.console import join_names, nfc, printable
from utils.data.folders import name_splits
from utils.data.splits import (
    EVAL_NAMES,
    Files,
    Source,
    Split,
    distinct,
    fingerprint_of,
    indices_in,
    lacks_class,
    multi_hot,
    note_forms,
    split_that_defines_classes,
    whole_split,
)
from utils.errors import UserError, one_line


def open_csv(path: str, config: TrainConfig) -> Source:
    """A text file with the columns path, label and optionally split, named in its first line."""
    file = Path(os.path.abspath(path))  # checkpoints must not depend on the working directory
    rows = _read(file, config)
    has_bar = rows["label"].str.contains("|", regex=False).any()
    several = config.task == "multilabel" or (config.task == "auto" and has_bar)
    for name in ("path", "split") if several else ("path", "split", "label"):
        for row in rows.index[rows[name] == ""]:
            raise _error(file, row, f"the {name} is empty", "fill it in, or remove the row")
    notes = _find_files(file, rows)
    # review.csv of utils.folds has the column was, the labels before they were reviewed.
    changed = rows["path"][rows["label"] != rows.get("was", rows["label"])]
    if changed.size:
        notes.append(f"{file}: {changed.size} labels were changed: {join_names(changed)}")
    if several:  # without the spaces around the bars
        rows["label"] = rows["label"].str.findall(r"[^|\s](?:[^|]*[^|\s])?")
    names = name_splits(file, rows["split"].unique())
    rows["split"] = rows["split"].map(names)
    counts = rows["split"].value_counts(sort=False)
    asked = [name and names.get(name, name) for name in (config.train_split, config.eval_split)]
    if others := sorted(set(counts.index) - {"train", *EVAL_NAMES, *asked}):
        left_out = join_names(f"{name} ({counts[name]})" for name in others)
        line = f"{file}: rows of other splits are left out: {left_out}"
        notes.append(f"{line}; --train_split and --eval_split select others")
    train = rows["split"] == split_that_defines_classes(counts.index, asked[0])
    found = sorted(set(rows["label"][train].explode().dropna()))
    class_names = distinct(sorted(found, key=int if all(map(str.isdecimal, found)) else str))

    def make(name: str) -> Split:
        own = rows[rows["split"] == name]
        labels = own["label"].explode().dropna()  # an empty list becomes NaN
        numbers = indices_in(class_names, labels)
        for row, label in labels[numbers < 0].items():
            problem = lacks_class(label, class_names, name, distinct(labels))
            raise _error(file, row, problem, "fix the label")
        if several:
            numbers = multi_hot(own["label"].str.len().to_numpy(), numbers, len(class_names))
        images = Files(own["path"].tolist(), str(file.parent))
        split = whole_split(name, images, numbers, fingerprint_of(file.resolve()))
        groups = own.get(str(config.group_by).lower())
        return replace(split, notes=note_forms(class_names, labels), groups=groups)

    return Source({n: partial(make, n) for n in counts.index}, class_names, names, tuple(notes))


def _find_files(file: Path, rows: Any) -> list[str]:
    """Make the paths absolute. Returns a line about files under another Unicode form of the name.

    Raises ValueError for a path that means another file, and for an image that is listed twice.
    """
    paths = rows["path"].map(partial(os.path.join, file.parent))
    rows["path"] = paths.map(_on_disk)
    other = paths[rows["path"] != paths]
    for row, path in other.items():
        meant = rows["path"][row]
        if nfc(os.path.normpath(path)) != nfc(meant):
            problem = f"there is no file {printable(path)}, but {printable(meant)}"
            fix = "write paths with / and with the endings of the files"
            raise _error(file, row, problem, fix)
    # Two spellings of one path are equal when the links in its folder are resolved.
    folder = cache(os.path.realpath)
    real = rows["path"].map(
        lambda path: folder(os.path.dirname(path)) + "/" + os.path.basename(path)
    )
    for row in rows.index[real.duplicated()]:
        problem = f"{printable(rows['path'][row])} is also in row {real.eq(real[row]).idxmax()}"
        raise _error(file, row, problem, "list each image once")
    line = f"{file}: files found under another Unicode form of the name: {join_names(other, 3)}"
    return [line] * (len(other) > 0)


def _read(file: Path, config: TrainConfig) -> Any:
    """A table of path, label and split, by the number of the row. The default split is train."""
    import pandas

    try:
        if b"\0" in file.read_bytes():  # as after a power failure
            raise ValueError("null characters")
        with file.open(encoding="utf-8-sig") as lines:
            delimiter = max(",;\t", key=lines.readline().count)
        table = pandas.read_csv(
            file,
            sep=delimiter,
            header=None,
            dtype=str,
            keep_default_na=False,
            skip_blank_lines=False,
            skipinitialspace=True,
        )
    except ValueError as error:
        fix = "start with a header, use UTF-8, and put values with a comma in double quotes"
        raise UserError(f"{file}: cannot be read ({one_line(error)})", fix) from None
    table.index += 1
    table = table.apply(lambda column: column.str.strip())
    table = table[(table != "").any(axis=1)]  # a spreadsheet may write blank rows as commas
    header = [name.lower() for name in table[:1].to_numpy().ravel()]
    wanted = {"path": config.image_column or "path", "label": config.label_column or "label"}
    columns = {"split": "train"} | {name: table[n] for n, name in enumerate(header)}
    for field, name in wanted.items():
        if header.count(name.lower()) != 1:
            problem = f"must name one column {name!r}, but has {join_names(header)}"
            fix = "add a first line such as path,label, or set --image_column and --label_column"
            raise _error(file, 1, problem, fix)
        columns[field] = columns[name.lower()]
    rows = pandas.DataFrame(columns)[1:]
    if rows.empty:
        raise _error(file, 2, "there is no image", "list one image on each line")
    return rows


def _on_disk(path: str) -> str:
    """The existing file that a missing path may mean: in another Unicode form, with / for \\, or
    with an ending.
    """
    if os.path.exists(path):
        return path
    found = "/"
    for part in os.path.normpath(path.replace("\\", "/")).split("/"):
        exact = os.path.join(found, part)
        found = exact if os.path.exists(exact) else _files_in(found).get(nfc(exact), "")
        if not found:
            return path
    return found


@cache
def _files_in(folder: str) -> dict[str, str]:
    """The files and folders in a folder by their paths in NFC form, with and without their endings."""
    files = sorted(map(str, Path(folder).glob("*")))
    without = {nfc(os.path.splitext(file)[0]): file for file in files}
    return without | {nfc(file): file for file in files}


def _error(file: Path, row: int, problem: str, fix: str) -> UserError:
    return UserError(f"{file}, row {row}: {problem}", fix)
