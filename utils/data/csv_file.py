"""CSV files that list images: a header line such as `path,label,split`, then one image on each line."""

import csv
import io
import os
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from utils.config.settings import TrainConfig
from utils.console import join_names, printable
from utils.data.folders import split_word
from utils.data.labels import multi_hot
from utils.data.splits import (
    EVAL_NAMES,
    Files,
    Source,
    Split,
    fingerprint_of,
    split_that_defines_classes,
    whole_split,
)
from utils.errors import UserError, one_line

SEPARATOR = "|"  # between the labels of an image


class _Row(NamedTuple):
    """An image: the number of its line, and its values in the columns that are used."""

    line: int
    path: str
    label: str
    split: str = "train"

    def labels(self, several: bool) -> list[str]:
        """The label, or with `several` those that the separator divides."""
        if not several:
            return [self.label]
        return [name.strip() for name in self.label.split(SEPARATOR) if name.strip()]


def open_csv(path: str, config: TrainConfig) -> Source:
    """A text file with the columns path and label, and optionally split, named in its first line."""
    file = Path(os.path.abspath(path))  # names in checkpoints must not depend on the working directory
    rows = _read(file, config)
    names = _split_names(file, dict.fromkeys(row.split for row in rows))
    splits: dict[str, list[_Row]] = {}
    for row in rows:
        splits.setdefault(names[row.split], []).append(row)
    several = config.task == "multilabel" or (config.task == "auto" and any(SEPARATOR in row.label for row in rows))
    empty = next((row for row in rows if not (row.label or several)), None)
    if empty:
        raise _error(file, empty.line, "the label is empty", "fill it in, or remove the line")
    asked = {names.get(name, name) for name in (config.train_split, config.eval_split) if name}
    train = split_that_defines_classes(splits, config.train_split and names.get(config.train_split, config.train_split))
    class_names = _sorted({name for row in splits[train] for name in row.labels(several)})
    notes = _notes(file, splits, asked)
    openers = {name: partial(_make, name, own, file, class_names, several, notes) for name, own in splits.items()}
    return Source(openers, class_names, {alias: name for alias, name in names.items() if alias not in splits})


def _notes(file: Path, splits: dict[str, list[_Row]], asked: set[str]) -> tuple[str, ...]:
    """A line about the rows of splits that have neither a usual name nor one of these names, if there are any."""
    usual = {"train", *EVAL_NAMES, *asked}
    others = [f"{name} ({len(rows)})" for name, rows in splits.items() if name not in usual]
    fix = "--train_split and --eval_split select others"
    return (f"{file}: rows of other splits are left out: {join_names(others)}; {fix}",) if others else ()


def _make(
    name: str, rows: list[_Row], file: Path, class_names: list[str], several: bool, notes: tuple[str, ...]
) -> Split:
    number = {class_name: index for index, class_name in enumerate(class_names)}
    found: list[int] = []
    for row in rows:
        for label in row.labels(several):
            if label not in number:
                problem = f"the training split has no class {label!r}, only {join_names(class_names)}"
                raise _error(file, row.line, problem, "fix the label")
            found.append(number[label])
    labels = np.asarray(found, np.int64)
    if several:
        counts = np.asarray([len(row.labels(several)) for row in rows])
        labels = multi_hot(name, counts, labels, len(class_names))
    folder = os.path.join(file.parent, "")
    images = Files([row.path if row.path[0] == "/" else folder + row.path for row in rows], str(file.parent))
    return replace(whole_split(name, images, labels, fingerprint_of(file.resolve())), notes=notes)


def _read(file: Path, config: TrainConfig) -> list[_Row]:
    """The rows in order; without a column `split`, all of them are of the split train."""
    lines = _lines(file)
    _, header = next(lines, (1, []))
    columns = _columns(file, header, config)
    rows: list[_Row] = []
    first: dict[str, int] = {}  # the line of each image, by a path that does not depend on the spelling
    real_folder = cache(lambda folder: os.path.realpath(os.path.join(file.parent, folder)))
    for line, cells in lines:
        if len(cells) != len(header):
            problem = f"{len(cells)} columns, but the first line has {len(header)}"
            raise _error(file, line, problem, "put a value that contains a comma in double quotes")
        row = _Row(line, **{name: cells[place] for name, place in columns.items()})
        if not (row.path and row.split):
            empty = "split" if row.path else "path"
            raise _error(file, line, f"the {empty} is empty", "fill it in, or remove the line")
        name_at = row.path.rfind("/") + 1
        earlier = first.setdefault(f"{real_folder(row.path[:name_at])}/{row.path[name_at:]}", line)
        if earlier != line:
            raise _error(file, line, f"{printable(row.path)} is also on line {earlier}", "list each image once")
        rows.append(row)
    if not rows:
        raise UserError(f"{file}: no rows below the first line", "list one image on each line")
    return rows


def _columns(file: Path, header: list[str], config: TrainConfig) -> dict[str, int]:
    """The place of each field of a row, by the name of its column, in upper or lower case."""
    lower = [text.lower() for text in header]
    wanted = {"path": config.image_column or "path", "label": config.label_column or "label", "split": "split"}
    for name in (wanted["path"], wanted["label"]):
        if lower.count(name.lower()) != 1:
            problem = f"{file}: the first line must name one column {name!r}, but has {join_names(header) or 'nothing'}"
            raise UserError(problem, "add a first line such as path,label, or set --image_column and --label_column")
    return {field: lower.index(name.lower()) for field, name in wanted.items() if name.lower() in lower}


def _lines(file: Path) -> Iterator[tuple[int, list[str]]]:
    """The number and the cells of each line that is not blank. The delimiter is a comma, semicolon or tab."""
    data = file.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _error(file, line, "not valid UTF-8", "save the file as UTF-8") from None
    if "\0" in text:
        raise UserError(f"{file}: contains null characters, so it is not UTF-8 text", "save the file as UTF-8")
    delimiter = max(",;\t", key=text.partition("\n")[0].count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True, strict=True)
    try:
        for row in reader:
            cells = [cell.strip() for cell in row]
            if any(cells):  # a spreadsheet may write blank rows as commas
                yield reader.line_num, cells
    except csv.Error as error:
        fix = "check the double quotes: a value that starts with one must end with one"
        raise _error(file, reader.line_num, one_line(error), fix) from None


def _split_names(file: Path, written: Collection[str]) -> dict[str, str]:
    """Map the names in the file, and train, validation and test, to the names of the splits, as for image folders."""
    names: dict[str, str] = {}
    words: dict[str, str] = {}
    for text in written:
        word, lower = split_word(text), text.lower()
        if word and words.setdefault(word, text) != text:
            raise UserError(
                f"{file}: the splits {words[word]} and {text} may be the same",
                "use one name for both, or rename one of them, for example to extra",
            )
        names[text] = lower if lower in ("train", *EVAL_NAMES) else word or text
    return {word: names[text] for word, text in words.items()} | names


def _sorted(labels: set[str]) -> list[str]:
    """The class names: in numeric order if all labels consist of digits, else in alphabetical order."""
    is_numeric = all(label.isdecimal() and len(label) < 19 for label in labels)
    return sorted(sorted(labels), key=int) if is_numeric else sorted(labels)


def _error(file: Path, line: int, problem: str, fix: str) -> UserError:
    return UserError(f"{file}, line {line}: {problem}", fix)
