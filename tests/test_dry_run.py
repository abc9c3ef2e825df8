"""--dry_run computes one update and leaves nothing behind."""

from pathlib import Path

import pytest
from helpers.ranks import run_ranks
from helpers.training_runs import train_run

import train

FLAGS = ["--model", "mlp", "--threads", "1", "--run_name", "run", "--max_steps", "3"]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_dry_run_says_what_an_update_needs_and_leaves_no_run(processes):
    for outcome in run_ranks(processes, train.main, [*FLAGS, "--dry_run"]):
        assert outcome.code == 0, outcome.err
        assert outcome.value["memory"] > 10**8 and outcome.value["seconds"] > 0
    assert not list(Path("runs").iterdir())


def test_a_dry_run_of_a_resume_starts_from_its_checkpoint_and_does_not_change_it():
    train_run(1, "run", *FLAGS[:-4], "--max_steps", "2")
    before = {path: path.stat().st_mtime_ns for path in Path("runs").rglob("*") if path.is_file()}
    (outcome,) = run_ranks(1, train.main, [*FLAGS, "--resume", "auto", "--dry_run"])
    assert outcome.code == 0 and "resuming from runs/run/checkpoints/step-00000002" in outcome.out
    assert {path: path.stat().st_mtime_ns for path in Path("runs").rglob("*") if path.is_file()} == before
    assert [path.name for path in Path("runs").iterdir()] == ["run"]


def test_a_batch_that_does_not_fit_is_one_line_with_the_setting_that_helps():
    (outcome,) = run_ranks(1, _out_of_memory, [*FLAGS, "--dry_run"])
    assert outcome.code == 2 and "raise --grad_accum" in outcome.err and outcome.err.count("\n") == 1
    assert not list(Path("runs").iterdir())


def _out_of_memory(flags: list[str]) -> None:
    def update(run, batches):
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

    train.train_update = update
    train.main(flags)
