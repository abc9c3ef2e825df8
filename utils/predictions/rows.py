"""Predictions as rows: names of classes, and probabilities with six significant digits."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from utils.data.splits import Files, Split
from utils.tasks.binary import Binary
from utils.tasks.multilabel import MultiLabel
from utils.tasks.task import Task
from utils.training.predictions import TOP, Predictions

Columns = dict[str, list]


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


def make_rows(
    task: Task, threshold: float, class_names: Sequence[str], top: np.ndarray, probabilities: np.ndarray, count: int
) -> list[Row]:
    """The rows of n images with `count` classes each; `top` and `probabilities` [n, k] are as in `Predictions`."""
    probabilities = probabilities.astype(np.float64)
    above = probabilities > threshold
    if isinstance(task, Binary):  # the one output is the second class
        probabilities = np.concatenate([1 - probabilities, probabilities], 1)
    if isinstance(task, MultiLabel):
        top = np.argsort(-probabilities, 1, kind="stable")
        probabilities = np.take_along_axis(probabilities, top, 1)
    rows = []
    for place in range(len(top)):
        names = [class_names[index] for index in top[place, :count].tolist()]
        predicted: str | list[str] = names[0]
        if isinstance(task, Binary):
            predicted = class_names[int(above[place, 0])]
        elif isinstance(task, MultiLabel):
            predicted = [class_names[index] for index in np.flatnonzero(above[place]).tolist()]
        rows.append(Row(predicted, names, [rounded(value) for value in probabilities[place, :count].tolist()]))
    return rows


def columns_of(rows: Sequence[Row]) -> Columns:
    """The predictions as columns: predicted, class_1, probability_1, class_2, ..."""
    columns: Columns = {"predicted": [row.predicted for row in rows]}
    for place in range(max((len(row.classes) for row in rows), default=0)):
        here = [place if place < len(row.classes) else None for row in rows]
        columns[f"class_{place + 1}"] = [
            None if n is None else row.classes[n] for n, row in zip(here, rows, strict=True)
        ]
        columns[f"probability_{place + 1}"] = [
            None if n is None else row.probabilities[n] for n, row in zip(here, rows, strict=True)
        ]
    return columns


def columns_of_split(
    task: Task, threshold: float, class_names: Sequence[str], split: Split, found: Predictions
) -> Columns:
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
    made = make_rows(task, threshold, class_names, found.top, found.probabilities, TOP)
    losses = [rounded(loss) for loss in found.losses.tolist()]
    return {**images, "label": labels, **columns_of(made), "loss": losses}
