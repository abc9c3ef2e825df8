"""CSV files that list images: a header such as `path,label,split`, then a row for each image."""

import os
from functools import cache, partial
from pathlib import Path
from typing import Any

from utils.console import join_names, nfc, printable
from utils.data.folders import name_splits
from utils.data.labels import (
    distinct,
    indices_in,
    lacks_class,
    multi_hot,
    split_that_defines_classes,
)
from utils.data.listing import ENDINGS, archives_at
from utils.data.splits import EVAL_NAMES, Files, Source, Split, fingerprint_of, whole_split
from utils.errors import UserError, one_line
from utils.files import in_form_of_files
from utils.settings.data import DataSettings

# errors of spreadsheets, and what libraries and databases write for a missing value
_NOTHING = r"#[^a-z\s]+[!?]|#N/?[A-Z]|NaN|nan|<NA>|NULL|\\N"


def open_csv(path: str, config: DataSettings) -> Source:
    """A text file with the columns path, label and optionally split, named in its first line."""
    file = Path(os.path.abspath(path))  # checkpoints must not depend on the working directory
    rows = _read_rows(file, config)
    has_bar = rows["label"].str.contains("|", regex=False).any()
    several = config.task == "multilabel" or (config.task == "auto" and has_bar)
    no_label = _NOTHING if several else f"{_NOTHING}|"
    for name, empty in {"path": "", "split": "", "label": no_label}.items():
        for row, cell in rows[name][rows[name].str.fullmatch(empty)].items():
            fix = "fill it in, or remove the row"
            raise _row_error(file, row, f"the {name} is {cell!r}", fix)
    _find_files(file, rows)
    notes = []
    # review.csv of extras.folds has the column was, the labels before they were reviewed.
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

    root = str(file.parent)

    def within(path: str) -> str:
        return path.removeprefix(os.path.join(root, ""))

    def make(name: str) -> Split:
        own = rows[rows["split"] == name]
        labels = own["label"].explode().dropna()  # an empty list becomes NaN
        numbers = indices_in(class_names, labels)
        for row, label in labels[numbers < 0].items():
            problem = lacks_class(label, class_names, name, distinct(labels))
            raise _row_error(file, row, problem, "fix the label")
        if several:
            numbers = multi_hot(own["label"].str.len().to_numpy(), numbers, len(class_names))
        images = Files([*map(within, own["path"])], root)
        groups = own.get(str(config.group_by).lower())
        return whole_split(name, images, numbers, fingerprint_of(file.resolve()), groups)

    return Source({n: partial(make, n) for n in counts.index}, class_names, names, tuple(notes))


def _find_files(file: Path, rows: Any) -> None:
    """Make the paths absolute, in the Unicode form of the files.

    Raises ValueError for a path that means another file, and for an image that is listed twice.
    """
    rows["path"] = rows["path"].map(os.path.expanduser).map(partial(os.path.join, file.parent))
    missing = rows["path"][~rows["path"].map(os.path.exists)]
    if len(missing) == len(rows) and not _meant(first := missing.iloc[0]):
        if archives := archives_at(first):
            problem = f"{printable(first)} is in an archive ({printable(archives)})"
            fix = "unpack the images, and list these files"
            raise _row_error(file, missing.index[0], problem, fix)
    for row, path in missing.items():
        meant = _meant(path)
        if meant and nfc(meant) != nfc(os.path.normpath(path)):
            problem = f"there is no file {printable(path)}, but {printable(meant)}"
            raise _row_error(file, row, problem, "write / and the exact names of the files")
        rows.loc[row, "path"] = meant or path
    # Two spellings of one path are equal when the links in its folder are resolved.
    folder = cache(os.path.realpath)
    real = rows["path"].map(
        lambda path: folder(os.path.dirname(path)) + "/" + os.path.basename(path)
    )
    for row in rows.index[real.duplicated()]:
        problem = f"{printable(rows['path'][row])} is also in row {real.eq(real[row]).idxmax()}"
        raise _row_error(file, row, problem, "list each image once, with all its labels, as in a|b")


def _meant(path: str) -> str:
    """The file that a missing path may mean: in another Unicode form, with / for \\, or with an
    ending; empty if there is none.
    """
    found = in_form_of_files(path.replace("\\", "/"))
    endings = "", *ENDINGS, *map(str.upper, ENDINGS)
    return next(filter(os.path.exists, (found + ending for ending in endings)), "")


def _read_rows(file: Path, config: DataSettings) -> Any:
    """A table of path, label and split, by the number of the row. The default split is train."""
    import pandas

    try:
        if b"\0" in file.read_bytes():  # as after a power failure
            raise ValueError("null characters")
        with file.open(encoding="utf-8-sig") as lines:
            first = lines.readline()
            skipped = int(first.startswith("sep="))  # Excel's line that names the separator
            if skipped:
                first = lines.readline()
        table = pandas.read_csv(
            file,
            sep=max(",;\t", key=first.count),
            header=None,
            skiprows=skipped,
            dtype=str,
            keep_default_na=False,
            skip_blank_lines=False,
            skipinitialspace=True,
        )
    except ValueError as error:
        fix = "start with a header, use UTF-8, and put values with a comma in double quotes"
        raise UserError(f"{file}: cannot be read ({one_line(error)})", fix) from None
    table.index += 1 + skipped
    table = table.apply(lambda column: column.str.strip())
    table = table[(table != "").any(axis=1)]  # a spreadsheet may write blank rows as commas
    header = [name.lower() for name in table[:1].to_numpy().ravel()]
    wanted = {"path": config.image_column or "path", "label": config.label_column or "label"}
    columns = {"split": "train"} | {name: table[n] for n, name in enumerate(header)}
    for field, name in wanted.items():
        if header.count(name.lower()) != 1:
            problem = f"must name one column {name!r}, but has {join_names(header)}"
            fix = "add a first line such as path,label, or set --image_column and --label_column"
            raise _row_error(file, 1, problem, fix)
        columns[field] = columns[name.lower()]
    rows = pandas.DataFrame(columns)[1:]
    if rows.empty:
        raise _row_error(file, 2, "there is no image", "list one image on each line")
    return rows


def _row_error(file: Path, row: int, problem: str, fix: str) -> UserError:
    return UserError(f"{file}, row {row}: {problem}", fix)
