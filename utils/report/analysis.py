"""The numbers of the run page: confidence intervals, calibration, scores of the classes, confusions, worst errors."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from utils.data.order import fold_in
from utils.tasks.task import Predictions, sigmoid

BINS = 15  # of the confidence, equally wide
MATRIX = 30  # classes; with more, the page lists the most frequent confusions instead of a matrix
PAIRS, ERRORS = 20, 24  # confusions in that list, and images in the gallery
_RESAMPLES, _FEWEST = 1000, 100
_WORK = 10**8  # numbers to add up for all resamples
_MOST_SCORES = 2 * 10**6  # with more, mAP and AUC have no intervals

Metrics = Callable[[np.ndarray], dict[str, float]]  # takes the weights of the samples, float64 [n]
Interval = tuple[float, float]


def intervals(metrics: Metrics, samples: int, columns: int, seed: int) -> dict[str, Interval]:
    """The 95 % bootstrap interval of each metric, by percentiles over resamples of the samples.

    `columns` is the number of values of a sample. The more samples and columns, the fewer resamples. These depend only
    on the seed, `samples` and `columns`. A metric that is NaN or infinite in all resamples has no interval.
    """
    random = np.random.Generator(np.random.Philox(key=fold_in(seed, "bootstrap")))
    count = max(_FEWEST, min(_RESAMPLES, _WORK // (samples * columns)))
    drawn = (np.bincount(random.integers(samples, size=samples), minlength=samples) for _ in range(count))
    with np.errstate(invalid="ignore"):  # an infinite loss that counts zero times
        found = [metrics(counts.astype(np.float64)) for counts in drawn]
    bounds: dict[str, Interval] = {}
    for name in found[0]:
        values = np.array([each[name] for each in found])
        finite = values[np.isfinite(values)]
        if len(finite):
            low, high = np.percentile(finite, (2.5, 97.5)).tolist()
            bounds[name] = low, high
    return bounds


def calibration(parts: Iterable[tuple[np.ndarray, np.ndarray]]) -> dict[str, Any]:
    """The expected calibration error and the bins of a reliability diagram.

    A part is a pair: predicted probabilities, float [n] in 0..1, and whether the events occurred,
    bool [n]. The error is the mean over predictions of |accuracy - mean confidence| in their bin
    (Guo et al., 2017). NaN is left out.
    """
    sums = np.zeros((3, BINS))
    for confidence, correct in parts:
        known = ~np.isnan(confidence)
        confidence = confidence[known].astype(np.float64)
        bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
        for row, weights in zip(sums, (None, confidence, correct[known]), strict=True):
            row += np.bincount(bins, weights, BINS)
    counts = sums[0]
    mean, accuracy = sums[1:] / np.maximum(counts, 1)
    error = float((np.abs(mean - accuracy) * counts).sum() / max(1, counts.sum()))
    rows = zip(mean.tolist(), accuracy.tolist(), counts.astype(int).tolist(), strict=True)
    return {"error": error, "bins": [{"confidence": c, "accuracy": a, "count": n} for c, a, n in rows]}


def analyse(found: Predictions, names: list[str], cut: float | None, seed: int) -> dict[str, Any]:
    """All numbers of an evaluation as JSON values.

    `cut`: the logit above which an output is predicted, in multilabel and binary. None in classification, where each
    sample has one class of several.
    """
    analysis = _of_classification(found, names, seed) if cut is None else _of_outputs(found, names, cut, seed)
    return {"count": len(found.indices), "matrix": None, "names": [], "confusions": [], **analysis}


def _of_classification(found: Predictions, names: list[str], seed: int) -> dict[str, Any]:
    labels, predicted, classes = found.labels, found.top[:, 0], len(names)
    correct, confidence = predicted == labels, found.scores[:, 0]
    pairs, times = np.unique(labels[~correct] * classes + predicted[~correct], return_counts=True)
    order = np.argsort(-times, kind="stable")
    confused = [(*divmod(int(pairs[i]), classes), int(times[i])) for i in order]
    mistaken_for = {true: names[guessed] for true, guessed, _ in reversed(confused)}  # the most frequent one counts
    totals, right = np.bincount(labels, minlength=classes), np.bincount(labels, correct, classes)
    rows = [
        {
            "name": names[c],
            "count": int(totals[c]),
            "score": float(right[c] / totals[c]),
            "mistaken_for": mistaken_for.get(c, ""),
        }
        for c in np.flatnonzero(totals).tolist()
    ]
    matrix = {}
    if classes <= MATRIX:
        counts = np.bincount(labels * classes + predicted, minlength=classes**2).reshape(classes, classes)
        matrix = {"matrix": counts.tolist(), "names": names}
    worst = np.flatnonzero(~correct)
    worst = worst[np.argsort(-confidence[worst], kind="stable")][:ERRORS]
    return {
        "intervals": intervals(_metrics_of_classes(found, classes), len(labels), 8, seed),
        "calibration": calibration([(confidence, correct)]),
        "score": "accuracy",
        "classes": sorted(rows, key=lambda row: row["score"]),
        **matrix,
        "confusions": [
            {"true": names[t], "predicted": names[p], "count": n, "share": n / int(totals[t])}
            for t, p, n in confused[:PAIRS]
        ],
        "errors": [_error(found, i, names[predicted[i]], confidence[i], names[labels[i]]) for i in worst.tolist()],
    }


def _error(found: Predictions, row: int, name: str, probability: float, true: str) -> dict[str, Any]:
    return {"index": int(found.indices[row]), "text": f"{name} {probability:.1%}", "true": true}


def _metrics_of_classes(found: Predictions, classes: int) -> Metrics:
    labels, predicted = found.labels, found.top[:, 0]
    correct, hits = predicted == labels, (found.top == labels[:, None]).any(1)
    columns = np.stack([found.losses.astype(np.float64), correct, hits])

    def metrics(counts: np.ndarray) -> dict[str, float]:
        loss, accuracy, top5 = columns @ counts / counts.sum()
        true, guessed = np.bincount(labels, counts, classes), np.bincount(predicted, counts, classes)
        both, either = np.bincount(labels, counts * correct, classes), true + guessed
        f1 = (2 * both[either > 0] / either[either > 0]).mean()
        return {"accuracy": accuracy, "top5": top5, "macro_f1": f1, "loss": loss}

    return metrics


def _of_outputs(found: Predictions, names: list[str], cut: float, seed: int) -> dict[str, Any]:
    """The analysis of multilabel, or of binary, whose only output is the logit of the second class."""
    logits, (samples, outputs) = found.scores, found.scores.shape
    binary = found.labels.ndim == 1
    truth = (found.labels[:, None] if binary else found.labels).astype(bool)
    predicted, shown = logits > cut, names[1:] if binary else names
    rows, curves, errors = [], [], []
    # The largest error of each sample, and its output. One output after the other: there may be a million samples.
    distance, column = np.zeros(samples), np.zeros(samples, np.int64)
    for c in range(outputs):
        own = np.abs(sigmoid(logits[:, c]) - truth[:, c]) * (predicted[:, c] != truth[:, c])
        further = own > distance
        distance[further], column[further] = own[further], c
        curve = _Curve(logits[:, c], truth[:, c])
        curves += [curve] * (logits.size <= _MOST_SCORES)
        precision, area = curve.areas(np.ones(samples))
        if not np.isnan(precision):
            row = {"name": shown[c], "count": int(truth[:, c].sum()), "score": precision}
            rows.append({**row, "auc": None if np.isnan(area) else area})
    for i in np.argsort(-distance, kind="stable")[:ERRORS]:
        if distance[i]:
            own = [names[n] for n in (found.labels[[i]] if binary else np.flatnonzero(truth[i]))]
            probability = float(sigmoid(logits[i, column[i]]))
            errors.append(_error(found, i, shown[column[i]], probability, ", ".join(own) or "no class"))
    metrics = _metrics_of_outputs(found, truth, predicted, curves)
    return {
        "intervals": intervals(metrics, samples, 8 * outputs, seed),
        "calibration": calibration((sigmoid(logits[:, c]), truth[:, c]) for c in range(outputs)),
        "score": "average precision",
        "classes": sorted(rows, key=lambda row: row["score"]),
        "errors": errors,
    }


def _metrics_of_outputs(
    found: Predictions, truth: np.ndarray, predicted: np.ndarray, curves: Sequence["_Curve"]
) -> Metrics:
    losses, exact = found.losses.astype(np.float64), (predicted == truth).all(1)
    columns = np.stack([losses, exact, (predicted & truth).sum(1), predicted.sum(1) + truth.sum(1)])
    exact_name, f1_name = ("accuracy", "f1") if found.labels.ndim == 1 else ("exact_match", "micro_f1")

    def metrics(counts: np.ndarray) -> dict[str, float]:
        loss, right, both, either = columns @ counts
        f1 = 2 * both / either if either else 0.0
        values = {"loss": loss / counts.sum(), exact_name: right / counts.sum(), f1_name: f1}
        if not curves:
            return values
        precisions, areas = np.array([curve.areas(counts) for curve in curves]).T
        if found.labels.ndim == 1:
            return values | {"auc": areas[0]}
        known = precisions[~np.isnan(precisions)]
        return values | {"mAP": known.mean() if len(known) else np.nan}

    return metrics


class _Curve:
    """The samples ranked by the score of one output, for metrics with any weights of the samples.

    `scores` is float [n], `truth` bool [n]. Samples with equal scores are counted together.
    """

    def __init__(self, scores: np.ndarray, truth: np.ndarray):
        self.order = np.argsort(-scores, kind="stable")
        self.truth = truth[self.order]
        ranked = scores[self.order]
        self.ends = np.append(np.flatnonzero(ranked[1:] != ranked[:-1]), len(scores) - 1)

    def areas(self, counts: np.ndarray) -> tuple[float, float]:
        """Average precision and the area under the ROC curve; NaN if they are undefined."""
        weights = counts[self.order]
        hits, total = np.cumsum(weights * self.truth)[self.ends], np.cumsum(weights)[self.ends]
        misses = total - hits
        if not hits[-1]:
            return np.nan, np.nan
        precision = float((np.diff(hits, prepend=0) * hits / np.maximum(total, 1)).sum() / hits[-1])
        if not misses[-1]:
            return precision, np.nan
        steps = np.diff(misses, prepend=0) * (hits + np.append(0, hits[:-1])) / 2
        return precision, float(steps.sum() / hits[-1] / misses[-1])
