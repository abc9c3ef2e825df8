"""What the loop in train.py does besides training: read batches, synchronise, log, save, and profile."""

import math
import os
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch

from utils.data.datasets import Batch
from utils.errors import UserError, one_line
from utils.runs.metadata import make_files
from utils.training.divergence import LEARNED, check_weights, report_bad_loss, watch_loss
from utils.training.first_batch import write_first_batch
from utils.training.meter import SyncInterval
from utils.training.run import BAD_IMAGES, Run
from utils.training.schedule import learning_rate


def batches_of_update(run: Run, batches: Iterator[Batch]) -> Iterator[Batch]:
    """This rank's microbatches of the next update."""
    state, ranks = run.state, run.ranks
    for step in range(run.gradients.steps):
        ranks.mark(f"update {state.step + 1}, reading a batch")
        start = time.perf_counter()
        batch = next(batches)
        run.meter.wait += time.perf_counter() - start
        assert batch.update == state.step, f"a batch of update {batch.update}, not {state.step}"
        if state.step == step == 0:
            write_first_batch(run, batch)
        ranks.mark_waiting(f"update {state.step + 1}, computing and adding up gradients")
        if batch.number >= 0:  # otherwise another rank has one microbatch more
            yield batch


def synchronise(run: Run, interval: SyncInterval) -> float:
    """Sum losses over the ranks, and agree on errors and stopping; collective, about once a second.

    A rank that cannot read a sample continues with an empty batch until this point, so that no rank waits for it.
    Returns the seconds since the last save.
    """
    state, batches = run.state, run.train_batches
    run.ranks.mark_waiting(f"after update {state.step}, adding up losses")
    failed = batches.error is not None or run.log.error is not None or run.checkpoints.has_failed
    reduced = run.meter.reduce(run.accelerator, failed, run.stopping.requested)
    if reduced.failed:
        with run.ranks.agree():
            batches.check()
            run.log.check()
        run.checkpoints.wait()
    if not reduced.totals["count"]:
        problem = f"no image of the updates up to {state.step} can be read"
        raise UserError(problem, f"see {run.folder / BAD_IMAGES}")
    if not math.isfinite(reduced.totals["loss"]):
        first = min(bad for bad in run.ranks.gather(run.meter.first_bad()) if bad)
        with run.ranks.agree():
            report_bad_loss(run.ranks, run.log, run.plan, run.data.train, *first)
    if state.step == 1:  # the ranks always synchronise here, so this is the loss of the initial weights
        state.learned = reduced.totals["loss"] / reduced.totals["count"] < LEARNED * run.task.uniform_loss
    interval.synced(state.step, reduced.seconds)
    state.seconds += reduced.seconds
    state.since_log = reduced.totals
    run.stopping.agreed = reduced.stop
    return reduced.since_save


def save(run: Run) -> None:
    """Save a checkpoint, then agree on stopping; collective."""
    state, ranks = run.state, run.ranks
    with ranks.agree(f"after update {state.step}, saving"):
        check_weights(run.module, run.plan, run.data.train, state.step)
        run.log.sync()
        files = make_files(run.config, state, run.plan, run.data, run.spec, ranks) if ranks.is_main else {}
    run.checkpoints.save(run.accelerator, run.parts, files, state)
    run.meter.restart_save_clock()
    run.stopping.agreed = ranks.any_rank(run.stopping.agreed or run.stopping.requested)
    if run.ended or run.stopping.agreed:  # no save follows
        run.checkpoints.wait()


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


WAIT, WARM_UP, ACTIVE = 8, 2, 10  # updates that are not recorded, recorded and discarded, recorded and kept
_ROWS = 12  # operations in the table


class Profile:
    """A context for the training loop, which calls `step` after each update. With --profile, it records ten of them."""

    def __init__(self, run: Run):
        self.path = run.folder / f"trace-rank{run.ranks.topology.rank}.json.gz"
        self.say, self.kind, enabled = run.log.say, run.ranks.device.type, run.config.profile
        self._enabled, self._written = enabled, False
        self._profiler: Any = nullcontext()
        if enabled:
            schedule = torch.profiler.schedule(wait=WAIT, warmup=WARM_UP, active=ACTIVE, repeat=1)
            self._profiler = torch.profiler.profile(schedule=schedule, on_trace_ready=self._write)
        self.step = self._profiler.step if enabled else lambda: None

    def __enter__(self) -> "Profile":
        self._profiler.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        self._profiler.__exit__(*exception)
        if self._enabled and not self._written:
            self.say(f"--profile: the run ended before update {WAIT + WARM_UP + 1}, where the trace starts")

    def _write(self, profiler: torch.profiler.profile) -> None:
        partial = self.path.with_name(f".partial-{self.path.name}")  # the suffix selects the compression
        self._written = True
        try:
            profiler.export_chrome_trace(str(partial))
            os.replace(partial, self.path)
        except (OSError, RuntimeError) as error:  # the run continues without a trace
            self.say(f"--profile: {self.path} cannot be written ({one_line(error)[:120]})")
            return
        longest = profiler.key_averages().table(f"self_{self.kind}_time_total", _ROWS, max_name_column_width=40)
        self.say(f"{longest}trace: {self.path} (open it at https://ui.perfetto.dev)")
