"""Classification: each image has one class.

To add a metric, add a value to `evaluation` and `evaluate`, or, if it needs all predictions, to
`gathered` and `metrics`.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from utils.config.settings import TrainConfig
from utils.tasks.losses import LOSSES
from utils.tasks.task import Task


class Classification(Task):
    """One class per image.

    Targets are class indices, int64 [n], or class probabilities, float [n, classes].
    """

    activation = "softmax"
    metric = "accuracy"
    when_mixed = "accuracy is against the dominant label"
    training = ("loss", "accuracy")
    evaluation = ("loss", "accuracy", "top5")
    gathered = ("macro_f1", "macro_precision", "macro_recall")
    highest_is_best = ("accuracy", "top5", *gathered)
    of_classes = ("Accuracy", "per_class_accuracy")
    shown = {"accuracy": "accuracy", "top5": "top-5", "loss": "loss"}  # noqa: RUF012

    def __init__(
        self, config: TrainConfig, class_names: list[str], labels: np.ndarray | None = None
    ):
        self.class_names, self.outputs = class_names, len(class_names)
        self.losses = partial(LOSSES.call, config)
        self.smoothing = config.label_smoothing
        self.weight = None
        if config.class_weights and labels is not None:
            self.weight = balanced_weights(labels, self.outputs)
        equal_scores, any_class = torch.zeros(1, self.outputs), torch.zeros(1, dtype=torch.int64)
        self.uniform_loss = self.losses(equal_scores, any_class, 0.0, None).item()

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.losses(outputs, targets, self.smoothing, self.weight).sum()

    def training_sums(self, loss: Tensor, outputs: Tensor, targets: Tensor) -> Sequence[Tensor]:
        classes = targets.argmax(1) if targets.is_floating_point() else targets
        return loss, (outputs.argmax(1) == classes).sum()

    def evaluate(self, outputs: Tensor, labels: Tensor) -> tuple:
        ranked = outputs.topk(min(5, outputs.shape[1]), dim=1).indices
        hits = ranked == labels[:, None]
        losses = self.losses(outputs, labels, 0.0, None)
        return torch.stack([losses, hits[:, 0], hits.any(1)], 1), ranked[:, 0]

    def summary(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        means = super().summary(sums, count)
        if self.outputs <= 5:
            means.pop("top5", None)  # it would always be 1
        return means

    def metrics(self, predictions: np.ndarray, labels: np.ndarray) -> dict:
        from utils.tasks.metrics import label_metrics  # its imports take a second

        return label_metrics(predictions, labels, classes=self.outputs)


def balanced_weights(labels: np.ndarray, classes: int) -> Tensor:
    """Weights of the classes inversely proportional to their samples, whose mean over the samples
    is 1, as scikit-learn's `class_weight="balanced"`.

    A class without samples has the weight 1.
    """
    counts = np.bincount(labels, minlength=classes)
    share = len(labels) / np.count_nonzero(counts)
    return torch.tensor(np.where(counts, share / counts.clip(1), 1), dtype=torch.float32)
