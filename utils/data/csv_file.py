"""CSV files that list images: a header line such as `path,label,split`, then one image on each line."""

import csv
import io
import os
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from utils.config.settings import TrainConfig
from utils.console import join_names, printable
from utils.data.folders import split_word
from utils.data.splits import (
    EVAL_NAMES,
    Files,
    Source,
    Split,
    fingerprint_of,
    indices_in,
    multi_hot,
    split_that_defines_classes,
    whole_split,
)
from utils.errors import UserError, one_line

SEPARATOR = "|"  # between the labels of an image


def open_csv(path: str, config: TrainConfig) -> Source:
    """A text file with the columns path and label, and optionally split, named in its first line."""
    file = Path(os.path.abspath(path))  # names in checkpoints must not depend on the working directory
    rows = _read(file, config)
    names = _split_names(file, rows["split"].unique())
    rows["split"], labels = rows["split"].map(names), rows["label"]
    has_several = labels.str.contains(SEPARATOR, regex=False).any()
    several = config.task == "multilabel" or (config.task == "auto" and has_several)
    if several:
        labels = labels.str.split(SEPARATOR).explode().str.strip()
        labels = labels[labels != ""]
    _refuse_empty(file, labels)
    asked = [names.get(name, name) for name in (config.train_split, config.eval_split) if name]
    counts = rows["split"].value_counts(sort=False).to_dict()
    others = [f"{name} ({count})" for name, count in counts.items() if name not in ("train", *EVAL_NAMES, *asked)]
    fix = "--train_split and --eval_split select others"
    notes = (f"{file}: rows of other splits are left out: {join_names(others)}; {fix}",) if others else ()
    train = split_that_defines_classes(counts, config.train_split and names.get(config.train_split, config.train_split))
    class_names = _sorted(set(labels[rows["split"].loc[labels.index] == train]))

    def make(name: str) -> Split:
        own = rows[rows["split"] == name]
        found = labels[labels.index.isin(own.index)]
        numbers = indices_in(class_names, found)
        for line, label in found[numbers < 0].items():
            problem = f"the training split has no class {label!r}, only {join_names(class_names)}"
            raise _error(file, line, problem, "fix the label")
        if several:
            lengths = found.groupby(level=0).size().reindex(own.index, fill_value=0)
            numbers = multi_hot(name, lengths.to_numpy(), numbers, len(class_names))
        images = Files([os.path.join(file.parent, path) for path in own["path"]], str(file.parent))
        return replace(whole_split(name, images, numbers, fingerprint_of(file.resolve())), notes=notes)

    aliases = {alias: name for alias, name in names.items() if alias not in counts}
    return Source({name: partial(make, name) for name in counts}, class_names, aliases)


def _read(file: Path, config: TrainConfig) -> Any:
    """A table of the columns path, label and split, by line. Without a column `split`, all are of the split train."""
    import pandas

    lines = _lines(file)
    _, header = next(lines, (1, []))
    columns = _columns(file, header, config)
    numbers: list[int] = []
    values: dict[str, list[str]] = {name: [] for name in columns}
    for line, cells in lines:
        if len(cells) != len(header):
            problem = f"{len(cells)} columns, but the first line has {len(header)}"
            raise _error(file, line, problem, "put a value that contains a comma in double quotes")
        numbers.append(line)
        for name, place in columns.items():
            values[name].append(cells[place])
    if not numbers:
        raise UserError(f"{file}: no rows below the first line", "list one image on each line")
    rows = pandas.DataFrame({"split": "train"} | values, index=numbers)
    _refuse_empty(file, rows["path"])
    _refuse_empty(file, rows["split"])
    # Two spellings of one path are equal when the links in its folder are resolved.
    parts = rows["path"].str.rpartition("/")
    real_folder = cache(lambda folder: os.path.realpath(os.path.join(file.parent, folder)))
    real = (parts[0] + parts[1]).map(real_folder) + "/" + parts[2]
    for line in rows.index[real.duplicated()]:
        problem = f"{printable(rows['path'][line])} is also on line {real.index[real == real[line]][0]}"
        raise _error(file, line, problem, "list each image once")
    return rows


def _refuse_empty(file: Path, column: Any) -> None:
    for line in column.index[column == ""]:
        raise _error(file, line, f"the {column.name} is empty", "fill it in, or remove the line")


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
