"""CSV files that list images: a header line such as `path,label,split`, then one image on each line."""

import csv
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path

import numpy as np

from utils.config.settings import TrainConfig
from utils.console import join_names, printable
from utils.data.folders import split_word
from utils.data.multi_hot import SEPARATOR, multi_hot
from utils.data.sampling import to_weights, weight_column
from utils.data.splits import EVAL_NAMES, Files, Source, Split, fingerprint_of, split_that_defines_classes, whole_split
from utils.errors import UserError, one_line

_LONGEST = 4095  # bytes of a path on Linux


@dataclass
class _Rows:
    """The images of one split: their paths, the labels of each, line numbers, and weights if there are any."""

    paths: list[str] = field(default_factory=list)
    labels: list[list[str]] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)


class ListedFiles(Files):
    """The image files that a CSV file lists, with their line numbers."""

    missing = "no longer listed"

    def __init__(self, paths: list[str], file: Path, lines: list[int]):
        super().__init__(paths, str(file.parent))
        self.file, self.lines = file.name, lines

    def stamp(self, row: int) -> tuple[int, int, int]:
        try:
            return super().stamp(row)
        except OSError as error:
            reason = f"{error.strerror}, line {self.lines[row]} of {self.file}"
            raise OSError(error.errno, reason, self.paths[row]) from None


def open_csv(path: str, config: TrainConfig) -> Source:
    """A text file with the columns path and label, and optionally split, named in its first line."""
    file = Path(os.path.abspath(path))  # names in checkpoints must not depend on the working directory
    rows_of = _read(file, config)
    names = _split_names(file, list(rows_of))
    wanted = config.train_split and names.get(config.train_split, config.train_split)
    splits = {names[written]: rows for written, rows in rows_of.items()}
    several = _divide_labels(file, rows_of, config)
    labels = splits[split_that_defines_classes(splits, wanted)].labels
    class_names = _sorted([name for names in labels for name in names])
    notes = _notes(file, splits, {names.get(name, name) for name in (config.train_split, config.eval_split) if name})
    openers = {name: partial(_make, name, rows, file, class_names, several, notes) for name, rows in splits.items()}
    return Source(openers, class_names, {alias: name for alias, name in names.items() if alias not in splits})


def _notes(file: Path, splits: dict[str, _Rows], wanted: set[str]) -> tuple[str, ...]:
    """A line about the rows of splits that have neither a usual name nor one of these names, if there are any."""
    usual = {"train", *EVAL_NAMES, *wanted}
    others = [f"{name} ({len(rows.paths)})" for name, rows in splits.items() if name not in usual]
    fix = "--train_split and --eval_split select others"
    return (f"{file}: rows of other splits are left out: {join_names(others)}; {fix}",) if others else ()


def _divide_labels(file: Path, rows_of: dict[str, _Rows], config: TrainConfig) -> bool:
    """Divide the cells of labels with several of them; returns whether the task is multilabel.

    With --task auto it is if a cell has the separator. Else an empty cell is an error.
    """
    cells = [cell for rows in rows_of.values() for (cell,) in rows.labels]
    if config.task == "multilabel" or (config.task == "auto" and any(SEPARATOR in cell for cell in cells)):
        for rows in rows_of.values():
            rows.labels = [[name.strip() for name in cell.split(SEPARATOR) if name.strip()] for (cell,) in rows.labels]
        return True
    pairs = [pair for rows in rows_of.values() for pair in zip(rows.lines, rows.labels, strict=True)]
    empty = [line for line, cell in pairs if cell == [""]]
    if empty:
        raise UserError(f"{_place(file, min(empty))}: the label is empty", "fill it in, or remove the line")
    return False


