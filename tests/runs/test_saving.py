"""Saving: a checkpoint is completed in a thread while the run goes on, one at a time."""

import errno
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from helpers.ranks import run_ranks, start_ranks
from helpers.training_runs import (
    MLP,
    await_save,
    same_tensors,
    steps,
    train_run,
    weights,
    words,
)
from helpers.waiting import has_logged, until

import train
from utils.runs.manifest import newest_good, verify

FLAGS = [*MLP, *words("--lr_schedule constant --max_steps 9 --keep 9 --save_every 3 --log_every 1")]
RUN = ["--run_name", "run", *FLAGS]
CHECKPOINTS = Path("runs/run/checkpoints")


def names():
    return sorted(path.name for path in CHECKPOINTS.iterdir())


def train_with(at_rename=None, before=None, flags=RUN):
    """Train; `at_rename(step)` is called before a finished folder becomes a checkpoint, and
    `before(run)` before each update.
    """
    rename, update = os.rename, train.train_update

    def watched(source, target):
        if at_rename and (step := re.search(r"step-(\d+)\.partial$", str(source))):
            at_rename(int(step[1]))
        rename(source, target)

    def eventful(run, batches):
        if before is not None:
            before(run)
        update(run, batches)

    os.rename, train.train_update = watched, eventful
    train.main(flags)


def await_go(step):
    until(Path("go").exists)


def fill_disk(step):
    raise OSError(
        errno.ENOSPC, "No space left on device", f"{CHECKPOINTS}/.step-{step:08d}.partial"
    )


@pytest.mark.full
def test_the_run_goes_on_while_a_checkpoint_is_completed():
    launch = start_ranks(2, train_with, await_go)
    until(has_logged(6))
    time.sleep(0.3)  # the next save would begin meanwhile, but waits
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


@pytest.mark.full
def test_an_error_of_the_thread_ends_all_ranks_when_they_next_synchronise():
    outcomes = run_ranks(2, train_with, fill_disk, await_save)
    assert [outcome.code for outcome in outcomes] == [2, 2]
    error = f"train.py: error: {CHECKPOINTS}/.step-00000003.partial: No space left on device\n"
    assert [outcome.err for outcome in outcomes] == [error, ""]
    # update 4 was the last, not logged
    assert steps("run", "train") == [1, 2, 3]
    assert names() == []


def await_error(step):
    until(lambda: "a disk with data is gone" in sys.stderr.getvalue())


@pytest.mark.full
def test_a_run_that_fails_reports_its_error_and_then_completes_the_checkpoint():
    def fail(run):
        if run.state.step == 4 and run.ranks.is_main:
            raise OSError("a disk with data is gone")

    outcomes = run_ranks(2, train_with, await_error, fail)
    assert [outcome.code for outcome in outcomes] == [2, 2]
    assert outcomes[0].err.count("a disk with data is gone") == 1
    assert names() == ["latest", "step-00000003"]
    verify(CHECKPOINTS / "step-00000003")


@pytest.mark.full
def test_a_run_killed_while_a_checkpoint_is_completed_resumes_from_the_last():
    train_run(1, "whole", *FLAGS)
    train_run(1, "run", *FLAGS, "--max_steps", "3")
    launch = start_ranks(1, train_with, await_go, None, [*RUN, "--resume", "auto"])
    until(has_logged(9))
    os.kill(launch.pids[0], signal.SIGKILL)
    launch.finish()
    assert [name for name in names() if name.startswith("step")] == ["step-00000003"]
    train_run(1, "run", *FLAGS, "--resume", "auto")
    assert steps("run", "start") == [0, 3, 3]
    assert same_tensors(weights("run"), weights("whole"))
