"""Classification: each image has one class."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from utils.config.settings import TrainConfig
from utils.console import printable, table
from utils.tasks.losses import LOSSES
from utils.tasks.task import Task

_ROWS = ("accuracy", "top5", "loss", "macro_f1", "macro_precision", "macro_recall")


class Classification(Task):
    """One class per image. Targets are class indices, int64 [n], or class probabilities, float [n, classes]."""

    metric, higher_is_better = "accuracy", True
    training = ("loss", "accuracy")
    evaluation = ("loss", "accuracy", "top5")
    shown = {"accuracy": "accuracy", "top5": "top-5", "loss": "loss"}  # noqa: RUF012

    def __init__(self, config: TrainConfig, class_names: list[str], class_weights: list[float] | None = None):
        self.class_names, self.outputs = class_names, len(class_names)
        self.sum_of_losses, self.smoothing = LOSSES.choose(config.loss), config.label_smoothing
        self.weight = None if class_weights is None else torch.tensor(class_weights)
        equal_scores, any_class = torch.zeros(1, self.outputs), torch.zeros(1, dtype=torch.int64)
        self.loss_of_guessing = self.sum_of_losses(equal_scores, any_class).item()

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.weight is None:
            return self.sum_of_losses(outputs, targets, self.smoothing)
        self.weight = self.weight.to(outputs.device)  # copied once
        return self.sum_of_losses(outputs, targets, self.smoothing, self.weight)

    def training_sums(self, loss: Tensor, outputs: Tensor, targets: Tensor) -> Sequence[Tensor]:
        classes = targets.argmax(1) if targets.is_floating_point() else targets
        return loss, (outputs.argmax(1) == classes).sum()

    def evaluate(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        ranked = outputs.topk(min(5, outputs.shape[1]), dim=1).indices
        hits = ranked == labels[:, None]
        loss = self.sum_of_losses(outputs, labels).double()
        return torch.stack([loss, hits[:, 0].sum(), hits.sum()]), ranked[:, 0]

    def summary(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        means = super().summary(sums, count)
        if self.outputs <= 5:
            means.pop("top5", None)  # it would always be 1
        return means

    def metrics(self, predictions: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
        from utils.tasks.metrics import label_metrics  # its imports take a second

        return label_metrics(predictions, labels, classes=self.outputs)

    def report(self, record: Mapping[str, Any], title: str) -> str:
        """The metrics as a table, then the accuracy of the ten worst classes, worst first."""
        evaluated, of = record["classes_evaluated"], self.outputs
        rows = [("data", f"{printable(record['data'])}, {record['split']}")]
        rows += [("classes", f"{evaluated} of {of} with samples" if evaluated < of else f"{of}")]
        rows += [(name, f"{record[name]:.4f}") for name in _ROWS if name in record] + [("count", record["count"])]
        if "left_out" in record:
            rows += [("left out", f"{record['left_out']} images that cannot be read")]
        rows += [("seconds", f"{record['seconds']:.2f}")]
        accuracies = zip(self.class_names, record["per_class_accuracy"], strict=True)
        worst = sorted((accuracy, printable(name)) for name, accuracy in accuracies if accuracy is not None)[:10]
        of_classes = [(name, f"{accuracy:.4f}") for accuracy, name in worst]
        return f"{table(title, rows)}\n{table('Accuracy of the classes, worst first', of_classes)}"
