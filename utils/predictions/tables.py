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


_NUMBER = re.compile(r"[-+]?\d+(\.\d+)?([eE][-+]?\d+)?")
SHOWN = 20  # images in the table on the terminal


class Row(NamedTuple):
    """The prediction for one image; `error` is why there is none.

    `predicted` is a class, or in multilabel the list of classes above --threshold. `likely` has the most likely classes
    and their probabilities, the most likely first.
    """

    predicted: str | list[str] | None
    likely: list[tuple[str, float]]
    error: str | None = None

    def cells(self, count: int) -> dict[str, Any]:
        """The columns predicted, class_1, probability_1, class_2, ... of `count` classes."""
        cells: dict[str, Any] = {"predicted": self.predicted}
        for place in range(count):
            name, probability = self.likely[place] if self.likely else (None, None)
            cells |= {f"class_{place + 1}": name, f"probability_{place + 1}": probability}
        return cells


def rounded(number: float) -> float:
    """The number with six significant digits."""
    return float(f"{number:.6g}")


def make_rows(task: Task, top: np.ndarray, scores: np.ndarray, count: int) -> list[Row]:
    """The rows of n images with `count` classes each; `top` and `scores` [n, k] are as in `Predictions`."""
    predicted, top, probabilities = task.name_classes(top, scores, count)
    names = [[task.class_names[n] for n in best] for best in top]
    values = [list(map(rounded, own)) for own in probabilities.tolist()]
    parts = zip(predicted, names, values, strict=True)
    return [Row(own, list(zip(best, p, strict=True))) for own, best, p in parts]


def rows_of_split(task: Task, split: Split, found: Predictions) -> list[dict[str, Any]]:
    """The rows of the file of a split: path or index, label, prediction and loss of each sample."""
    names, places, rows = task.class_names, split.rows[found.indices].tolist(), []
    parts = zip(places, found.labels, make_rows(task, found.top, found.scores, TOP), found.values[:, 0], strict=True)
    for place, label, row, loss in parts:
        image = {"path": split.images.names[place]} if isinstance(split.images, Files) else {"index": place}
        own = [names[n] for n in np.flatnonzero(label)] if np.ndim(label) else names[label]
        rows.append({**image, "label": own, **row.cells(min(TOP, len(names))), "loss": rounded(loss)})
    return rows


def result_rows(rows: Sequence[Row], split: Split) -> list[tuple[str, Any]]:
    """The rows of a table on the terminal: the first images, and the number of unreadable ones."""
    lines: list[tuple[str, Any]] = []
    for position, row in enumerate(rows[:SHOWN]):
        words = (f"{name} {value}" for name, value in row.likely)
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


def encode(rows: Sequence[dict[str, Any]], path: Path) -> bytes:
    """The contents of the file `path` with these rows, at least one; its ending selects the format.

    A cell is a string, a number, None, or a list of strings. Characters that are not UTF-8 are escaped.
    """
    return _FORMS[path.suffix.lower()]([{name: _clean(cell) for name, cell in row.items()} for row in rows])


def _clean(cell: Any) -> Any:
    if isinstance(cell, list):
        return [_clean(text) for text in cell]
    return cell.encode(errors="backslashreplace").decode() if isinstance(cell, str) else cell


def _csv(rows: list[dict[str, Any]]) -> bytes:
    """Comma-separated, with a header. A list of texts is written as JSON.

    All texts are quoted. Otherwise, before Python 3.13, a carriage return in a text would end the row.
    """
    file = io.StringIO()
    writer = csv.DictWriter(file, rows[0], quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _csv_cell(cell) for name, cell in row.items()} for row in rows)
    return file.getvalue().encode()


def _csv_cell(cell: Any) -> Any:
    """The cell; a text that a spreadsheet would run as a formula gets an apostrophe in front."""
    if isinstance(cell, list):
        return json.dumps(cell, ensure_ascii=False)
    is_formula = isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r", "\n"))
    return f"'{cell}" if is_formula and not _NUMBER.fullmatch(cell) else cell


def _json(rows: list[dict[str, Any]]) -> bytes:
    """A list with an object for each row, one on each line."""
    lines = [json.dumps(row, ensure_ascii=False, allow_nan=False) for row in rows]
    return ("[\n" + ",\n".join(lines) + "\n]\n").encode()


def _parquet(rows: list[dict[str, Any]]) -> bytes:
    import pyarrow
    from pyarrow import parquet

    def type_of(name: str) -> Any:
        cells = [row[name] for row in rows]
        if any(isinstance(cell, list) for cell in cells):
            return pyarrow.list_(pyarrow.string())
        return pyarrow.string() if set(cells) <= {None} else pyarrow.infer_type(cells)

    file = io.BytesIO()
    schema = pyarrow.schema([(name, type_of(name)) for name in rows[0]])
    parquet.write_table(pyarrow.Table.from_pylist(rows, schema), file)
    return file.getvalue()


_FORMS = {".csv": _csv, ".json": _json, ".parquet": _parquet}
