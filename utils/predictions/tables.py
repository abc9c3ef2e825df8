"""The images that predict.py reads, rows of predictions, and the files that they are written to."""

import csv
import glob
import io
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from utils.console import join_names, printable
from utils.data.check import check_images
from utils.data.scan import Scan
from utils.data.splits import Files, Split, fingerprint_of, whole_split
from utils.errors import UserError
from utils.files import check_output_file
from utils.tasks.task import Predictions, Task
from utils.training.evaluation import TOP


def find_images(given: Sequence[str]) -> Split:
    """The images at these paths, in this order, each once; those of a folder or a pattern are sorted by name.

    The labels of the split have no meaning. Raises UserError if a path does not exist or if there is no image.
    """
    found: list[str] = []
    notes: list[str] = []
    for path in _matches(given):
        if os.path.isdir(path):
            scan = Scan(Path(path), [])
            found += scan.images(path, "")
            notes += scan.notes()
        else:
            found.append(path)
    if not found:
        left_out = f" ({'; '.join(notes)})" * bool(notes)
        fix = "convert them to JPEG or PNG" if notes else "name image files, or folders with images in them"
        raise UserError(f"{join_names(given)}: no images{left_out}", fix)
    paths = list(dict.fromkeys(found))
    split = whole_split("images", Files(paths), np.zeros(len(paths)), fingerprint_of(*map(os.fsencode, paths)))
    return replace(split, notes=tuple(notes))


def check_all(split: Split, cache_dir: str, progress: Callable) -> Split:
    """The split with the errors of all images that cannot be decoded; they keep their positions."""
    checked = check_images(split, True, cache_dir, progress)
    return replace(checked, bad={row: f"not a readable image ({reason})" for row, reason in checked.bad.items()})


def _matches(given: Sequence[str]) -> list[str]:
    """The paths, with each pattern replaced by the paths that it matches."""
    matches: list[str] = []
    for path in given:
        if os.path.lexists(path):
            matches.append(path)
            continue
        found = sorted(glob.glob(os.path.expanduser(path), recursive=True))
        if not found:
            what = "matches no file" if glob.has_magic(path) else "no such file or folder"
            raise UserError(f"{join_names([path])}: {what}", "correct the path")
        matches += found
    return matches


Columns = dict[str, list]
_NUMBER = re.compile(r"[-+]?\d+(\.\d+)?([eE][-+]?\d+)?")
SHOWN = 20  # images in the table on the terminal


class Row(NamedTuple):
    """The prediction for one image, as JSON stores it; `error` is why there is none.

    `predicted` is a class, or in multilabel the list of classes above --threshold. `classes` are the most likely ones,
    the most likely first.
    """

    predicted: str | list[str] | None
    classes: list[str]
    probabilities: list[float]
    error: str | None = None


def rounded(number: float) -> float:
    """The number with six significant digits."""
    return float(f"{number:.6g}")


def make_rows(task: Task, top: np.ndarray, scores: np.ndarray, count: int) -> list[Row]:
    """The rows of n images with `count` classes each; `top` and `scores` [n, k] are as in `Predictions`."""
    predicted, top, probabilities = task.name_classes(top, scores, count)
    parts = zip(predicted, top, probabilities.tolist(), strict=True)
    return [Row(own, [task.class_names[n] for n in best], list(map(rounded, values))) for own, best, values in parts]


def columns_of(rows: Sequence[Row], count: int) -> Columns:
    """The predictions as columns: predicted, class_1, probability_1, class_2, ... of `count` classes."""
    columns: Columns = {"predicted": [row.predicted for row in rows]}
    for place in range(count):
        columns[f"class_{place + 1}"] = [row.classes[place] if row.classes else None for row in rows]
        columns[f"probability_{place + 1}"] = [row.probabilities[place] if row.classes else None for row in rows]
    return columns