def _make(name: str, rows: _Rows, file: Path, class_names: list[str], several: bool, notes: tuple[str, ...]) -> Split:
    number = {class_name: index for index, class_name in enumerate(class_names)}
    counts = np.asarray([len(names) for names in rows.labels])
    labels = np.asarray([number.get(label, -1) for names in rows.labels for label in names], np.int64)
    if (labels < 0).any():
        place = int(np.repeat(np.arange(len(counts)), counts)[labels.argmin()])
        unknown = next(label for label in rows.labels[place] if label not in number)
        problem = f"the training split has no class {unknown!r}, only {join_names(class_names)}"
        raise UserError(f"{_place(file, rows.lines[place])}: {problem}", "fix the label")
    if several:
        labels = multi_hot(name, counts, labels, len(class_names))
    folder = os.path.join(file.parent, "")
    images = ListedFiles([p if p[0] == "/" else folder + p for p in rows.paths], file, rows.lines)
    weights = to_weights(rows.weights) if rows.weights else None
    return replace(whole_split(name, images, labels, fingerprint_of(file.resolve())), notes=notes, weights=weights)


def _read(file: Path, config: TrainConfig) -> dict[str, _Rows]:
    """The rows of each split, by its name in the file; without a column `split`, all rows are the split train."""
    lines = _lines(file)
    number, header = next(lines, (1, []))
    path_at = _column(file, header, "image", config.image_column or "path")
    label_at = _column(file, header, "label", config.label_column or "label")
    lower = [name.lower() for name in header]
    split_at = lower.index("split") if "split" in lower else None
    weight = weight_column(config)
    weight_at = lower.index(weight.lower()) if weight and weight.lower() in lower else None
    found: dict[str, _Rows] = {}
    first: dict[str, int] = {}  # the line of each image, by a path that does not depend on the spelling
    real_folder = cache(lambda folder: os.path.realpath(os.path.join(file.parent, folder)))
    for number, cells in lines:
        if len(cells) != len(header):
            problem = f"{len(cells)} columns, but the first line has {len(header)}"
            raise UserError(f"{_place(file, number)}: {problem}", "put a value that contains a comma in double quotes")
        path, label, split = cells[path_at], cells[label_at], "train" if split_at is None else cells[split_at]
        if not (path and split):
            empty = "split" if path else "path"
            raise UserError(f"{_place(file, number)}: the {empty} is empty", "fill it in, or remove the line")
        if len(path) > _LONGEST and len(os.fsencode(path)) > _LONGEST:
            problem = f"the path has {len(path):,} characters, and a file system allows {_LONGEST:,} bytes"
            raise UserError(f"{_place(file, number)}: {problem}", "check that it is a path")
        name_at = path.rfind("/") + 1
        line = first.setdefault(f"{real_folder(path[:name_at])}/{path[name_at:]}", number)
        if line != number:
            problem = f"{printable(path)} is also on line {line}"
            raise UserError(f"{_place(file, number)}: {problem}", "list each image once")
        rows = found.get(split) or found.setdefault(split, _Rows())
        rows.paths.append(path)
        rows.labels.append([label])
        rows.lines.append(number)
        if weight_at is not None:
            rows.weights.append(cells[weight_at])
    if not found:
        raise UserError(f"{file}: no rows below the first line", "list one image on each line")
    return found


def _lines(file: Path) -> Iterator[tuple[int, list[str]]]:
    """The number and the cells of each line that is not blank. The delimiter is a comma, semicolon or tab."""
    data = file.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{_place(file, line)}: not valid UTF-8", "save the file as UTF-8") from None
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
        problem, fix = one_line(error), "check the double quotes: a value that starts with one must end with one"
        if problem.startswith("field larger"):
            problem = f"a value has more than {csv.field_size_limit():,} characters"
        raise UserError(f"{_place(file, reader.line_num)}: {problem}", fix) from None


def _column(file: Path, header: list[str], kind: str, name: str) -> int:
    """The number of the column with this name, in upper or lower case."""
    lower = [text.lower() for text in header]
    if lower.count(name.lower()) != 1:
        problem = f"{file}: the first line must name one column {name!r}, but has {join_names(header) or 'nothing'}"
        raise UserError(problem, f"add a first line such as path,label, or set --{kind}_column")
    return lower.index(name.lower())


def _split_names(file: Path, written: list[str]) -> dict[str, str]:
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


def _sorted(labels: list[str]) -> list[str]:
    """The class names: in numeric order if all labels consist of digits, else in alphabetical order."""
    unique = sorted(set(labels))
    is_numeric = all(label.isdecimal() and len(label) < 19 for label in unique)
    return sorted(unique, key=int) if is_numeric else unique


def _place(file: Path, line: int) -> str:
    return f"{file}, line {line}"
