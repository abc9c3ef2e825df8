"""What a run must remember to go on: one small object, written as JSON into every checkpoint."""

import math
from dataclasses import dataclass, field, fields, replace

from utils.config import TrainConfig
from utils.data.order import Plan


@dataclass
class TrainState:
    """Where a run stands between two updates."""

    step: int = 0
    """Finished updates."""
    epoch: int = 0
    position: int = 0
    """Samples of this epoch consumed so far; with the seed and the epoch, all that the order needs."""
    best_accuracy: float | None = None
    best_step: int | None = None
    seconds: float = 0.0
    """Training time over all resumes, evaluation and saving not counted."""
    images: int = 0
    """Images trained on, over all ranks and resumes."""
    logged_seconds: float = 0.0
    """`seconds` at the last train record."""
    since_log: dict = field(default_factory=dict)
    """The meter's totals since then."""

    @property
    def epochs_begun(self) -> int:
        """The epoch, counted from 1, of the last finished update."""
        return self.epoch + (self.position > 0)

    @classmethod
    def from_dict(cls, values: dict) -> "TrainState":
        """The state that `asdict` wrote; ValueError when a field is missing."""
        try:
            return cls(**{f.name: values[f.name] for f in fields(cls)})
        except (KeyError, TypeError) as error:
            raise ValueError(f"no training state: {error} is missing") from None


def check_finite(loss: float, step: int) -> None:
    """Raise ValueError when the summed training loss is no number any more."""
    if not math.isfinite(loss):
        raise ValueError(
            f"the training loss became {loss} at or before update {step}; lower --lr, lengthen --warmup_steps or set "
            "--clip_norm"
        )


def total_updates(config: TrainConfig, plan: Plan) -> int:
    """Updates of the whole run; ValueError when --drop_last leaves none."""
    if not plan.updates_per_epoch:
        raise ValueError(
            f"--drop_last leaves no update: {plan.samples} samples do not fill a global batch of "
            f"{plan.global_batch_size}; lower --global_batch_size"
        )
    return config.max_steps or config.epochs * plan.updates_per_epoch


def check_batch_norm(plan: Plan, updates: int) -> None:
    """Raise ValueError when a rank would take batch statistics of a single sample, with batch sizes that work."""
    if 1 not in _piece_sizes(plan, updates):
        return
    near = sorted(
        range(plan.pieces * 2, 2 * plan.global_batch_size + 1, plan.pieces),
        key=lambda size: abs(size - plan.global_batch_size),
    )
    works = [size for size in near if 1 not in _piece_sizes(replace(plan, global_batch_size=size), updates)][:2]
    mends = [f"--global_batch_size {size}" for size in sorted(works)]
    if 1 not in _piece_sizes(replace(plan, drop_last=True), updates):
        mends.insert(0, "--drop_last")
    raise ValueError(
        f"batch normalisation needs more than one sample: {plan.samples} samples in global batches of "
        f"{plan.global_batch_size} over {plan.pieces} processes x accumulation leave one of them a single sample; use "
        + (" or ".join(mends) or "fewer processes")
    )


def _piece_sizes(plan: Plan, updates: int) -> set[int]:
    """Sizes of the pieces of a full update and of the epoch's last one."""
    last = (plan.updates_per_epoch - 1) * plan.global_batch_size
    return {*plan.piece_sizes(0), *(plan.piece_sizes(last) if updates >= plan.updates_per_epoch else ())}
