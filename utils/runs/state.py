"""The training state, which every checkpoint stores as JSON and a resumed run starts from."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from utils.config import Count, NonNegativeFloat, Number, PositiveInt, read_fields
from utils.data import Plan


@dataclass
class TrainState:
    """The progress of a run between two updates."""

    run_id: str = ""
    """The random id of the run, the same in all checkpoints of its folder."""
    step: Count = 0
    """Finished updates."""
    epoch: Count = 0
    position: Count = 0
    """Samples of this epoch used so far. The seed, the epoch and this determine the order of the
    rest."""
    best: Number | None = None
    """The best value so far of the task's metric, such as the accuracy of the evaluation split."""
    best_step: Count | None = None
    seconds: NonNegativeFloat = 0.0
    """Training time over all resumes, without evaluation and saving."""
    images: Count = 0
    """Images trained on by all ranks, over all resumes."""
    logged_seconds: NonNegativeFloat = 0.0
    """`seconds` at the last train record."""
    since_log: dict[str, Number] = field(default_factory=dict)
    """The meter's totals since then, by name."""
    owes_evaluation: bool = False
    """Whether the run stopped before or during the evaluation that was due at this step."""
    batch_size: PositiveInt = 0
    """The largest batch of one process so far. A resumed run on fewer processes accumulates instead
    of exceeding it."""
    evaluation: dict[str, int | Number | None] = field(default_factory=dict)
    """The step and the numbers of the last evaluation."""
    exploded: bool = False
    """Whether the run has reported that it diverges."""
    rounding_said: bool = False
    """Whether the run has reported that the processors of its ranks round differently."""
    best_value: Number | None = None
    """The best value so far of the task's metric, even if its checkpoint was not saved. Unlike
    `best`, it is kept by a resume in a new run folder."""
    evaluations_since_best: Count = 0
    """Evaluations since `best_value`."""
    digest: list[str] = field(default_factory=list, metadata={"optional": True})
    """That of each update since the last train record, with --microbatches."""

    @classmethod
    def from_dict(cls, values: Any) -> "TrainState":
        """Make a state from the output of `asdict`.

        Raises ValueError if no run can have these values.
        """
        return read_fields(cls, values)

    @property
    def epochs_begun(self) -> int:
        """The epoch, counted from 1, of the last finished update."""
        return self.epoch + (self.position > 0)

    def count_update(self, plan: Plan) -> None:
        """Count an update."""
        self.images += plan.update_size(self.position)
        self.step += 1
        self.epoch, self.position = plan.at(self.step)

    def add_evaluation(
        self, result: Mapping[str, Any], metric: str, higher_is_better: bool
    ) -> None:
        """Store an evaluation at this step, and its `metric` if it is the best so far.

        Of equal values, the earliest stays the best. NaN and infinity, which JSON lacks, become
        None and are never the best; a metric may be missing because it is undefined.
        """
        finite = {
            name: value if math.isfinite(value) else None
            for name, value in result.items()
            if type(value) in (int, float)
        }
        self.evaluation = {"step": self.step, **finite}
        value = finite.get(metric)

        def improves(best: float | None) -> bool:
            sign = 1 if higher_is_better else -1
            return value is not None and (best is None or sign * value > sign * best)

        if improves(self.best):
            self.best = value
            self.best_step = self.step
        self.evaluations_since_best += 1
        if improves(self.best_value):
            self.best_value = value
            self.evaluations_since_best = 0
        self.owes_evaluation = False
