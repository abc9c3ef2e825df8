"""Metrics of the predictions gathered from all ranks, computed offline with `evaluate` and
scikit-learn.

To add a metric of all predictions, add it to the function of its task, and its name to `gathered`
of the task.
"""

import tempfile

import datasets
import evaluate
import numpy as np
from sklearn.metrics import average_precision_score, precision_recall_fscore_support, roc_auc_score


class LabelMetrics(evaluate.Metric):
    """Macro scores and the accuracy within each class, over int64 class labels; needs no network.

    Macro precision, recall and F1 are means over the classes that have samples or are predicted, as
    scikit-learn's `average="macro"`. A class that has samples but is never predicted, or is
    predicted but has no samples, scores 0. `classes_evaluated` is the number of classes with
    samples. A class without samples has the accuracy None.
    """

    def _info(self) -> evaluate.MetricInfo:
        features = datasets.Features(
            dict.fromkeys(("predictions", "references"), datasets.Value("int64"))
        )
        return evaluate.MetricInfo(
            description=self.__doc__, citation="", inputs_description="", features=features
        )

    def _compute(self, predictions, references, classes: int) -> dict:
        precision, recall, f1, counts = precision_recall_fscore_support(
            references, predictions, labels=range(classes), zero_division=0
        )
        seen = np.union1d(references, predictions)
        accuracies = zip(recall.tolist(), counts, strict=True)
        return {
            "macro_precision": float(precision[seen].mean()),
            "macro_recall": float(recall[seen].mean()),
            "macro_f1": float(f1[seen].mean()),
            "classes_evaluated": int((counts > 0).sum()),
            "per_class_accuracy": [each if count else None for each, count in accuracies],
        }


def label_metrics(predictions: np.ndarray, labels: np.ndarray, classes: int) -> dict:
    """The metrics above, from predicted and true classes, each int64 [N]."""
    with tempfile.TemporaryDirectory() as folder:  # `evaluate` always writes its inputs to disk
        metric = LabelMetrics(cache_dir=folder)
        result = metric.compute(predictions=predictions, references=labels, classes=classes)
        del metric  # closes its file before the folder is deleted
    return result


def class_metrics(scores: np.ndarray, labels: np.ndarray, cut: float) -> dict:
    """Mean average precision, macro-F1, and the scores of each class; empty if a score is NaN or
    infinite.

    `scores` are logits [N, classes], `labels` multi-hot [N, classes]; scores above `cut` predict a
    class. The average precision is None for classes without labels, and `mAP` is the mean over the
    others. `macro_f1` is the mean over the classes that have labels or are predicted.
    """
    if not np.isfinite(scores).all():
        return {}
    counts = labels.sum(0, dtype=np.int64)
    predicted = scores > cut
    pairs = predicted.sum(0) + counts
    hits = (predicted & (labels > 0)).sum(0)
    precisions = [
        float(average_precision_score(true, own)) if count else None
        for own, true, count in zip(scores.T, labels.T, counts, strict=True)
    ]
    return {
        "mAP": float(np.mean([value for value in precisions if value is not None])),
        "macro_f1": float(np.mean(2 * hits[pairs > 0] / pairs[pairs > 0])),
        "classes_evaluated": int((counts > 0).sum()),
        "per_class_ap": precisions,
        "per_class_count": counts.tolist(),
    }


def area_under_curve(scores: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """The area under the ROC curve; empty if it is undefined: one class, or a score that is NaN."""
    if len(np.unique(labels)) < 2 or not np.isfinite(scores).all():
        return {}
    return {"auc": float(roc_auc_score(labels, scores))}
