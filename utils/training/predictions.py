"""What a model predicts for each sample of a split, gathered from all ranks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from utils.errors import UserError
from utils.tasks.classification import Classification
from utils.tasks.multilabel import MultiLabel
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
    return *most_likely(task, outputs), _losses(task, outputs, labels)


def most_likely(task: Task, outputs: Tensor, count: int = TOP) -> tuple[Tensor, Tensor]:
    """`top` and `scores` of a batch, see `Predictions`; in classification, of `count` classes."""
    if isinstance(task, MultiLabel):
        return torch.zeros(len(outputs), 0, dtype=torch.int64, device=outputs.device), outputs
    # Of the outputs, as the accuracy is: different outputs may have equal probabilities.
    top = outputs.topk(min(count, outputs.shape[1]), dim=1).indices
    return top, outputs.softmax(1).gather(1, top)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """The probabilities of logits, float64."""
    with np.errstate(over="ignore"):  # below -709 the probability is 0
        return 1 / (1 + np.exp(-logits.astype(np.float64)))


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


def has_predictions(task: Task) -> bool:
    """Whether `predict` knows what the outputs of this task mean."""
    return isinstance(task, Classification | MultiLabel)


def check_predictions(task: Task) -> None:
    """Raise UserError for a task whose outputs have no known meaning."""
    if not has_predictions(task):
        problem = f"the outputs of {type(task).__name__} have no known meaning as predictions"
        raise UserError(problem, "add them to utils/training/predictions.py")


def check_outputs(numbers: Any, checkpoint: Path) -> None:
    """Raise UserError unless all of these numbers, which follow from the outputs of a model, are finite."""
    if not np.isfinite(numbers).all():
        fix = "try --mixed_precision no, or use another checkpoint"
        raise UserError(f"{checkpoint}: outputs of the model are NaN or infinite", fix)


def in_order(seen: np.ndarray, labels: np.ndarray, rows: Sequence[np.ndarray]) -> Predictions:
    """The predictions of the samples `seen`, int64 [n], sorted; `rows` are from `predict`, `labels` of the split."""
    order = np.argsort(seen)
    return Predictions(seen[order], labels[seen[order]], *(part[order] for part in rows))
