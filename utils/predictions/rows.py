"""Predictions as rows: names of classes, and probabilities with six significant digits."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from utils.console import printable
from utils.data.splits import Files, Split
from utils.tasks.binary import Binary
from utils.tasks.multilabel import MultiLabel
from utils.tasks.task import Task
from utils.training.predictions import TOP, Predictions, sigmoid

Columns = dict[str, list]
SHOWN = 20  # images in the table on the terminal


class Row(NamedTuple):
    """The prediction for one image, as JSON stores it; `error` is why there is none.

    `predicted` is a class, or in multilabel the list of classes above --threshold. `classes` are the most likely ones,
    the most likely first. None stands for a probability that is NaN.
    """

    predicted: str | list[str] | None
    classes: list[str]
    probabilities: list[float | None]
    error: str | None = None


def rounded(number: float) -> float | None:
    """The number with six significant digits; None if it is NaN or infinite."""
    return float(f"{number:.6g}") if math.isfinite(number) else None


def make_rows(task: Task, class_names: Sequence[str], top: np.ndarray, scores: np.ndarray, count: int) -> list[Row]:
    """The rows of n images with `count` classes each; `top` and `scores` [n, k] are as in `Predictions`."""
    scores = scores.astype(np.float64)
    if isinstance(task, MultiLabel):
        above = scores > task.cut
        if isinstance(task, Binary):  # the one output is the logit of the second class
            scores = np.concatenate([-scores, scores], 1)
        top = np.argsort(-scores, 1, kind="stable")[:, :count]
        scores = sigmoid(np.take_along_axis(scores, top, 1))
    rows = []
    for place, indices in enumerate(top[:, :count].tolist()):
        names = [class_names[index] for index in indices]
        predicted: str | list[str] = names[0]
        if isinstance(task, Binary):
            predicted = class_names[int(above[place, 0])]
        elif isinstance(task, MultiLabel):
            predicted = [class_names[index] for index in np.flatnonzero(above[place]).tolist()]
        rows.append(Row(predicted, names, [rounded(value) for value in scores[place, :count].tolist()]))
    return rows


def columns_of(rows: Sequence[Row], count: int) -> Columns:
    """The predictions as columns: predicted, class_1, probability_1, class_2, ... of `count` classes."""
    columns: Columns = {"predicted": [row.predicted for row in rows]}
    for place in range(count):
        here = [place if place < len(row.classes) else None for row in rows]
        columns[f"class_{place + 1}"] = [
            None if n is None else row.classes[n] for n, row in zip(here, rows, strict=True)
        ]
        columns[f"probability_{place + 1}"] = [
            None if n is None else row.probabilities[n] for n, row in zip(here, rows, strict=True)
        ]
    return columns


def columns_of_split(task: Task, class_names: Sequence[str], split: Split, found: Predictions) -> Columns:
    """The predictions of a split as columns, with the path or index, the label and the loss of each sample."""
    rows = split.rows[found.indices].tolist()
    images: Mapping[str, list[Any]] = {"index": rows}
    if isinstance(split.images, Files):
        names = split.images.names
        images = {"path": [names[row] for row in rows]}
    labels: list[Any] = (
        [class_names[label] for label in found.labels.tolist()]
        if found.labels.ndim == 1
        else [[class_names[index] for index in np.flatnonzero(row).tolist()] for row in found.labels]
    )
    made = make_rows(task, class_names, found.top, found.scores, TOP)
    losses = [rounded(loss) for loss in found.losses.tolist()]
    return {**images, "label": labels, **columns_of(made, min(TOP, len(class_names))), "loss": losses}


def result_rows(rows: Sequence[Row], split: Split) -> list[tuple[str, Any]]:
    """The rows of a table on the terminal: the first images, and the number of unreadable ones."""
    lines: list[tuple[str, Any]] = []
    for position, row in enumerate(rows[:SHOWN]):
        pairs = zip(row.classes, row.probabilities, strict=True)
        words = (f"{name} {'NaN' if value is None else value}" for name, value in pairs)
        found = ", ".join(words) if row.error is None else row.error
        lines.append((printable(split.describe(position)), printable(found)))
    bad = sum(row.error is not None for row in rows)
    lines += [("...", f"{len(rows) - SHOWN} more")] * (len(rows) > SHOWN)
    return lines + [("unreadable", f"{bad} of {len(rows)} images")] * (bad > 0)
