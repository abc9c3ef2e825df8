"""Binary classification with one output: the logit of the second of two classes."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from utils.config.settings import TrainConfig
from utils.console import printable
from utils.errors import UserError
from utils.tasks.multilabel import MultiLabel


class Binary(MultiLabel):
    """One of two classes per image, with one output: multi-label with the second class alone.

    Targets are class indices, int64 [n], or class probabilities, float [n, 2].
    """

    metric = "accuracy"
    exact, f1 = "accuracy", "f1"
    training = evaluation = ("loss", "accuracy", "hits", "predicted", "labelled")
    gathered = ("auc",)
    shown = {"accuracy": "accuracy", "f1": "F1", "auc": "AUC", "loss": "loss"}  # noqa: RUF012
    listed = ("accuracy", "auc", "f1", "loss")

    def _outputs(self, config: TrainConfig, class_names: list[str]) -> int:
        if len(class_names) != 2:
            problem = f"--task binary: --data {config.data} has {len(class_names)} classes, not two"
            raise UserError(problem, "use classification")
        return 1

    def describe(self) -> str:
        positive = printable(self.class_names[1])
        return super().describe().replace("multilabel", f"binary, the positive class is {positive}")

    def _rows(self, targets: Tensor) -> Tensor:
        return targets[:, None] if targets.ndim == 1 else targets[:, -1:]

    def name_classes(self, top: np.ndarray, scores: np.ndarray, count: int) -> tuple[list, np.ndarray, np.ndarray]:
        _, top, probabilities = super().name_classes(top, np.concatenate([-scores, scores], 1), count)
        return [self.class_names[int(own)] for own in scores[:, 0] > self.cut], top, probabilities

    def metrics(self, predictions: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
        from utils.tasks.metrics import area_under_curve  # its import takes a second

        return area_under_curve(predictions[:, 0], labels)

    def worst(self, record: Mapping[str, Any]) -> tuple[str, list[tuple[str, str]]]:
        return "", []
