"""Rows of predictions, and the files that they are written to."""

import csv
import json
import re
from collections.abc import Sequence
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from utils.console import printable
from utils.data import Files, Split
from utils.tasks import Predictions, Task
from utils.training import TOP_CLASSES

# The start of a text that a spreadsheet would run as a formula, unless all of it is a number.
_FORMULA = re.compile(r"\A(?=[=+\-@\t\r\n])(?![-+]?\d+(\.\d+)?([eE][-+]?\d+)?\Z)")
_dumps = partial(json.dumps, ensure_ascii=False, allow_nan=False)
SHOWN = 20  # images in the table on the terminal


class Row(NamedTuple):
    """The prediction for one image; `error` is why there is none.

    `predicted` is a class, or in multilabel the list of classes above --threshold. `likely` has
    the most likely classes and their probabilities, the most likely first.
    """

    predicted: str | list[str] | None
    likely: list[tuple[str, float]]
    error: str | None = None

    def cells(self, count: int) -> dict:
        """The columns predicted, class_1, probability_1, class_2, ... of `count` classes."""
        cells = {"predicted": self.predicted}
        likely: Sequence[tuple] = self.likely or [(None, None)] * count
        for place, (name, probability) in enumerate(likely[:count], 1):
            cells |= {f"class_{place}": name, f"probability_{place}": probability}
        return cells


def rounded(number: float) -> float:
    """The number with six significant digits."""
    return float(f"{number:.6g}")


def make_rows(task: Task, top: np.ndarray, scores: np.ndarray, count: int) -> list[Row]:
    """The rows of n images with `count` classes; `top` and `scores` are as in `Predictions`."""
    predicted, top, probabilities = task.name_classes(top, scores, count)
    rows = []
    for own, best, values in zip(predicted, top, probabilities.tolist(), strict=True):
        names = [task.class_names[n] for n in best]
        rows.append(Row(own, list(zip(names, map(rounded, values), strict=True))))
    return rows


def rows_of_split(task: Task, split: Split, found: Predictions) -> list[dict]:
    """The rows of the file of a split: path or index, label, prediction and loss of each sample."""
    names = task.class_names
    images = split.images
    rows = []
    made = make_rows(task, found.top, found.scores, TOP_CLASSES)
    places = split.image_index[found.indices].tolist()
    losses = found.values[:, 0]
    for place, label, row, loss in zip(places, found.labels, made, losses, strict=True):
        image = {"path": images.names[place]} if isinstance(images, Files) else {"index": place}
        own = [*compress(names, label)] if np.ndim(label) else names[label]
        cells = row.cells(min(TOP_CLASSES, len(names)))
        rows.append({**image, "label": own, **cells, "loss": rounded(loss)})
    return rows


def result_rows(rows: Sequence[Row], split: Split) -> list[tuple[str, Any]]:
    """The rows of a table on the terminal: the first images, and the number of unreadable ones."""
    lines = []
    for position, row in enumerate(rows[:SHOWN]):
        found = row.error or ", ".join(f"{name} {value}" for name, value in row.likely)
        lines.append((printable(split.describe(position)), printable(found)))
    if len(rows) > SHOWN:
        lines.append(("...", f"{len(rows) - SHOWN} more"))
    if bad := sum(row.error is not None for row in rows):
        lines.append(("unreadable", f"{bad} of {len(rows)} images"))
    return lines


def encode(rows: Sequence[dict], path: Path) -> bytes:
    """The contents of the file `path` with these rows, at least one; its ending selects the format.

    A cell is a string, a number, None, or a list of strings. What is not UTF-8 is escaped.
    """
    clean = [{name: _clean(cell) for name, cell in row.items()} for row in rows]
    return _FORMS[path.suffix.lower()](clean)


def _clean(cell: Any) -> Any:
    if isinstance(cell, list):
        return [_clean(text) for text in cell]
    return cell.encode(errors="backslashreplace").decode() if isinstance(cell, str) else cell


def _csv(rows: list[dict]) -> bytes:
    """Comma-separated, with a header. Lists are JSON; formulas get an apostrophe in front.

    All texts are quoted. Otherwise, before Python 3.13, a carriage return would end the row.
    """
    import pandas

    table = pandas.DataFrame(rows)
    table = table.map(lambda cell: _dumps(cell) if isinstance(cell, list) else cell)
    table = table.replace(_FORMULA, "'", regex=True)
    text = table.to_csv(index=False, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
    return text.encode()


def _json(rows: list[dict]) -> bytes:
    """A list with an object for each row; pandas would round 1e-20 to 0."""
    return _dumps(rows, indent=1).encode()


def _parquet(rows: list[dict]) -> bytes:
    import pandas

    return pandas.DataFrame(rows).to_parquet(index=False)


_FORMS = {".csv": _csv, ".json": _json, ".parquet": _parquet}
