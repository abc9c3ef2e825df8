"""A checkpoint is completed in a thread of the main process while the run goes on, one at a time."""

import errno
import os
import signal
import sys
import threading
from functools import partial
from pathlib import Path

from helpers.ranks import run_ranks, start_ranks
from helpers.training_runs import MLP, await_save, records, same_tensors, train_run, weights
from helpers.waiting import has_logged, until

import train
from utils.runs import checkpoint, writing
from utils.runs.manifest import newest_good, verify

FLAGS = [
    *MLP,
    "--lr_schedule",
    "constant",
    "--max_steps",
    "9",
    "--keep",
    "9",
    "--save_every",
    "3",
    "--log_every",
    "1",
]
RUN = ["--run_name", "run", *FLAGS]
CHECKPOINTS = Path("runs/run/checkpoints")


def names():
    return sorted(path.name for path in CHECKPOINTS.iterdir())


def train_with(publish=None, before=None, always_synchronise=False, flags=RUN):
    """Train; `publish(step, real)` takes the place of the thread's first action, `before(run)`
    precedes updates.
    """
    real, update = checkpoint.publish, train.train_update

    def eventful(run, batches):
        if before is not None:
            before(run)
        update(run, batches)

    if publish is not None:
        checkpoint.publish = lambda folder, step, tied: publish(
            step, partial(real, folder, step, tied)
        )
    if always_synchronise:
        train.SyncInterval.due = lambda interval, step: True
    train.train_update = eventful
    train.main(flags)


def publish_after_go(step, real):
    until(Path("go").exists)
    real()


def publish_on_a_full_disk(step, real):
    writing.put_in_place = no_space
    real()


def no_space(partial, final):
    raise OSError(errno.ENOSPC, "No space left on device", str(partial))


def test_the_run_goes_on_while_a_checkpoint_is_completed():
    launch = start_ranks(2, train_with, publish_after_go)
    until(has_logged(6))  # and then the next save waits
    assert names() == [".step-00000003.partial"]  # no pointer names what is not there
    assert newest_good(CHECKPOINTS.parent) is None
    Path("go").touch()
    assert [outcome.code for outcome in launch.finish()] == [0, 0]
    steps = [f"step-{step:08d}" for step in (3, 6, 9)]
    assert names() == ["best", "latest", *steps]
    for name in steps:
        verify(CHECKPOINTS / name)
    train_run(2, "whole", *FLAGS)
    assert same_tensors(weights("run"), weights("whole"))


def test_checkpoints_are_completed_one_at_a_time():
    (outcome,) = run_ranks(1, _order_of_saves)
    assert outcome.value == [(what, step) for step in (3, 6, 9) for what in ("write", "completed")]


def _order_of_saves():
    """What happens to which checkpoint; the first takes until the next save waits for it."""
    events, write, wait = [], checkpoint.new_partial, checkpoint.CheckpointManager.wait
    waiting = threading.Event()

    def noted_write(folder, step, need):
        events.append(("write", step))
        write(folder, step, need)

    def publish(step, real):
        if step == 3:
            until(lambda: waiting.is_set() or ("write", 6) in events)
        real()
        events.append(("completed", step))

    def noted_wait(manager):
        if manager._saving is not None:
            waiting.set()
        wait(manager)

    checkpoint.new_partial, checkpoint.CheckpointManager.wait = noted_write, noted_wait
    train_with(publish)
    return events


def test_an_error_of_the_thread_ends_all_ranks_when_they_next_synchronise():
    outcomes = run_ranks(2, train_with, publish_on_a_full_disk, await_save, True)
    assert [outcome.code for outcome in outcomes] == [2, 2]
    error = f"{CHECKPOINTS}/.step-00000003.partial: No space left on device"
    assert outcomes[0].err == f"train.py: error: {error}\n" and not any(
        outcome.err for outcome in outcomes[1:]
    )
    # update 4 was the last, not logged
    assert [record["step"] for record in records("run", "train")] == [1, 2, 3]
    assert names() == []


def publish_after_the_error(step, real):
    until(lambda: "a disk with data is gone" in sys.stderr.getvalue())
    real()


def test_a_run_that_fails_reports_its_error_and_then_completes_the_checkpoint():
    def fail(run):
        if run.state.step == 4 and run.ranks.is_main:
            raise OSError("a disk with data is gone")

    outcomes = run_ranks(2, train_with, publish_after_the_error, fail)
    assert [outcome.code for outcome in outcomes] == [2, 2]
    assert outcomes[0].err.count("a disk with data is gone") == 1
    assert names() == ["latest", "step-00000003"]
    verify(CHECKPOINTS / "step-00000003")


def test_a_run_that_is_stopped_waits_for_its_checkpoint():
    launch = start_ranks(2, train_with, publish_after_go)
    until(has_logged(5))
    os.kill(launch.pids[-1], signal.SIGTERM)
    Path("go").touch()
    outcomes = launch.finish()
    codes = {outcome.code for outcome in outcomes}
    last = records("run", "train")[-1]["step"]
    assert codes <= {75, 0} and len(codes) == 1 and last >= 5
    assert (CHECKPOINTS / "latest").read_text() == f"step-{last:08d}\n"
    verify(CHECKPOINTS / f"step-{last:08d}")


def test_a_run_that_is_killed_while_a_checkpoint_is_completed_resumes_from_the_one_before():
    train_run(1, "whole", *FLAGS)
    train_run(1, "run", *FLAGS, "--max_steps", "3")
    launch = start_ranks(1, train_with, publish_after_go, None, False, [*RUN, "--resume", "auto"])
    until(has_logged(9))
    os.kill(launch.pids[0], signal.SIGKILL)
    launch.finish()
    assert [name for name in names() if name.startswith("step")] == ["step-00000003"]
    train_run(1, "run", *FLAGS, "--resume", "auto")
    assert [record["step"] for record in records("run", "start")] == [0, 3, 3]
    assert same_tensors(weights("run"), weights("whole"))
