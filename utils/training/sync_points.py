"""What happens where the ranks synchronise: they agree on errors and stopping, make the records of
the log, and check the weights before a save.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import torch

from utils.runs import make_files
from utils.training.divergence import check_weights, compare_ranks, report_bad_loss, watch_loss
from utils.training.meter import SyncInterval
from utils.training.run import Run
from utils.training.schedule import learning_rate


def synchronise(run: Run, interval: SyncInterval) -> None:
    """Sum losses over the ranks, and agree on errors and stopping; collective, about once a second.

    A rank that cannot read a sample continues with an empty batch until this point, so that no rank
    waits for it.
    """
    state = run.state
    batches = run.train_batches
    meter = run.meter
    run.ranks.enter_collective(f"after update {state.step}, adding up losses")
    failed = bool(batches.error or run.log.error or run.checkpoints.has_failed)
    totals, seconds, any_failed, stop = meter.reduce(
        run.accelerator, failed, bool(run.stopping.request)
    )
    if any_failed:
        with run.ranks.agree():
            batches.check()
            run.log.check()
        run.checkpoints.wait()
    if not math.isfinite(totals["loss"]):
        found = enumerate(run.ranks.gather(meter.first_bad()))
        with run.ranks.agree():
            report_bad_loss(run, *min((bad, rank) for rank, bad in found if bad))
    run.gradients.exchange.add_up()
    interval.synced(state.step, seconds)
    state.seconds += seconds
    state.since_log = totals
    state.digest += [f"{digest.item() % 2**64:016x}" for digest in run.gradients.digests]
    run.gradients.digests.clear()
    run.stopping.agreed = stop


def training_record(run: Run) -> dict:
    """The train record of all samples since the last record; the next one then starts anew;
    collective.
    """
    state = run.state
    accelerator = run.accelerator
    totals = run.state.since_log
    seconds = state.seconds - state.logged_seconds
    count = totals["count"]
    summary = run.task.summary({name: totals[name] for name in run.task.training}, count)
    watch_loss(run, "training", summary["loss"])
    record = {
        "step": state.step,
        "epoch": state.epochs_begun,
        **summary,
        "lr": learning_rate(run.config, state.step - 1, run.updates),
        "images_per_second": count / seconds,
        "data_wait": totals["wait"] / accelerator.num_processes / seconds,
        "seconds": state.seconds,
    }
    if accelerator.device.type == "cuda":
        record["gpu_memory"] = torch.cuda.max_memory_allocated(accelerator.device)
        torch.cuda.reset_peak_memory_stats(accelerator.device)
    if accelerator.scaler:
        record["skipped"] = totals["skipped"] / accelerator.num_processes
    if (norm := run.meter.grad_norm) is not None:
        record["grad_norm"] = norm.item()  # of the last update; collective with FSDP2
    if run.config.microbatches:
        record |= times_of_ranks(run, seconds) | {"digest": state.digest}
    state.logged_seconds = state.seconds
    state.since_log = {}
    state.digest = []
    run.meter.reset()
    return record


def evaluation_record(run: Run, result: Mapping) -> dict:
    """The record of an evaluation, whose metrics are in `result`."""
    watch_loss(run, "evaluation", result["loss"])
    state = run.state
    split = run.data.evaluation
    return {"step": state.step, "epoch": state.epochs_begun, "split": split.name, **result}


def prepare_save(run: Run) -> dict[str, bytes | Path]:
    """Check and compare the weights; returns the files of a checkpoint besides its tensors on the
    main process; collective.
    """
    files = {}
    ranks = run.ranks
    with ranks.agree(f"after update {run.state.step}, saving"):
        check_weights(run)
        run.log.sync()
        if ranks.is_main:
            files = make_files(run.config, run.state, run.plan, run.data, run.spec, ranks)
    compare_ranks(run)
    return files


def times_of_ranks(run: Run, seconds: float) -> dict[str, list[float]]:
    """The seconds that each rank computed, and waited for slower ranks, for a train record;
    collective.

    Time in which a rank waited for data is in neither. Empty for the first record of a start,
    because its time includes other work.
    """
    exchange = run.gradients.exchange
    each = run.ranks.gather((exchange.seconds, run.meter.totals["wait"]))
    is_first = exchange.is_first
    exchange.is_first = False
    exchange.seconds = 0.0
    if is_first:
        return {}
    computing = [seconds - sum(own) for own in each]
    return {"computing": computing, "waiting": [own - min(each)[0] for own, _ in each]}
