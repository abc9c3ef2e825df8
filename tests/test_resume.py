"""What a resume derives anew, and when checkpoints are due."""

import time
from itertools import pairwise
from pathlib import Path

import pytest
from ranks import run_ranks
from training_runs import records, train_run

import train
from utils.config import TrainConfig
from utils.state import TrainState, due_after

FLAGS = ["--model", "mlp", "--max_train_samples", "480", "--threads", "1", "--lr", "0.01", "--run_name", "run"]
FLAGS += ["--lr_schedule", "constant"]


def batch_of(record):
    return tuple(record[name] for name in ("processes", "batch_size", "grad_accum", "global_batch_size"))


@pytest.mark.parametrize(
    ("flags", "starts"),
    [
        # as many samples at once as before, or fewer; the same global batch
        ((), [(2, 64, 1, 128), (1, 64, 2, 128), (2, 64, 1, 128)]),
        (("--batch_size", "60"), [(2, 60, 1, 120), (1, 60, 2, 120), (3, 40, 1, 120), (2, 60, 1, 120)]),
        (("--batch_size", "30", "--grad_accum", "2"), [(2, 30, 2, 120), (1, 30, 4, 120), (4, 30, 1, 120)]),
        (("--global_batch_size", "120"), [(1, 120, 1, 120), (3, 40, 1, 120), (2, 60, 1, 120), (1, 120, 1, 120)]),
        # asked for, so it is given
        (("--global_batch_size", "120", "--grad_accum", "1"), [(2, 60, 1, 120), (1, 120, 1, 120)]),
    ],
)
def test_the_same_command_on_another_number_of_processes_keeps_the_global_batch(flags, starts):
    for step, (processes, *_) in enumerate(starts, 1):
        train_run(processes, "run", *FLAGS, *flags, "--resume", "auto", "--max_steps", str(step))
    assert [batch_of(record) for record in records("run", "start")] == starts


def test_a_number_of_processes_that_cannot_keep_it_is_refused_with_those_that_can():
    train_run(2, "run", *FLAGS, "--max_steps", "2")
    outcomes = run_ranks(3, train.main, [*FLAGS, "--resume", "auto", "--max_steps", "3"])
    assert [outcome.code for outcome in outcomes] == [2, 2, 2]
    assert "the global batch of 128 does not divide by 3 processes; go on with 1 or 2 or 4 processes" in outcomes[0].err
    assert outcomes[0].err.count("\n") == 1


def test_another_global_batch_is_refused():
    train_run(2, "run", *FLAGS, "--max_steps", "2")
    (outcome,) = run_ranks(1, train.main, [*FLAGS, "--resume", "auto", "--max_steps", "3", "--global_batch_size", "60"])
    assert outcome.code == 2 and "was trained with a global batch size of 128, not 60" in outcome.err


def test_a_smaller_batch_size_accumulates_to_the_same_global_batch():
    """What one does when memory was short."""
    train_run(1, "run", *FLAGS, "--max_steps", "2")
    train_run(1, "run", *FLAGS, "--max_steps", "3", "--resume", "auto", "--batch_size", "32")
    assert [batch_of(record) for record in records("run", "start")] == [(1, 128, 1, 128), (1, 32, 4, 128)]


def test_what_is_due_after_an_update():
    def due(step, position, **settings):
        return tuple(due_after(TrainConfig(**settings), TrainState(step=step, position=position), updates=100))

    assert due(7, 128) == (False, False, False)
    assert due(50, 128) == (True, False, False)  # --log_every 50
    assert due(13, 0) == (False, True, True)  # an epoch ends
    assert due(13, 0, save_every=5, eval_every=6) == (False, False, False)
    assert due(30, 128, save_every=5, eval_every=6) == (False, True, True)
    assert due(13, 0, save_seconds=60) == (False, True, False)  # by time instead of by epoch
    assert due(30, 128, save_seconds=60, save_every=5) == (False, False, True)
    assert due(100, 128, save_seconds=60) == (True, True, True)


@pytest.mark.parametrize("processes", [1, 2])
def test_save_seconds_saves_by_wall_time(processes):
    flags = ["--save_seconds", "1.5", "--eval_every", "999", "--keep", "99", "--max_steps", "50"]
    run_ranks(processes, _train_at_ten_updates_a_second, [*FLAGS, *flags])
    times = sorted(path.stat().st_mtime for path in Path("runs/run/checkpoints").glob("step-*/manifest.json"))
    assert 3 <= len(times) <= 5
    assert all(1.4 < later - earlier < 3 for earlier, later in pairwise(times[:-1]))


def _train_at_ten_updates_a_second(flags):
    update = train.train_update

    def slow(run, batches):
        time.sleep(0.1)
        update(run, batches)

    train.train_update = slow
    train.main(flags)
