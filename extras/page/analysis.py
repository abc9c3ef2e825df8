"""The numbers of the run page: confidence intervals, calibration, scores of the classes,
confusions, worst errors.
"""

import math
from collections import Counter, defaultdict
from itertools import compress
from operator import itemgetter

import numpy as np

from utils.tasks import Predictions, Task, sigmoid
from utils.training import count_classes

BINS = 15  # of the confidence, equally wide
MATRIX = 30  # classes; with more, the page lists the most frequent confusions instead of a matrix
PAIRS, ERRORS = 20, 24  # confusions in that list, and images in the gallery
# With more classes or scores, intervals of mAP and AUC would take many seconds.
_MOST_OUTPUTS = 10
_MOST_SCORES = 2 * 10**5


def analyse(found: Predictions, task: Task) -> dict:
    """All numbers of an evaluation as JSON values."""
    counts = count_classes(found.labels, len(task.class_names))
    return {
        "count": len(found.indices),
        "intervals": intervals(found, task),
        "without_images": int((counts == 0).sum()),
        "all_classes": len(counts),
        **(_of_classes if found.labels.ndim == 1 else _of_sets)(found, task),
    }


def intervals(found: Predictions, task: Task) -> dict[str, tuple[float, float]]:
    """The 95 % intervals of the metrics that follow from sums over samples, and, for few scores, of
    mAP and AUC.

    Proportions have Wilson score intervals. Other metrics have bootstrap intervals, by percentiles
    over resamples, which are always the same. A metric that is NaN or infinite in all resamples has
    no interval; nor has one whose interval is a single point.
    """
    ranks = task.cut is not None and (
        task.outputs <= _MOST_OUTPUTS and found.scores.size <= _MOST_SCORES
    )
    drawn = resample(found, task, ranks)
    bounds = {name: np.percentile(each[1:], (2.5, 97.5)).tolist() for name, each in drawn.items()}
    # The first value is the loss.
    for name, values in zip(task.evaluation[1:], found.values.T[1:], strict=True):
        if name in bounds and np.isin(values, (0, 1)).all():
            bounds[name] = interval_of_share(float(values.mean()), len(values))
    return {name: (low, high) for name, (low, high) in bounds.items() if low < high}


def resample(found: Predictions, task: Task, ranks: bool) -> dict[str, list[float]]:
    """The metrics of all images, then of resamples; with `ranks`, also those of all predictions.

    The resamples are always the same, so those of two runs on the same images are paired.
    """
    samples = len(found.indices)
    drawn = defaultdict(list)
    predicted = found.top[:, 0] if task.cut is None else found.scores
    # The more work, the fewer resamples.
    resamples = 100 if ranks else min(max(10**7 // found.values.size, 100), 1000)
    random = np.random.default_rng(0)
    rows = np.arange(samples)
    for _ in range(resamples + 1):
        sums = found.values[rows].sum(0, dtype=np.float64).tolist()
        metrics = task.summary(dict(zip(task.evaluation, sums, strict=True)), samples)
        if ranks:
            metrics |= task.metrics(predicted[rows], found.labels[rows])
        for name, value in metrics.items():
            if isinstance(value, float) and math.isfinite(value):
                drawn[name].append(value)
        rows = random.integers(samples, size=samples)
    return drawn


def interval_of_share(share: float, count: int) -> tuple[float, float]:
    """The 95 % Wilson score interval of a proportion of `count` samples (Wilson, 1927).

    Unlike a bootstrap interval, it is wider than zero if the share is 0 or 1.
    """
    weight = 1.96**2 / count
    centre = share + weight / 2
    half = math.sqrt(weight * (share * (1 - share) + weight / 4))
    return (centre - half) / (1 + weight), (centre + half) / (1 + weight)


def calibration(confidence: np.ndarray, correct: np.ndarray) -> dict:
    """The expected calibration error and the bins of a reliability diagram.

    Given are predicted probabilities, float in 0..1, and whether the events occurred, bool, of the
    same shape. The error is the mean over predictions of |accuracy - mean confidence| in their bin
    (Guo et al., 2017). NaN is left out.
    """
    counts, sums, hits = (
        np.histogram(confidence, BINS, (0, 1), weights=weights)[0]
        for weights in (None, confidence.astype(np.float64), correct.astype(np.float64))
    )
    mean, accuracy = np.stack([sums, hits]) / np.maximum(counts, 1)
    bins = zip(mean.tolist(), accuracy.tolist(), counts.tolist(), strict=True)
    return {
        "error": float((np.abs(mean - accuracy) * counts).sum() / max(1, counts.sum())),
        "bins": [{"confidence": c, "accuracy": a, "count": n} for c, a, n in bins],
    }


def _of_classes(found: Predictions, task: Task) -> dict:
    """The analysis of images with one class each."""
    names = task.class_names
    labels = found.labels
    predicted, confidence = task.decide(found.top, found.scores)
    totals = Counter(labels.tolist())
    pairs = Counter(zip(labels.tolist(), predicted.tolist(), strict=True))
    mistakes = [(*pair, count) for pair, count in pairs.most_common() if len({*pair}) == 2]
    # The most frequent mistake comes last, so it stays.
    mistaken_for = {true: names[guessed] for true, guessed, _ in reversed(mistakes)}
    classes = [
        {
            "name": names[c],
            "count": total,
            "score": pairs[c, c] / total,
            "mistaken_for": mistaken_for.get(c, ""),
        }
        for c, total in sorted(totals.items())
    ]
    confusions = [
        {
            "true": names[true],
            "predicted": names[guessed],
            "count": count,
            "share": count / totals[true],
        }
        for true, guessed, count in mistakes[:PAIRS]
    ]
    numbers = range(len(names) if len(names) <= MATRIX else 0)
    wrong = np.flatnonzero(predicted != labels)
    worst = wrong[np.argsort(-confidence[wrong], kind="stable")][:ERRORS]
    return {
        "calibration": calibration(confidence, predicted == labels),
        "score": "accuracy",
        "classes": sorted(classes, key=itemgetter("score")),
        "names": names,
        "matrix": [[pairs[true, guessed] for guessed in numbers] for true in numbers],
        "confusions": confusions,
        "errors": [
            _error(found.indices[i], names[predicted[i]], confidence[i], names[labels[i]])
            for i in worst
        ],
    }


def _of_sets(found: Predictions, task: Task) -> dict:
    """The analysis of images with any number of classes."""
    names = task.class_names
    truth = found.labels.astype(bool)
    errors = []
    chances = sigmoid(found.scores)
    wrong = (found.scores > task.cut) != truth
    rows = np.flatnonzero(wrong.any(1))
    for i in rows[np.argsort(-found.values[rows, 0], kind="stable")][:ERRORS]:
        c = int(np.argmax(np.abs(chances[i] - truth[i]) * wrong[i]))  # its largest error
        own = ", ".join(compress(names, truth[i])) or "no class"
        errors.append(_error(found.indices[i], names[c], chances[i, c], own))
    scores = task.metrics(found.scores, found.labels)
    columns = zip(
        names, scores.get("per_class_ap", ()), scores.get("per_class_count", ()), strict=False
    )
    classes = [
        {"name": name, "count": count, "score": score}
        for name, score, count in columns
        if score is not None
    ]
    return {
        "calibration": calibration(chances, truth),
        "score": "average precision",
        "classes": sorted(classes, key=itemgetter("score")),
        "matrix": [],
        "confusions": [],
        "errors": errors,
    }


def _error(index: int, guess: str, chance: float, true: str) -> dict:
    return {"index": int(index), "text": f"{guess} {chance:.1%}", "true": true}
