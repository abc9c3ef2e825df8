"""Synchronise the ranks of a run: sum losses, and agree on errors, unreadable images and stopping."""

import math
from functools import partial

from utils.data.batches import Batches
from utils.data.splits import Split
from utils.errors import UserError
from utils.training.bad_images import found_by_all, write_list
from utils.training.divergence import LEARNED, report_bad_loss, watch_loss
from utils.training.meter import Pace
from utils.training.run import Run
from utils.training.saving import finish_save
from utils.training.schedule import learning_rate


def synchronise(run: Run, pace: Pace) -> float:
    """Sum losses over the ranks, and agree on errors and stopping; collective, about once a second.

    A rank that cannot read a sample continues with an empty batch until this point, so that no rank waits for it.
    Returns the seconds since the last save.
    """
    state, batches = run.state, run.train_batches
    run.ranks.mark_waiting(f"after update {state.step}, adding up losses")
    failed = batches.error is not None
    failed = failed or (run.log.error is not None and run.config.if_save_fails == "stop")
    if run.saving is not None and run.saving.pointers_updated.done():
        failed = failed or run.saving.pointers_updated.exception() is not None
    new_bad = len(batches.bad.keys() - batches.agreed_bad)
    reduced = run.meter.reduce(run.accelerator, failed, run.stopping.requested, new_bad)
    if reduced.failed:
        run.ranks.run_on_all(batches.check)
        if run.config.if_save_fails == "stop":
            run.ranks.run_on_all(run.log.check)
        finish_save(run)
    if reduced.bad:
        state.bad_images += agree_on_bad(run, run.data.train, batches)
    if not reduced.totals["count"]:
        problem = f"no image of the updates up to {state.step} can be read"
        raise UserError(problem, f"see {run.folder.path}/bad_images.json")
    if not math.isfinite(reduced.totals["loss"]):
        first = run.meter.first_bad()
        report = partial(report_bad_loss, run.ranks, run.log, run.plan, run.data.train, first)
        run.ranks.run_on_all(report)
    if state.step == 1:  # the ranks always synchronise here, so this is the loss of the initial weights
        state.learned = reduced.totals["loss"] / reduced.totals["count"] < LEARNED * run.task.loss_of_guessing
    pace.synced(state.step, reduced.seconds)
    state.seconds += reduced.seconds
    state.since_log = reduced.totals
    run.stopping.agreed = reduced.stop
    return reduced.since_save


def log_training(run: Run) -> None:
    """Write a train record over all samples since the last one."""
    state, totals, processes = run.state, run.state.since_log, run.accelerator.num_processes
    seconds, count = state.seconds - state.logged_seconds, totals["count"]
    summary = run.task.summary({name: totals[name] for name in run.task.training}, count)
    run.log.write(
        "train",
        step=state.step,
        epoch=state.epochs_begun,
        **summary,
        lr=learning_rate(run.config, state.step - 1, run.updates, state.lr_factor),
        images_per_second=count / seconds,
        data_wait=totals["wait"] / processes / seconds,
        seconds=state.seconds,
    )
    watch_loss(run, summary["loss"], count)
    state.logged_seconds, state.since_log = state.seconds, {}
    run.meter.reset()


def agree_on_bad(run: Run, split: Split, batches: Batches) -> list[int]:
    """Log and list the images that any rank newly found to be unreadable; collective.

    Returns their positions. They contribute nothing to their updates, on any number of processes.
    """
    found = found_by_all(run.ranks, batches)
    if found:
        run.ranks.run_on_main(lambda: _report_bad(run, split, found))
    return list(found)


def _report_bad(run: Run, split: Split, found: dict[int, str]) -> None:
    for reason in found.values():
        run.log.say(f"{reason}; left out from now on")
    reasons = {split.describe(position): reason for position, reason in found.items()}
    run.log.write("bad_images", step=run.state.step, split=split.name, images=list(reasons))
    run.data.bad_images.update(reasons)
    write_list(run.folder.path, run.data.bad_images)
