"""Settings of the task: targets, loss and the metric that decides."""

from dataclasses import dataclass, field
from typing import Literal

from utils.config import Arguments, Chosen, FractionBelow1, PositiveFloat, ProbabilityBelow1
from utils.settings.shared import SharedSettings


@dataclass(kw_only=True)
class TaskSettings(SharedSettings):
    """What `utils.tasks` reads."""

    class_weights: Literal["balanced"] | None = None
    """Weights of the classes in the training loss: balanced is inversely proportional to how often
    each class is drawn. The mean over the samples that are drawn is 1, so with --sampler balanced
    all weights are 1."""
    loss: str = "cross_entropy"
    """Loss."""
    loss_args: Arguments = field(default_factory=dict)
    """Keyword arguments of the loss, such as '{gamma: 1.5}'."""
    label_smoothing: ProbabilityBelow1 = 0.0
    """Fraction of the training target to spread evenly over all classes; in multilabel and binary,
    over positive and negative."""
    pos_weight: PositiveFloat | Literal["balanced"] | list[PositiveFloat] | None = None
    """Weight of positive targets in the training loss of multilabel and binary: a number, a list
    with one number for each class, or balanced (negatives / positives of the samples that are
    drawn: 1 with --sampler balanced)."""
    threshold: FractionBelow1 = 0.5
    """Probability above which multilabel and binary predict a class."""
    best_metric: Chosen[str | None] = None
    """Metric of the evaluation that decides which checkpoint is the best, such as loss (default:
    mAP for multilabel, else accuracy); of equal values, the earliest is the best."""
