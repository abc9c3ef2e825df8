"""The numbers of the run page: confidence intervals, calibration, scores of the classes,
confusions, worst errors.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from utils.data.order import fold_in
from utils.tasks.task import Predictions, Task, sigmoid
from utils.training.summary import count_classes, interval_of_share

BINS = 15  # of the confidence, equally wide
MATRIX = 30  # classes; with more, the page lists the most frequent confusions instead of a matrix
PAIRS, ERRORS = 20, 24  # confusions in that list, and images in the gallery
_RESAMPLES, _FEWEST = 1000, 100
_WORK = 10**7  # numbers to add up for all resamples
# with more, mAP and AUC have no intervals, which would take many seconds
_MOST_SCORES, _MOST_OUTPUTS = 2 * 10**5, 10


def analyse(found: Predictions, task: Task, seed: int) -> dict[str, Any]:
    """All numbers of an evaluation as JSON values."""
    parts = _of_classes(found, task) if found.labels.ndim == 1 else _of_sets(found, task)
    counts = count_classes(found.labels, len(task.class_names))
    absent = {"without_images": int((counts == 0).sum()), "all_classes": len(counts)}
    return {
        "count": len(found.indices),
        "intervals": intervals_of(found, task, seed),
        **absent,
        **parts,
    }


def intervals_of(found: Predictions, task: Task, seed: int) -> dict[str, tuple[float, float]]:
    """The intervals of the metrics that follow from sums over samples, and, for few scores, of mAP
    and AUC.

    Proportions have Wilson score intervals, other metrics bootstrap intervals. Intervals of width
    zero are left out.
    """
    samples = len(found.indices)

    def measure(rows: np.ndarray) -> dict[str, Any]:
        sums = found.values[rows].sum(0, dtype=np.float64)
        return task.summary(dict(zip(task.evaluation, sums.tolist(), strict=True)), samples)

    def rank(rows: np.ndarray) -> dict[str, Any]:
        return task.metrics(found.scores[rows], found.labels[rows])

    # The more samples and sums, the fewer resamples.
    count = max(_FEWEST, min(_RESAMPLES, _WORK // found.values.size))
    bounds = intervals(measure, samples, count, seed)
    if task.cut is not None and found.scores.size <= _MOST_SCORES and task.outputs <= _MOST_OUTPUTS:
        bounds |= intervals(rank, samples, _FEWEST, seed)
    # the first is the loss
    for name, values in zip(task.evaluation[1:], found.values.T[1:], strict=True):
        if name in bounds and np.isin(values, (0, 1)).all():
            bounds[name] = interval_of_share(float(values.mean()), samples)
    return {name: (low, high) for name, (low, high) in bounds.items() if low < high}


def intervals(
    measure: Callable[[np.ndarray], dict[str, Any]], samples: int, count: int, seed: int
) -> dict[str, tuple[float, float]]:
    """The 95 % bootstrap interval of each metric, by percentiles over `count` resamples, which
    depend on the seed.

    `measure` takes the rows of a resample, int64 [samples]. What is not a float has no interval;
    nor has a metric that is NaN or infinite in all resamples.
    """
    random = np.random.Generator(np.random.Philox(key=fold_in(seed, "bootstrap")))
    found = [measure(random.integers(samples, size=samples)) for _ in range(count)]
    bounds = {}
    for name in dict.fromkeys(name for each in found for name in each):
        drawn = (each.get(name) for each in found)
        values = [value for value in drawn if isinstance(value, float) and math.isfinite(value)]
        if values:
            low, high = np.percentile(values, (2.5, 97.5)).tolist()
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
    return {
        "error": error,
        "bins": [{"confidence": c, "accuracy": a, "count": n} for c, a, n in rows],
    }


def _of_classes(found: Predictions, task: Task) -> dict[str, Any]:
    """The analysis of images with one class each."""
    names, labels, (predicted, confidence) = (
        task.class_names,
        found.labels,
        task.decide(found.top, found.scores),
    )
    wrong = np.flatnonzero(predicted != labels)
    pairs = Counter(
        zip(labels[wrong].tolist(), predicted[wrong].tolist(), strict=True)
    ).most_common()
    # the most frequent one counts
    mistaken_for = {true: names[guessed] for (true, guessed), _ in reversed(pairs)}
    totals, errors = (
        np.bincount(labels, minlength=len(names)),
        np.bincount(labels[wrong], minlength=len(names)),
    )
    rows = [
        {
            "name": names[c],
            "count": int(totals[c]),
            "score": float((totals[c] - errors[c]) / totals[c]),
            "mistaken_for": mistaken_for.get(c, ""),
        }
        for c in np.flatnonzero(totals).tolist()
    ]
    matrix = None
    if few := len(names) <= MATRIX:
        matrix = np.zeros((len(names), len(names)), np.int64)
        np.add.at(matrix, (labels, predicted), 1)
    return {
        "calibration": calibration([(confidence, predicted == labels)]),
        "score": "accuracy",
        "classes": sorted(rows, key=lambda row: row["score"]),
        "names": names if few else [],
        "matrix": matrix.tolist() if matrix is not None else None,
        "confusions": [
            {
                "true": names[true],
                "predicted": names[guessed],
                "count": count,
                "share": count / int(totals[true]),
            }
            for (true, guessed), count in pairs[:PAIRS]
        ],
        "errors": [
            {
                "index": int(found.indices[i]),
                "text": f"{names[predicted[i]]} {confidence[i]:.1%}",
                "true": names[label],
            }
            for i, label in (
                (i, labels[i])
                for i in wrong[np.argsort(-confidence[wrong], kind="stable")][:ERRORS]
            )
        ],
    }


def _of_sets(found: Predictions, task: Task) -> dict[str, Any]:
    """The analysis of images with any number of classes."""
    names, logits, truth, errors = task.class_names, found.scores, found.labels.astype(bool), []
    wrong = (logits > task.cut) != truth
    rows = np.flatnonzero(wrong.any(1))
    for i in rows[np.argsort(-found.values[rows, 0], kind="stable")][:ERRORS]:
        chances = sigmoid(logits[i])
        c = int(np.argmax(np.abs(chances - truth[i]) * wrong[i]))  # the largest error of the image
        own = ", ".join(names[n] for n in np.flatnonzero(truth[i])) or "no class"
        errors.append(
            {"index": int(found.indices[i]), "text": f"{names[c]} {chances[c]:.1%}", "true": own}
        )
    scores = task.metrics(logits, found.labels)
    columns = zip(
        names, scores.get("per_class_ap", []), scores.get("per_class_count", []), strict=False
    )
    classes = [
        {"name": name, "count": count, "score": score}
        for name, score, count in columns
        if score is not None
    ]
    return {
        "calibration": calibration(
            (sigmoid(own), true) for own, true in zip(logits.T, truth.T, strict=True)
        ),
        "score": "average precision",
        "classes": sorted(classes, key=lambda row: row["score"]),
        "matrix": None,
        "confusions": [],
        "errors": errors,
    }
