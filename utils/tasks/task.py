"""The interface of a task: its loss, logged sums, predictions and metrics."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor


class Task:
    """The loss, the numbers to log, what evaluation gathers, and the metric of the best checkpoint.

    `classification.py` is the example. A task keeps no state. Its numbers are sums over samples, which are added
    exactly over microbatches, ranks and resumes. Batches may be empty.
    """

    outputs: int
    """Outputs of the model for each image."""
    metric: str
    """The metric of an evaluation that decides which checkpoint is the best."""
    higher_is_better: bool
    training: Sequence[str]
    """Names of the sums of a training batch; the first one is "loss"."""
    loss_of_guessing: float = math.inf
    """The mean loss of a model that has learned nothing; infinity if unknown."""
    evaluation: Sequence[str]
    """Names of the sums of an evaluation batch; the first one is "loss"."""
    shown: Mapping[str, str]
    """The metrics to print after an evaluation, in this order, and the words for them; absent ones are skipped."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The training loss, a scalar, summed over the samples of `outputs` [n, outputs]."""
        raise NotImplementedError

    def training_sums(self, loss: Tensor, outputs: Tensor, targets: Tensor) -> Sequence[Tensor]:
        """The sums named by `training`, each a scalar. `loss` is that of the same batch."""
        raise NotImplementedError

    def evaluate(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The sums named by `evaluation`, float64 [len(evaluation)], and a prediction for each sample, [n, ...]."""
        raise NotImplementedError

    def summary(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """The metrics of `count` samples from their sums, either `training` or `evaluation`; here the means."""
        return {name: total / count for name, total in sums.items()}

    def metrics(self, predictions: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
        """More metrics, from the predictions [N, ...] and labels [N] of all samples; with --metrics."""
        return {}

    def report(self, record: Mapping[str, Any], title: str) -> str:
        """The result of eval.py as text."""
        raise NotImplementedError
