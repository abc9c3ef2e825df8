"""Classification: each image has one class.

To add a metric, add a value to `evaluation` and `evaluate`, or, if it needs all predictions, to
`gathered` and `metrics`.

To add a loss, write a function with these arguments and add it to `LOSSES`; those with a default
are what --loss_args may set. It returns the loss of each sample, [n].

* `logits` [n, classes], where n may be 0
* `targets`: class indices, int64 [n], or class probabilities, float [n, classes], as from Mixup
* `smoothing`: the fraction of the target to spread evenly over all classes
* `weight`: with --class_weights, the weight of each class, float32 [classes], else None

Losses are linear in the targets: the loss of mixed targets is the mixture of the losses.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from utils.config import Registry
from utils.settings.tasks import TaskSettings
from utils.tasks.task import Task


def cross_entropy(
    logits: Tensor, targets: Tensor, smoothing: float, weight: Tensor | None
) -> Tensor:
    """Cross-entropy of the softmax; in multilabel and binary, of the sigmoid."""
    return F.cross_entropy(logits, targets, weight, reduction="none", label_smoothing=smoothing)


def binary_cross_entropy(
    logits: Tensor, targets: Tensor, smoothing: float, weight: Tensor | None
) -> Tensor:
    """Binary cross-entropy of each class against the rest, averaged over the classes.

    As in "ResNet strikes back", Wightman et al., 2021. A sample has the weight of its class.
    """
    of_samples = None if weight is None else (_soft(logits, targets, 0.0) @ weight)[:, None]
    targets = _soft(logits, targets, smoothing)
    return F.binary_cross_entropy_with_logits(logits, targets, of_samples, reduction="none").mean(1)


def focal(
    logits: Tensor, targets: Tensor, smoothing: float, weight: Tensor | None, gamma: float = 2.0
) -> Tensor:
    """Focal loss: cross-entropy with less weight on easy samples (Lin et al., 2017).

    The term of a class of probability p has the factor (1 - p) ** gamma. Multilabel and binary use
    `sigmoid_focal`.
    """
    check_gamma(gamma)
    log_p = logits.log_softmax(1)
    # Above 0, because the power has an infinite gradient at 0 if gamma is below 1.
    factors = (1 - log_p.exp()).clamp(min=torch.finfo(logits.dtype).tiny) ** gamma
    terms = -_soft(logits, targets, smoothing) * factors * log_p
    return (terms if weight is None else terms * weight).sum(1)


def _soft(logits: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    """The targets as smoothed class probabilities, float [n, classes]."""
    if not targets.is_floating_point():
        targets = F.one_hot(targets, logits.shape[1]).to(logits.dtype)
    return targets * (1 - smoothing) + smoothing / logits.shape[1]


def check_gamma(gamma: float) -> None:
    """Raise ValueError unless gamma is finite and at least 0.

    A negative one would weigh easy samples more.
    """
    if not 0 <= gamma < math.inf:
        raise ValueError(f"gamma must be at least 0 and finite, got {gamma}")


LOSSES = Registry(
    "loss",
    {"cross_entropy": cross_entropy, "binary_cross_entropy": binary_cross_entropy, "focal": focal},
)


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
        self, config: TaskSettings, class_names: list[str], labels: np.ndarray | None = None
    ):
        self.class_names, self.outputs = class_names, len(class_names)
        self.losses = partial(LOSSES.call, config)
        self.smoothing = config.label_smoothing
        self.weight = None
        if config.class_weights and labels is not None:
            self.weight = balanced_weights(labels, self.outputs)
        equal_scores = torch.zeros(1, self.outputs)
        any_class = torch.zeros(1, dtype=torch.int64)
        self.uniform_loss = self.losses(equal_scores, any_class, 0.0, None).item()

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        if not isinstance(outputs, Tensor):
            return super().loss(outputs, targets)
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
