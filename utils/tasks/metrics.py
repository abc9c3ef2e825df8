"""Metrics of the predictions gathered from all ranks, computed offline with the `evaluate` library.

To add a metric of all predictions, add it to `LabelMetrics._compute`.
"""

import tempfile

import datasets
import evaluate
import numpy as np
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support


class LabelMetrics(evaluate.Metric):
    """Macro scores and the accuracy within each class, over int64 class labels; needs no network.

    Macro precision, recall and F1 are means over the classes that have samples or are predicted, as scikit-learn's
    `average="macro"`. A class that has samples but is never predicted, or is predicted but has no samples, scores 0.
    `classes_evaluated` is the number of classes with samples. A class without samples has the accuracy None.
    """

    def _info(self) -> evaluate.MetricInfo:
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description=self.__doc__, citation="", inputs_description="", features=features)

    def _compute(self, predictions, references, classes: int) -> dict:
        precision, recall, f1, _ = precision_recall_fscore_support(
            references, predictions, average="macro", zero_division=0
        )
        matrix = confusion_matrix(references, predictions, labels=range(classes))
        hits, counts = matrix.diagonal(), matrix.sum(axis=1)
        return {
            "macro_precision": float(precision),
            "macro_recall": float(recall),
            "macro_f1": float(f1),
            "classes_evaluated": len(np.unique(references)),
            "per_class_accuracy": [float(h / n) if n else None for h, n in zip(hits, counts, strict=True)],
        }


def label_metrics(predictions: np.ndarray, labels: np.ndarray, classes: int) -> dict:
    """The metrics above, from predicted and true classes, each int64 [N]."""
    with tempfile.TemporaryDirectory() as folder:  # `evaluate` always writes its inputs to disk
        metric = LabelMetrics(cache_dir=folder)
        result = metric.compute(predictions=predictions, references=labels, classes=classes)
        del metric  # closes its file before the folder is deleted
    return result
