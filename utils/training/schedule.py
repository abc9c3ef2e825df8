"""What happens after which update: learning rate, evaluations, checkpoints, and the end of the run.

To add a schedule, such as cosine with restarts, add its name to `lr_schedule` in config/settings.py and its formula to
`learning_rate`.
"""

import math
from typing import NamedTuple

import torch

from utils.config.settings import TrainConfig
from utils.data.order import Plan
from utils.errors import UserError
from utils.runs.state import TrainState


class Due(NamedTuple):
    """What to do after an update."""

    log: bool
    evaluate: bool
    save: bool


def due_after(config: TrainConfig, state: TrainState, updates: int) -> Due:
    """What is due after update `state.step` of `updates`; --save_seconds is checked in train.py."""
    last, epoch_ends = state.step == updates, state.position == 0
    save = state.step % config.save_every == 0 if config.save_every else epoch_ends and not config.save_seconds
    return Due(
        log=last or state.step % config.log_every == 0,
        evaluate=last or (state.step % config.eval_every == 0 if config.eval_every else epoch_ends),
        save=last or save,
    )


def total_updates(config: TrainConfig, plan: Plan) -> int:
    """The number of updates of the whole run. Raises ValueError if --drop_last leaves none."""
    if not plan.updates_per_epoch:
        raise UserError(
            f"--drop_last leaves no update: {plan.samples} samples do not fill a global batch of "
            f"{plan.global_batch_size}",
            "lower --global_batch_size",
        )
    return config.max_steps or config.epochs * plan.updates_per_epoch


def learning_rate(config: TrainConfig, update: int, updates: int) -> float:
    """The learning rate of update `update`, counted from 0, of `updates`; the same on any topology.

    After a linear warm-up of --warmup_steps, `constant` stays at --lr, and `linear` and `cosine` decay from --lr to 0
    at the end of the run. `onecycle` rises from lr/25 to lr and decays to lr/250000, both as half a cosine. These are
    the defaults of torch's OneCycleLR (Smith and Topin, 2017), except that the momentum is constant.
    """
    if config.lr_schedule == "onecycle":
        return _one_cycle(config, update, updates)
    warmup = config.warmup_steps or 0
    if update < warmup:
        return config.lr * (update + 1) / warmup
    done = (update - warmup) / max(1, updates - warmup)  # share of the run after the warm-up
    if config.lr_schedule == "cosine":
        return config.lr * (1 + math.cos(math.pi * done)) / 2
    return config.lr * (1 - done) if config.lr_schedule == "linear" else config.lr


def _one_cycle(config: TrainConfig, update: int, updates: int) -> float:
    start, end = config.lr / 25, config.lr / 25e4
    top = float(0.3 * updates - 1) if config.warmup_steps is None else float(config.warmup_steps)
    if update <= top and top > 0:
        return _half_cosine(start, config.lr, update / top)
    return _half_cosine(config.lr, end, (update - top) / max(1.0, updates - 1 - top))


def _half_cosine(start: float, end: float, done: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * min(1.0, done))) / 2


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
