"""Metrics of the predictions gathered from all ranks, computed offline with the `evaluate` library.

To add a metric, write a class as below and add it to `label_metrics`.
"""

import tempfile

import datasets
import evaluate
import numpy as np
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support


class _LabelMetric(evaluate.Metric):
    """An `evaluate` metric over int64 class labels that needs no network and no fixed folder."""

    def _info(self) -> evaluate.MetricInfo:
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description=self.__doc__, citation="", inputs_description="", features=features)


class MacroScores(_LabelMetric):
    """Macro precision, recall and F1: means over the classes that have samples or are predicted.

    They equal scikit-learn's `average="macro"`. A class that has samples but is never predicted, or is predicted but
    has no samples, scores 0. `classes_evaluated` is the number of classes with samples.
    """

    def _compute(self, predictions, references, classes: int) -> dict:
        precision, recall, f1, _ = precision_recall_fscore_support(
            references, predictions, average="macro", zero_division=0
        )
        scores = {"macro_precision": float(precision), "macro_recall": float(recall), "macro_f1": float(f1)}
        return scores | {"classes_evaluated": len(np.unique(references))}


class PerClassAccuracy(_LabelMetric):
    """The accuracy within each class; None for a class without samples."""

    def _compute(self, predictions, references, classes: int) -> dict:
        matrix = confusion_matrix(references, predictions, labels=range(classes))
        hits, counts = matrix.diagonal(), matrix.sum(axis=1)
        return {"per_class_accuracy": [float(h / n) if n else None for h, n in zip(hits, counts, strict=True)]}


def label_metrics(predictions: np.ndarray, labels: np.ndarray, classes: int) -> dict:
    """All metrics above, from predicted and true classes, each int64 [N]."""
    result: dict = {}
    with tempfile.TemporaryDirectory() as folder:  # `evaluate` always writes its inputs to disk
        for metric in (MacroScores, PerClassAccuracy):
            module = metric(cache_dir=folder)
            result |= module.compute(predictions=predictions, references=labels, classes=classes)
            del module  # closes its file before the folder is deleted
    return result