def columns_of_split(task: Task, split: Split, found: Predictions) -> Columns:
    """The predictions of a split as columns, with the path or index, the label and the loss of each sample."""
    names, places = task.class_names, split.rows[found.indices].tolist()
    images: Columns = {"index": places}
    if isinstance(split.images, Files):
        images = {"path": [split.images.names[row] for row in places]}
    labels = [[names[n] for n in np.flatnonzero(row)] if np.ndim(row) else names[row] for row in found.labels]
    columns = columns_of(make_rows(task, found.top, found.scores, TOP), min(TOP, len(names)))
    return {**images, "label": labels, **columns, "loss": list(map(rounded, found.losses.tolist()))}


def result_rows(rows: Sequence[Row], split: Split) -> list[tuple[str, Any]]:
    """The rows of a table on the terminal: the first images, and the number of unreadable ones."""
    lines: list[tuple[str, Any]] = []
    for position, row in enumerate(rows[:SHOWN]):
        words = (f"{name} {value}" for name, value in zip(row.classes, row.probabilities, strict=True))
        found = ", ".join(words) if row.error is None else row.error
        lines.append((printable(split.describe(position)), printable(found)))
    bad = sum(row.error is not None for row in rows)
    lines += [("...", f"{len(rows) - SHOWN} more")] * (len(rows) > SHOWN)
    return lines + [("unreadable", f"{bad} of {len(rows)} images")] * (bad > 0)


def check_table_file(flag: str, path: Path) -> None:
    """Raise UserError, which names the flag, if `path` has another ending or cannot be written."""
    if path.suffix.lower() not in _FORMS:
        raise UserError(f"{flag} {path}: must end in {', '.join(_FORMS)}", "for example predictions.csv")
    check_output_file(flag, path)


def encode(columns: Columns, path: Path) -> bytes:
    """The contents of the file `path` with these columns; its ending selects the format.

    A cell is a string, a number, None, or a list of strings. Characters that are not UTF-8 are escaped.
    """
    clean = {name: [_clean(cell) for cell in cells] for name, cells in columns.items()}
    return _FORMS[path.suffix.lower()](clean)


def _clean(cell: Any) -> Any:
    if isinstance(cell, list):
        return [_clean(text) for text in cell]
    return cell.encode(errors="backslashreplace").decode() if isinstance(cell, str) else cell


def _csv(columns: Columns) -> bytes:
    """Comma-separated, with a header. A list of texts is written as JSON.

    All texts are quoted. Otherwise, before Python 3.13, a carriage return in a text would end the row.
    """
    file = io.StringIO()
    writer = csv.writer(file, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(map(_csv_cell, row) for row in zip(*columns.values(), strict=True))
    return file.getvalue().encode()


def _csv_cell(cell: Any) -> Any:
    """The cell; a text that a spreadsheet would run as a formula gets an apostrophe in front."""
    if isinstance(cell, list):
        return json.dumps(cell, ensure_ascii=False)
    is_formula = isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r", "\n"))
    return f"'{cell}" if is_formula and not _NUMBER.fullmatch(cell) else cell


def _json(columns: Columns) -> bytes:
    """A list with an object for each row, one on each line."""
    rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
    lines = [json.dumps(row, ensure_ascii=False, allow_nan=False) for row in rows]
    return ("[\n" + ",\n".join(lines) + "\n]\n").encode()


def _parquet(columns: Columns) -> bytes:
    import pyarrow
    from pyarrow import parquet

    def type_of(cells: list) -> Any:
        if any(isinstance(cell, list) for cell in cells):
            return pyarrow.list_(pyarrow.string())
        return pyarrow.string() if set(cells) <= {None} else None  # None: as the cells are

    arrays = {name: pyarrow.array(cells, type_of(cells)) for name, cells in columns.items()}
    file = io.BytesIO()
    parquet.write_table(pyarrow.table(arrays), file)
    return file.getvalue()


_FORMS = {".csv": _csv, ".json": _json, ".parquet": _parquet}
