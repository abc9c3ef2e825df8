"""What happens after which update: learning rate, evaluations, checkpoints, and the end of the run.

To add a schedule, such as tanh, write a function like those below and add it to `SCHEDULES`: its
parameters with a default are what --lr_schedule_args may set.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import NamedTuple

import numpy as np

from utils.config import Registry, require
from utils.data import Plan
from utils.runs import TrainState
from utils.settings.training import TrainingSettings


class Due(NamedTuple):
    """What to do after an update."""

    log: bool
    evaluate: bool
    save: bool


def due_after(config: TrainingSettings, state: TrainState, updates: int) -> Due:
    """What is due after update `state.step` of `updates`; --save_seconds is checked in train.py."""

    def due(every: int | None, otherwise: bool) -> bool:
        return state.step == updates or (state.step % every == 0 if every else otherwise)

    epoch_ends = state.position == 0
    return Due(
        log=due(config.log_every, False),
        evaluate=due(config.eval_every, epoch_ends),
        save=due(config.save_every, epoch_ends and not config.save_seconds)
        or state.step == config.stop_after,
    )


def total_updates(config: TrainingSettings, plan: Plan, step: int = 0) -> int:
    """The number of updates of the whole run, of which `step` are finished. Raises ValueError if
    --drop_last leaves none, if --lr_schedule_args give an invalid learning rate, or if --stop_after
    is not ahead.
    """
    if config.lr_schedule_args:
        _check_arguments(config)
    batch = f"{plan.samples} samples do not fill a global batch of {plan.global_batch_size}"
    problem = f"--drop_last leaves no update: {batch}"
    require(plan.updates_per_epoch > 0, problem, "lower --global_batch_size")
    updates = config.max_steps or config.epochs * plan.updates_per_epoch
    stop = config.stop_after
    problem = (
        f"--stop_after {stop} is not from {step}, where the run is, to {updates}, its last update"
    )
    is_ahead = stop is None or step <= stop <= updates
    require(is_ahead, problem, "choose an update of these, or leave it out")
    if cooldown := count_updates(config.cooldown_steps, updates):
        warmup = count_updates(config.warmup_steps or 0, updates)
        both = f"--warmup_steps {warmup} and --cooldown_steps {cooldown}"
        problem = f"{both} exceed the {updates} updates of the run"
        require(warmup + cooldown <= updates, problem, "lower them")
        last = updates - cooldown
        end = SCHEDULES.call(config, replace(config, lr=1.0), last, last)
        problem = (
            f"--cooldown_steps has no effect: {config.lr_schedule} ends with {end:.2g} times --lr"
        )
        require(end > 1e-5, problem, "use --lr_schedule constant")
    return updates


def not_reached(config: TrainingSettings, updates: int) -> list[str]:
    """A line for each setting whose number of updates is too large for the run.

    A fraction is never too large.
    """
    end = updates + 1 - max(1, count_updates(config.cooldown_steps, updates))
    given = {"warmup_steps": config.warmup_steps, **config.lr_schedule_args}
    return [
        f"{name} {given[name]} is not reached in this run; use less than {end}"
        for name in ("warmup_steps", "step_size", "milestones")
        if np.max(given.get(name) or 0) >= end
    ]


def count_updates(steps: int | float, updates: int) -> int:
    """A number of updates: `steps`, or if it is below 1, this fraction of `updates`."""
    return round(steps * updates) if 0 < steps < 1 else int(steps)


def after_warmup(decay: Callable[..., float]) -> Callable[..., float]:
    """A schedule that rises linearly to --lr over --warmup_steps and then follows `decay`.

    `decay(done)` returns the factor of --lr; `done` is the share of the updates after the warm-up,
    from 0 to 1.
    """

    @wraps(decay)  # keeps the parameters that --lr_schedule_args may set
    def schedule(config: TrainingSettings, update: int, updates: int, **arguments) -> float:
        warmup = count_updates(config.warmup_steps or 0, updates)
        if update < warmup:
            return config.lr * (update + 1) / warmup
        return config.lr * decay((update - warmup) / max(1, updates - warmup), **arguments)

    return schedule


@after_warmup
def constant(_done: float) -> float:
    """No change after the warm-up."""
    return 1.0


@after_warmup
def linear(done: float, end: float = 0.0) -> float:
    """Linear decay to `end` times --lr, by default to 0."""
    return end + (1 - end) * (1 - done)


@after_warmup
def cosine(done: float, end: float = 0.0) -> float:
    """Cosine decay to `end` times --lr, by default to 0."""
    return end + (1 - end) * ((1 + math.cos(math.pi * done)) / 2)


def step(
    config: TrainingSettings, update: int, updates: int, step_size: float = 0.3, gamma: float = 0.1
) -> float:
    """Multiplied by `gamma` every `step_size` updates.

    Below 1, `step_size` is a fraction of the run.
    """
    drops = update // max(1, count_updates(step_size, updates))
    return _warm_up(config, update, updates) * gamma**drops


def multistep(
    config: TrainingSettings,
    update: int,
    updates: int,
    milestones: Sequence[float] = (0.5, 0.75),
    gamma: float = 0.1,
) -> float:
    """Multiplied by `gamma` at each of the `milestones`, in updates.

    Those below 1 are fractions of the run.
    """
    drops = sum(update >= count_updates(milestone, updates) for milestone in milestones)
    return _warm_up(config, update, updates) * gamma**drops


def _warm_up(config: TrainingSettings, update: int, updates: int) -> float:
    """The learning rate of a constant schedule.

    Steps are counted from the start of the run, warm-up included.
    """
    warmup = count_updates(config.warmup_steps or 0, updates)
    return config.lr * min(1.0, (update + 1) / max(1, warmup))


def onecycle(
    config: TrainingSettings,
    update: int,
    updates: int,
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
) -> float:
    """Half-cosine rise over 30 percent of the run, or --warmup_steps, then half-cosine decay to
    almost 0.

    It starts at --lr / `div_factor` and ends at that / `final_div_factor`. The arguments and
    defaults are those of torch's OneCycleLR (Smith and Topin, 2017). Unlike there, the momentum is
    constant.
    """
    lr = config.lr
    warmup = config.warmup_steps
    start = lr / div_factor
    end = lr / (div_factor * final_div_factor)
    top = 0.3 * updates - 1 if warmup is None else float(count_updates(warmup, updates))
    if update <= top and top > 0:
        return _half_cosine(start, lr, update / top)
    return _half_cosine(lr, end, (update - top) / max(1.0, updates - 1 - top))


def _half_cosine(start: float, end: float, done: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * min(1.0, done))) / 2


def learning_rate(config: TrainingSettings, update: int, updates: int) -> float:
    """The learning rate of update `update`, counted from 0, of `updates`; the same on any number of
    processes.

    With --cooldown_steps, the schedule ends before the cool-down, in which the learning rate falls
    linearly to 0.
    """
    cooldown = count_updates(config.cooldown_steps, updates)
    before = updates - cooldown
    left = updates - update
    lr = SCHEDULES.call(config, config, min(update, before), before)
    return lr * left / cooldown if left < cooldown else lr


def _check_arguments(config: TrainingSettings) -> None:
    """Raise ValueError if the arguments give a learning rate that is negative, NaN or infinite."""
    config, last = replace(config, lr=1.0, cooldown_steps=0), 2**32  # beyond any warm-up
    for update in range(last, -1, -last // 16):
        lr = learning_rate(config, update, last)
        problem = f"--lr_schedule_args for {config.lr_schedule}: the learning rate would be"
        fix = "change or remove these arguments"
        require(0 <= lr < math.inf, f"{problem} {lr:g} times --lr", fix)


SCHEDULES = Registry(
    "lr_schedule",
    {
        "constant": constant,
        "linear": linear,
        "cosine": cosine,
        "onecycle": onecycle,
        "step": step,
        "multistep": multistep,
    },
)
