"""What a model predicts for each sample of a split, gathered from all ranks."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from utils.errors import UserError
from utils.tasks.task import Task

TOP = 5  # classes kept for each sample


class Predictions(NamedTuple):
    """The predictions of n samples, by their position in the split.

    In classification, `top` has the k most likely classes, highest first, and `scores` their
    probabilities. In multilabel and binary, `top` is empty, and `scores` are the logits of all
    outputs: --threshold and the metrics of rankings compare logits, many of which have the
    probability 1.
    """

    indices: np.ndarray  # int64 [n], ascending
    labels: np.ndarray  # int64 [n], or multi-hot uint8 [n, classes]
    top: np.ndarray  # int64 [n, k], or [n, 0]
    scores: np.ndarray  # float32 [n, k]
    losses: np.ndarray  # float32 [n]


def predict(task: Task, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`top`, `scores` and `losses` of a batch, see `Predictions`; does not wait for the device."""
    return *task.most_likely(outputs, TOP), _losses(task, outputs, labels)


def _losses(task: Task, outputs: Tensor, labels: Tensor) -> Tensor:
    """The loss of each sample, float32 [n]. A task has only sums, so each sample is a batch of its own."""

    def loss(row: Tensor, label: Tensor) -> Tensor:
        return task.evaluate(row[None], label[None])[0][0]

    if not len(outputs):  # vmap needs a row
        return outputs.new_zeros(0)
    try:
        return torch.vmap(loss)(outputs, labels).float()
    except RuntimeError:  # a loss or a metric that vmap does not support
        return torch.stack([loss(row, label) for row, label in zip(outputs, labels, strict=True)]).float()


def check_predictions(task: Task) -> None:
    """Raise UserError for a task whose outputs have no known meaning as classes."""
    if not task.activation:
        problem = f"predict.py, export.py and --predictions do not support {type(task).__name__}"
        raise UserError(problem, "set `activation` of the task if its outputs are scores of classes")


def check_outputs(numbers: Any, checkpoint: Path) -> None:
    """Raise UserError unless all of these numbers, which follow from the outputs of a model, are finite."""
    if not np.isfinite(numbers).all():
        fix = "try --mixed_precision no, or use another checkpoint"
        raise UserError(f"{checkpoint}: outputs of the model are NaN or infinite", fix)
