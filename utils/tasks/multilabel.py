"""Multi-label: each image has any number of the classes, including none.

Binary: it has one of two.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from utils.config import Registry, require
from utils.console import join_names, printable
from utils.settings.tasks import TaskSettings
from utils.tasks.classification import check_gamma
from utils.tasks.task import Task, sigmoid

_COUNTS = ("hits", "predicted", "labelled")  # of pairs of an image and a class


def sigmoid_cross_entropy(logits: Tensor, targets: Tensor, pos_weight: Tensor | None) -> Tensor:
    """Binary cross-entropy of each class, averaged over the classes.

    `targets` are multi-hot or a mixture of such rows, float [n, classes]. `pos_weight`, a number or
    [classes], is the weight of the terms of positive targets.
    """
    return F.binary_cross_entropy_with_logits(
        logits, targets, reduction="none", pos_weight=pos_weight
    ).mean(1)


def sigmoid_focal(
    logits: Tensor, targets: Tensor, pos_weight: Tensor | None, gamma: float = 2.0
) -> Tensor:
    """The focal loss of each class, averaged over the classes; arguments as above.

    With `pos_weight` alpha / (1 - alpha), it is the loss of Lin et al. divided by 1 - alpha.
    """
    check_gamma(gamma)
    log_p, log_q = F.logsigmoid(logits), F.logsigmoid(-logits)  # of the class and of its absence
    positive = targets * (gamma * log_q).exp() * log_p
    negative = (1 - targets) * (gamma * log_p).exp() * log_q
    positive = positive if pos_weight is None else positive * pos_weight
    return -(positive + negative).mean(1)


# The losses of the same names for multilabel and binary, with the same --loss_args.
SIGMOID_LOSSES = Registry(
    "loss",
    {
        "cross_entropy": sigmoid_cross_entropy,
        "binary_cross_entropy": sigmoid_cross_entropy,
        "focal": sigmoid_focal,
    },
)


class MultiLabel(Task):
    """Any number of classes for each image, with a sigmoid for each class.

    Targets are multi-hot rows or mixtures of them, float [n, classes]. A class is predicted if its
    probability is above --threshold. Training reports micro-F1 besides exact matches, because with
    many classes hardly any image has all of them right.
    """

    activation = "sigmoid"
    metric = "mAP"
    highest_is_best: Sequence[str] = ("mAP", "macro_f1", "micro_f1", "exact_match")
    f1 = "micro_f1"  # the name of this metric
    training: Sequence[str] = ("loss", "exact_match", *_COUNTS)
    when_mixed = "metrics count a label if its share is above 0.5"
    evaluation = training
    gathered: Sequence[str] = ("mAP", "macro_f1")
    of_classes = ("Average precision", "per_class_ap")
    shown = {"mAP": "mAP", "micro_f1": "micro-F1", "loss": "loss"}  # noqa: RUF012

    def __init__(
        self, config: TaskSettings, class_names: list[str], labels: np.ndarray | None = None
    ):
        self.class_names = class_names
        self.outputs = self._count_outputs()
        self.losses = partial(SIGMOID_LOSSES.call, config)
        self.smoothing = config.label_smoothing
        self.pos_weight = None
        if config.pos_weight is not None and labels is not None:
            self.pos_weight = self._pos_weight(config.pos_weight, labels)
        # Compared with the logits, and float32 like them, so that all devices predict the same.
        self.cut: float = float(np.float32(math.log(config.threshold / (1 - config.threshold))))
        scores = torch.zeros(2, self.outputs)
        # no class, and all classes
        rows = scores + torch.tensor([[self.smoothing / 2], [1 - self.smoothing / 2]])
        self.uniform_loss = self.losses(scores, rows, self.pos_weight).max().item()

    def _pos_weight(self, given: Any, labels: np.ndarray) -> Tensor:
        """The weights of --pos_weight, float32 [outputs]; `labels` are those of training."""
        if given == "balanced":
            positives = self._rows(torch.from_numpy(labels)).sum(0, dtype=torch.float64)
            # At least 1, for a class that no image or every image has.
            given = ((len(labels) - positives).clamp(min=1) / positives.clamp(min=1)).tolist()
        weights = given if isinstance(given, list) else [given] * self.outputs
        problem = f"--pos_weight has {len(weights)} values, but the model {self.outputs} outputs"
        fix = "give one number, one for each class, or balanced"
        require(len(weights) == self.outputs, problem, fix)
        return torch.tensor(weights, dtype=torch.float32)

    def describe(self) -> str:
        if self.pos_weight is None:
            return "multilabel"
        weights = [f"{each:.3g}" for each in self.pos_weight]
        return f"multilabel, pos_weight {join_names(weights, 8)}"

    def _count_outputs(self) -> int:
        return len(self.class_names)

    def _rows(self, targets: Tensor) -> Tensor:
        """The targets as a row for each sample, [n, outputs]."""
        return targets

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        if not isinstance(outputs, Tensor):
            return super().loss(outputs, targets)
        rows = self._rows(targets).to(outputs.dtype)
        rows = rows * (1 - self.smoothing) + self.smoothing / 2
        return self.losses(outputs, rows, self.pos_weight).sum()

    def training_sums(self, loss: Tensor, outputs: Tensor, targets: Tensor) -> Sequence[Tensor]:
        return loss, *self._count(outputs, targets).sum(0)

    def evaluate(self, outputs: Tensor, labels: Tensor) -> tuple:
        rows = self._rows(labels).to(outputs.dtype)
        losses = self.losses(outputs, rows, None)
        return torch.cat([losses[:, None], self._count(outputs, labels)], 1), outputs

    def _count(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Whether each sample has all classes right, and its `_COUNTS`, int64 [n, 4]."""
        predicted = outputs > self.cut
        labelled = self._rows(targets) > 0.5
        exact = (predicted == labelled).all(1)
        return torch.stack(
            [exact, (predicted & labelled).sum(1), predicted.sum(1), labelled.sum(1)], 1
        )

    def most_likely(self, outputs: Tensor, count: int) -> tuple:
        return torch.zeros(len(outputs), 0, dtype=torch.int64, device=outputs.device), outputs

    def name_classes(self, top: np.ndarray, scores: np.ndarray, count: int) -> tuple:
        top = np.argsort(-scores, 1, kind="stable")[:, :count]
        found = map(np.flatnonzero, scores > self.cut)
        predicted = [[self.class_names[index] for index in row] for row in found]
        return predicted, top, sigmoid(np.take_along_axis(scores, top, 1))

    def summary(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        means = {name: total / count for name, total in sums.items() if name not in _COUNTS}
        pairs = sums["predicted"] + sums["labelled"]
        return means | {self.f1: 2 * sums["hits"] / pairs if pairs else 0.0}

    def metrics(self, predictions: np.ndarray, labels: np.ndarray) -> dict:
        from utils.tasks.metrics import class_metrics  # its import takes a second

        return class_metrics(predictions, labels, self.cut)


class Binary(MultiLabel):
    """One of two classes per image, with one output: multi-label with the second class alone.

    Targets are class indices, int64 [n], or class probabilities, float [n, 2].
    """

    metric = "accuracy"
    highest_is_best = ("accuracy", "f1", "auc")
    f1 = "f1"
    training = ("loss", "accuracy", *_COUNTS)
    evaluation = training
    gathered = ("auc",)
    shown = {"accuracy": "accuracy", "f1": "F1", "auc": "AUC", "loss": "loss"}  # noqa: RUF012

    def describe(self) -> str:
        positive = printable(self.class_names[1])
        return super().describe().replace("multilabel", f"binary, the positive class is {positive}")

    def _count_outputs(self) -> int:
        return 1  # of the second class

    def _rows(self, targets: Tensor) -> Tensor:
        return targets[:, None] if targets.ndim == 1 else targets[:, -1:]

    def decide(self, top: np.ndarray, scores: np.ndarray) -> tuple:
        logits = scores[:, 0]
        positive = logits > self.cut
        return positive.astype(np.int64), sigmoid(np.where(positive, logits, -logits))

    def name_classes(self, top: np.ndarray, scores: np.ndarray, count: int) -> tuple:
        own_classes, _ = self.decide(top, scores)
        both = np.concatenate([-scores, scores], 1)
        _, top, probabilities = super().name_classes(top, both, count)
        return [self.class_names[own] for own in own_classes], top, probabilities

    def metrics(self, predictions: np.ndarray, labels: np.ndarray) -> dict:
        from utils.tasks.metrics import area_under_curve  # its import takes a second

        return area_under_curve(predictions[:, 0], labels)
