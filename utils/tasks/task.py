"""The interface of a task: its loss, logged sums, predictions and metrics."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from utils.config import require
from utils.console import printable, table


class Predictions(NamedTuple):
    """The predictions of n samples, by their position in the split.

    In classification, `top` has the k most likely classes, highest first, and `scores` their
    probabilities. In multilabel and binary, `top` is empty, and `scores` are the logits of all
    outputs: --threshold and the metrics of rankings compare logits, many of which have the
    probability 1.
    """

    indices: np.ndarray  # int64 [n], ascending
    labels: np.ndarray  # int64 [n], or multi-hot uint8 [n, classes]
    top: np.ndarray  # int64 [n, k], or [n, 0]
    scores: np.ndarray  # float32 [n, k]
    values: np.ndarray  # float32 [n, len(Task.evaluation)]


class Task:
    """The loss, the numbers to log, what evaluation gathers, and the metric of the best checkpoint.

    `classification.py` is the example. A task keeps no state. Its numbers are added exactly over
    microbatches, ranks and resumes. Batches may be empty. Tensors that it needs, such as weights of
    classes, must be attributes of its own, not in a list or dictionary: `to` moves these only.
    """

    class_names: list[str]
    outputs: int
    """Outputs of the model for each image."""
    activation: Literal["softmax", "sigmoid", ""] = ""
    """From outputs to the probabilities of classes; if it is empty, predict.py and export.py refuse
    the task."""
    cut: float | None = None
    """The output above which its class is predicted; None if each image has one class of
    several."""
    metric: str
    """The metric of an evaluation that decides which checkpoint is the best."""
    highest_is_best: Sequence[str] = ()
    lowest_is_best: Sequence[str] = ("loss",)
    """The metrics that --best_metric accepts, by which value is the best."""
    training: Sequence[str]
    """Names of the sums of a training batch; the first one is "loss"."""
    when_mixed: str = "metrics are against mixed targets"
    """With Mixup or CutMix, what the training metrics are measured against."""
    uniform_loss: float = math.inf
    """The mean loss of equal scores for all classes; infinity if unknown."""
    evaluation: Sequence[str]
    """Names of the values of a sample in an evaluation; the first one is "loss"."""
    gathered: Sequence[str] = ()
    """The numbers that `metrics` returns."""
    of_classes: tuple[str, str] = ("", "")
    """The name that `report` shows for the numbers of each class, and their name in `metrics`."""
    shown: Mapping[str, str]
    """The metrics to print after an evaluation, in this order, and the words for them; absent ones
    are skipped."""

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """The training loss, a scalar, summed over the n samples.

        `outputs` is what the model returns in training: a tensor [n, outputs], or a tuple, list or
        dictionary. The other methods get the tensor in it, see `main_output`. Here the outputs are
        several such tensors. The loss of the first one is added to 0.4 times that of a second one,
        as in Inception v3, or to 0.3 times those of all others, as in GoogLeNet. Raises UserError
        for other outputs.
        """
        require(
            {np.shape(each) for each in outputs} == {(len(targets), self.outputs)},
            "--task has no loss for a model that returns more than scores of classes",
            "use a Task of your own, see docs/architecture.md",
        )
        main, *auxiliary = [self.loss(each, targets) for each in outputs]
        return main + (0.3 if auxiliary[1:] else 0.4) * sum(auxiliary)

    def to(self, device: torch.device) -> None:
        """Move the tensors of the task, such as weights of classes, to a device."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))

    def training_sums(self, loss: Tensor, outputs: Tensor, targets: Tensor) -> Sequence[Tensor]:
        """The sums named by `training`, each a scalar. `loss` is that of the same batch."""
        raise NotImplementedError

    def evaluate(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The values named by `evaluation` of each sample, [n, len(evaluation)], and its
        prediction, [n, ...].
        """
        raise NotImplementedError

    def summary(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """The metrics of `count` samples from their sums, either `training` or `evaluation`; here
        the means.
        """
        return {name: total / count for name, total in sums.items()}

    def metrics(self, predictions: np.ndarray, labels: np.ndarray) -> dict:
        """More metrics, from the predictions [N, ...] and labels [N, ...] of all samples.

        They are computed with --metrics, and if `metric` is one of them.
        """
        return {}

    def check_predictions(self) -> None:
        """Raise UserError if the outputs have no known meaning as classes."""
        problem = f"predict.py, export.py and --predictions do not support {type(self).__name__}"
        fix = "set its `activation` if its outputs are scores of classes"
        require(self.activation, problem, fix)

    def most_likely(self, outputs: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """`top` and `scores` of `outputs` [n, outputs], see `Predictions`."""
        # The top outputs, as for the accuracy: their probabilities may be equal.
        top = outputs.topk(min(count, outputs.shape[1]), dim=1).indices
        return top, outputs.softmax(1).gather(1, top)

    def decide(self, top: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The predicted class of n images, int64 [n], and its probability; for tasks with one class
        per image.
        """
        return top[:, 0], scores[:, 0]

    def name_classes(
        self, top: np.ndarray, scores: np.ndarray, count: int
    ) -> tuple[list, np.ndarray, np.ndarray]:
        """What is predicted for n images, from `top` and `scores` of `Predictions`.

        This is the predicted class, or the list of classes, of each image, then the numbers of the
        `count` most likely classes and their probabilities, each [n, count], the most likely one
        first.
        """
        predicted, _ = self.decide(top, scores)
        return [self.class_names[best] for best in predicted], top[:, :count], scores[:, :count]

    def describe(self) -> str:
        """What the start table says of the task; empty for classification."""
        return ""

    @property
    def higher_is_better(self) -> bool:
        """Whether the highest value of `metric` is the best."""
        return self.metric in self.highest_is_best

    def report(self, record: Mapping, title: str, more: Sequence[tuple[str, Any]] = ()) -> str:
        """The result of eval.py as text: the metrics, `more` rows of the table, then the worst
        classes.
        """
        evaluated = record.get("classes_evaluated", record["classes"])
        of = record["classes"]
        rows = [
            ("data", f"{printable(record['data'])}, {record['split']}"),
            *([("weights", record["weights"])] if "weights" in record else []),
            ("classes", f"{evaluated} of {of} with samples" if evaluated < of else f"{of}"),
            *score_rows(record),
            ("count", record["count"]),
            ("seconds", f"{record['seconds']:.2f}"),
        ]
        what, key = self.of_classes
        scores = zip(record.get(key, ()), map(printable, self.class_names), strict=False)
        worst = sorted(pair for pair in scores if pair[0] is not None)[:10]
        classes = [(name, f"{score:.4f}") for score, name in worst]
        shown = [table(f"{what} of the classes, worst first", classes)] if classes else []
        return "\n".join([table(title, [*rows, *more]), *shown])


def score_rows(record: Mapping) -> list[tuple[str, str]]:
    """The metrics of an evaluation as text: all its floats but the duration."""
    return [
        (k, f"{value:.4f}")
        for k, value in record.items()
        if isinstance(value, float) and k != "seconds"
    ]


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """The probabilities of logits, float64."""
    with np.errstate(over="ignore"):  # below -709 the probability is 0
        return 1 / (1 + np.exp(-logits.astype(np.float64)))
