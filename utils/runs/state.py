"""The training state, which every checkpoint stores as JSON and a resumed run starts from."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from utils.data.order import Plan

_MAX_EVALUATIONS = 1000  # less than 1 MB of JSON even with 30 metrics; state.json may have at most 8 MB


@dataclass
class TrainState:
    """The progress of a run between two updates."""

    step: int = 0
    """Finished updates."""
    epoch: int = 0
    position: int = 0
    """Samples of this epoch used so far. The seed, the epoch and this determine the order of the rest."""
    best: float | None = None
    """The best value so far of the task's metric, such as the accuracy of the evaluation split."""
    best_step: int | None = None
    seconds: float = 0.0
    """Training time over all resumes, without evaluation and saving."""
    images: int = 0
    """Images trained on by all ranks, over all resumes."""
    logged_seconds: float = 0.0
    """`seconds` at the last train record."""
    since_log: dict = field(default_factory=dict)
    """The meter's totals since then, by name."""
    owes_evaluation: bool = False
    """Whether the run stopped before or during the evaluation that was due at this step."""
    bad_images: list[int] = field(default_factory=list)
    """Positions in the training split of images found to be unreadable during the run. The run no longer uses them."""
    batch_size: int = 0
    """The largest batch of one process so far. A resumed run on fewer processes accumulates instead of exceeding it."""
    evaluations: list[dict] = field(default_factory=list)
    """The step and the numbers of the last 1,000 evaluations, oldest first."""
    exploded: bool = False
    """Whether the run has reported that its training falls apart."""
    learned: bool = False
    """Whether the first update or a train record had a loss below 0.8 times that of guessing."""
    last_loss: float | None = None
    """The mean training loss of the last train record."""
    first_metric: float | None = None
    """The task's metric of the first evaluation, of the weights without averaging."""
    best_value: float | None = None
    """The best value so far of the task's metric, even if its checkpoint was not saved. Unlike `best`, it is kept by a
    resume in a new run folder."""
    evaluations_since_best: int = 0
    """Evaluations since `best_value`."""
    lr_factor: float = 1.0
    """The factor of the learning rate with --lr_schedule plateau."""

    @property
    def place(self) -> tuple[int, int, int]:
        """Where the run continues: the number of the next update, its epoch, and its position in the epoch."""
        return self.step, self.epoch, self.position

    @property
    def epochs_begun(self) -> int:
        """The epoch, counted from 1, of the last finished update."""
        return self.epoch + (self.position > 0)

    def updated(self, plan: Plan) -> None:
        """Count an update."""
        self.images += plan.update_size(self.position)
        self.epoch, self.position = plan.advance(self.epoch, self.position)
        self.step += 1

    def evaluated(self, result: Mapping[str, Any], metric: str, higher_is_better: bool) -> None:
        """Add an evaluation at this step to the history, and store its `metric` if it is the best so far.

        Of equal values, the earliest stays the best. NaN and infinity, which JSON lacks, become None in the history and
        are never the best; a metric may be missing because it is undefined.
        """
        numbers = {name: value for name, value in result.items() if type(value) in (int, float)}
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        self.evaluations = [*self.evaluations[1 - _MAX_EVALUATIONS :], {"step": self.step, **finite}]
        value = finite.get(metric)

        def is_better_than(best: float | None) -> bool:
            return value is not None and (best is None or (value > best if higher_is_better else value < best))

        if is_better_than(self.best):
            self.best, self.best_step = value, self.step
        self.evaluations_since_best += 1
        if is_better_than(self.best_value):
            self.best_value, self.evaluations_since_best = value, 0
        self.owes_evaluation = False

    def equal_bests(self, metric: str) -> int:
        """How many evaluations are as good as the best one. Those of an earlier run, which precede it, do not count."""
        return sum(e.get(metric) == self.best for e in self.evaluations if e["step"] >= (self.best_step or 0))

    @classmethod
    def from_dict(cls, values: dict) -> "TrainState":
        """The state from the output of `asdict`. Raises ValueError if a field is missing or malformed.

        Fields that were added to format 1 later may be missing, and then have their defaults.
        """
        default = asdict(cls())
        for name in default:
            given = name in values or name not in _FORMAT_1
            if not given or not _is_valid(name, values.get(name, default[name])):
                raise ValueError(f"the training state {name!r} is missing or malformed")
        return cls(**{name: values[name] for name in default if name in values})

    def check_place(self, plan: Plan) -> None:
        """Raise ValueError if no run with this plan can reach this state, with or without --drop_last in any epoch."""
        full, rest = divmod(plan.samples, plan.global_batch_size)
        before, odd = divmod(self.position, plan.global_batch_size)
        least = self.epoch * full + before
        if odd or self.position >= plan.samples or not least <= self.step <= least + self.epoch * (rest > 0):
            raise ValueError(f"step {self.step}, epoch {self.epoch} and position {self.position} contradict each other")


# The fields of format 1, which are required, so that damage is noticed. Do not add later fields.
_FORMAT_1 = {"step", "epoch", "position", "best", "best_step", "seconds", "images", "logged_seconds"}
_FORMAT_1 |= {"since_log", "owes_evaluation", "bad_images", "batch_size", "evaluations"}


def _is_valid(name: str, value) -> bool:
    """Whether this is a valid value of a field of TrainState."""
    if name in ("owes_evaluation", "exploded", "learned"):
        return type(value) is bool
    if name == "bad_images":
        return isinstance(value, list) and all(_is_number(position, int) for position in value)
    if name == "evaluations":
        return isinstance(value, list) and all(_is_evaluation(entry) for entry in value)
    if name == "since_log":
        fits = isinstance(value, dict) and (not value or value.keys() >= {"count", "wait", "loss"})
        return fits and all(_is_finite(total) for total in value.values())
    if name in ("best", "best_step", "best_value", "last_loss", "first_metric") and value is None:
        return True
    if name in ("best", "best_value", "last_loss", "first_metric"):
        return _is_finite(value)
    is_real = name in ("seconds", "logged_seconds", "lr_factor")
    return _is_number(value, int, *(float,) * is_real) and (name != "batch_size" or value > 0)


def _is_evaluation(value) -> bool:
    is_dict = isinstance(value, dict) and _is_number(value.get("step"), int)
    return is_dict and all(v is None or (type(v) in (int, float) and -math.inf < v < math.inf) for v in value.values())


def _is_number(value, *kinds: type) -> bool:
    return type(value) in kinds and 0 <= value < 2**63  # False for NaN


def _is_finite(value) -> bool:
    return type(value) in (int, float) and abs(value) < 2**63
