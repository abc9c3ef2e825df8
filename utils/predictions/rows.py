"""Predictions as rows: names of classes, and probabilities with six significant digits."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from utils.console import printable
from utils.data.splits import Files, Split
from utils.predictions.tables import Columns
from utils.tasks.task import Predictions, Task
from utils.training.evaluation import TOP

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
