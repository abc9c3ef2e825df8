"""`evaluate` metrics of the predictions gathered from all ranks, computed without a network."""

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
    """Precision, recall and F1, each averaged with equal weight over the classes that have samples or are predicted.

    These are the numbers of scikit-learn's `average="macro"`: a class that has samples and is never predicted, or is
    predicted and has no samples, scores 0; a class with neither is left out. `classes_evaluated` is the number of
    classes with samples.
    """

    def _compute(self, predictions, references, classes: int) -> dict:
        precision, recall, f1, _ = precision_recall_fscore_support(
            references, predictions, average="macro", zero_division=0
        )
        scores = {"macro_precision": float(precision), "macro_recall": float(recall), "macro_f1": float(f1)}
        return scores | {"classes_evaluated": len(np.unique(references))}


class PerClassAccuracy(_LabelMetric):
    """The share of each class's samples that was recognised; None for a class without samples."""

    def _compute(self, predictions, references, classes: int) -> dict:
        matrix = confusion_matrix(references, predictions, labels=range(classes))
        hits, counts = matrix.diagonal(), matrix.sum(axis=1)
        return {"per_class_accuracy": [float(h / n) if n else None for h, n in zip(hits, counts, strict=True)]}


def label_metrics(predictions: np.ndarray, labels: np.ndarray, classes: int) -> dict:
    """All of the above for predicted and true classes, int64 [N] each."""
    result = {}
    with tempfile.TemporaryDirectory() as folder:  # `evaluate` writes its inputs to disk whatever it is told
        for metric in (MacroScores, PerClassAccuracy):
            module = metric(cache_dir=folder)
            result |= module.compute(predictions=predictions, references=labels, classes=classes)
            del module  # closes its file before the folder goes
    return result
