"""A checkpoint is completed in a thread of the main process while the run goes on, one at a time."""

import errno
import os
import signal
import sys
from pathlib import Path

import pytest
from helpers.ranks import run_ranks, start_ranks
from helpers.training_runs import await_save, records, same_tensors, train_run, weights
from helpers.waiting import has_logged, until

import train
from utils.runs import checkpoint
from utils.runs.manifest import newest_good, verify
from utils.training import saving

FLAGS = ["--model", "mlp", "--global_batch_size", "120", "--threads", "1", "--lr", "0.01", "--max_train_samples", "480"]
FLAGS += ["--lr_schedule", "constant", "--max_steps", "9", "--keep", "9"]
FLAGS += ["--save_every", "3", "--eval_every", "99", "--log_every", "1"]
RUN = ["--run_name", "run", *FLAGS]
CHECKPOINTS = Path("runs/run/checkpoints")


def names():
    return sorted(path.name for path in CHECKPOINTS.iterdir())


def train_with(publish=None, before=None, always_synchronise=False, flags=RUN):
    """Train; `publish(partial, real)` takes the place of the thread's first action, `before(run)` precedes updates."""
    real, update = saving.publish, train.train_update

    def eventful(run, batches):
        if before is not None:
            before(run)
        update(run, batches)

    if publish is not None:
        saving.publish = lambda partial: publish(partial, real)
    if always_synchronise:
        train.Pace.due = lambda pace, step: True
    train.train_update = eventful
    train.main(flags)


def publish_after_go(partial, real):
    until(Path("go").exists)
    real(partial)


def fails_at(*steps):
    """A disk that is full when the checkpoint of one of these updates is completed."""

    def publish(partial, real):
        put = checkpoint._put_in_place
        if step_of(partial) in steps:
            checkpoint._put_in_place = no_space
        try:
            real(partial)
        finally:
            checkpoint._put_in_place = put

    return publish


def no_space(partial, final):
    raise OSError(errno.ENOSPC, "No space left on device", str(partial))


def step_of(partial):
    return int(partial.name.split(".")[1][len("step-") :])


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.full), 2])
def test_the_run_goes_on_while_a_checkpoint_is_completed(processes):
    launch = start_ranks(processes, train_with, publish_after_go)
    until(has_logged(6))  # and then the next save waits
    assert names() == [".step-00000003.partial"]  # no pointer names what is not there
    assert newest_good(CHECKPOINTS) == (None, [])
    Path("go").touch()
    assert [outcome.code for outcome in launch.finish()] == [0] * processes
    steps = [f"step-{step:08d}" for step in (3, 6, 9)]
    assert names() == ["best", "latest", *steps]
    for name in steps:
        verify(CHECKPOINTS / name)
    train_run(processes, "whole", *FLAGS)
    assert same_tensors(weights("run"), weights("whole"))


def test_checkpoints_are_completed_one_at_a_time():
    (outcome,) = run_ranks(1, _order_of_saves)
    expected = [(what, step) for step in (3, 6, 9) for what in ("write", "publish", "published")]
    assert [event for event in outcome.value if event[0] != "wait"] == expected
    assert outcome.value.index(("wait", 6)) < outcome.value.index(("published", 3))


def _order_of_saves():
    """What happens to which checkpoint; the first is completed only after the next save has begun."""
    events, write, finish = [], saving.write_checkpoint, saving.finish_save

    def noted_write(ranks, accelerator, partial, *more):
        events.append(("write", step_of(partial)))
        write(ranks, accelerator, partial, *more)

    def noted_finish(run, *more, **named):
        events.append(("wait", run.state.step))
        finish(run, *more, **named)

    def publish(partial, real):
        events.append(("publish", step_of(partial)))
        until(lambda: ("wait", 6) in events)
        real(partial)
        events.append(("published", step_of(partial)))

    saving.write_checkpoint, saving.finish_save = noted_write, noted_finish
    train_with(publish)
    return events


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.full), 2])
def test_an_error_of_the_thread_ends_all_ranks_when_they_next_synchronise(processes):
    outcomes = run_ranks(processes, train_with, fails_at(3), await_save, True)
    assert [outcome.code for outcome in outcomes] == [2] * processes
    error = f"{CHECKPOINTS}/.step-00000003.partial: No space left on device"
    assert outcomes[0].err == f"train.py: error: {error}\n" and not any(outcome.err for outcome in outcomes[1:])
    assert [record["step"] for record in records("run", "train")] == [1, 2, 3]  # update 4 was the last, not logged
    assert names() == []


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_run_told_to_continue_says_what_the_thread_could_not_save_and_saves_again(processes):
    flags = [*RUN, "--if_save_fails", "continue"]
    outcomes = run_ranks(processes, train_with, fails_at(3, 6), None, False, flags)
    assert [(outcome.code, outcome.err) for outcome in outcomes] == [(0, "")] * processes
    said = [line for line in outcomes[0].out.splitlines() if "could not be saved" in line]
    assert [line.split()[1] for line in said] == ["3", "6"]
    assert names() == ["best", "latest", "step-00000009"]


def test_a_full_disk_that_keeps_log_and_checkpoint_from_being_written_does_not_end_a_run_told_to_continue():
    def fill_the_log_too(run):
        await_save(run)
        if run.state.step == 4:
            run.log.error = OSError(errno.ENOSPC, "No space left on device")

    flags = [*RUN, "--if_save_fails", "continue", "--log_every", "9"]
    (outcome,) = run_ranks(1, train_with, fails_at(3), fill_the_log_too, True, flags)
    assert (outcome.code, outcome.err) == (0, "") and "update 3 could not be saved" in outcome.out
    assert names() == ["best", "latest", "step-00000006", "step-00000009"]


def test_the_last_checkpoint_must_be_completed_even_if_the_run_continues_after_others():
    (outcome,) = run_ranks(1, train_with, fails_at(9), None, False, [*RUN, "--if_save_fails", "continue"])
    assert outcome.code == 2 and "step-00000009.partial: No space left" in outcome.err
    assert names() == ["latest", "step-00000003", "step-00000006"]


def test_the_best_checkpoint_is_the_best_of_those_that_the_thread_could_complete():
    flags = [*RUN, "--if_save_fails", "continue", "--eval_every", "1", "--save_every", "4", "--lr", "0.05"]
    run_ranks(1, train_with, fails_at(*range(5, 9)), None, False, flags)
    accuracy = {f"step-{r['step']:08d}": r["accuracy"] for r in records("run", "eval")}
    there = [name for name in names() if name.startswith("step")]
    assert not {f"step-{step:08d}" for step in range(5, 9)} & set(there) and "step-00000009" in there
    assert (CHECKPOINTS / "best").read_text().strip() == max(there, key=accuracy.get)


def publish_after_the_error(partial, real):
    until(lambda: "a disk with data is gone" in sys.stderr.getvalue())
    real(partial)


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_run_that_fails_reports_its_error_and_then_completes_the_checkpoint(processes):
    def fail(run):
        if run.state.step == 4 and run.ranks.is_main:
            raise OSError("a disk with data is gone")

    outcomes = run_ranks(processes, train_with, publish_after_the_error, fail)
    assert [outcome.code for outcome in outcomes] == [2] * processes
    assert outcomes[0].err.count("a disk with data is gone") == 1
    assert names() == ["latest", "step-00000003"]
    verify(CHECKPOINTS / "step-00000003")


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_run_that_is_stopped_waits_for_its_checkpoint(processes):
    launch = start_ranks(processes, train_with, publish_after_go)
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
