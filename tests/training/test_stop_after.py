"""--stop_after: a run stops, and goes on to the bits of an uninterrupted one."""

from pathlib import Path

import pytest
from helpers.ranks import run_ranks
from helpers.training_runs import (
    MLP,
    full,
    records,
    refused,
    same_tensors,
    steps,
    train_run,
    weights,
    words,
)

import train
from utils.files import read_json

FLAGS = [*MLP, *words("--max_steps 12 --eval_every 5 --save_every 4 --ema_decay 0.5")]
TIMES = {"seconds", "images_per_second", "data_wait", "count", "time"}


def log_of(name: str, *kinds: str) -> list[dict]:
    """The records of these kinds, without their times."""
    found = [record for record in records(name) if record["kind"] in kinds]
    return [{k: v for k, v in record.items() if k not in TIMES} for record in found]


@pytest.mark.parametrize(
    "processes, stops", [(1, [7]), full(2, [1, 5, 7]), full(1, [4, 5, 8, 11, 12])]
)
def test_a_run_that_stops_ends_with_the_bits_and_the_log_of_an_uninterrupted_one(processes, stops):
    flags = [*FLAGS, "--early_stopping", "9"]
    train_run(processes, "whole", *flags)
    for stop in stops:
        train_run(processes, "run", *flags, "--resume", "auto", "--stop_after", str(stop))
        ended = read_json(Path("runs/run/status.json"))
        is_last = stop == 12
        assert (ended["state"], ended["exit_code"]) == (("stopped", "complete")[is_last], 0)
        assert ended["update"] == stop
    train_run(processes, "run", *flags, "--resume", "auto")
    for file in ("model.safetensors", "ema.safetensors", "optimizer.bin"):
        assert same_tensors(weights("run", file=file), weights("whole", file=file))
    assert log_of("run", "train", "eval", "end") == log_of("whole", "train", "eval", "end")
    assert (
        Path("runs/run/checkpoints/best").read_text()
        == Path("runs/whole/checkpoints/best").read_text()
    )
    # an evaluation that is due there anyway is not repeated
    expected = [stop for stop in stops if stop % 5 and stop < 12]
    assert steps("run", "rung") == [stop for stop in expected for _weights in ("raw", "ema")]


def test_the_evaluation_at_the_stop_is_that_of_the_weights_and_counts_for_nothing():
    flags = [*FLAGS, "--lr", "1e-4"]
    train_run(1, "run", *flags, "--stop_after", "3")
    raw, average = records("run", "rung")
    assert (raw["weights"], average["weights"]) == ("raw", "ema") and raw["step"] == 3
    assert not Path("runs/run/checkpoints/best").exists() and not steps("run", "eval")
    train_run(1, "short", *flags, "--lr_schedule", "constant", "--stop_after", "3")
    train_run(1, "ended", *flags, "--lr_schedule", "constant", "--max_steps", "3")
    found = [
        log_of(name, kind)[-1]["loss"] for name, kind in (("short", "rung"), ("ended", "eval"))
    ]
    assert found[0] == found[1]


def test_the_line_at_the_end_has_the_command_without_the_stop():
    (outcome,) = run_ranks(1, train.main, [*FLAGS, "--run_name", "run", "--stop_after", "3"])
    assert outcome.code == 0 and "Stopped after update 3 of 12 (--stop_after 3)" in outcome.out
    (line,) = (line for line in outcome.out.splitlines() if line.startswith("resume with: "))
    assert "stop_after" not in line and line.endswith("--run_name run --resume auto")


def test_a_stop_that_is_asked_for_again_has_one_record():
    for _ in range(2):
        train_run(1, "run", *FLAGS, "--stop_after", "3", "--resume", "auto")
    assert steps("run", "rung") == [3, 3]  # raw and ema


@pytest.mark.parametrize("stop, step", [("13", 0), ("5", 8)])
def test_a_stop_that_is_not_ahead_is_one_line(stop, step):
    if step:
        train_run(1, "run", *FLAGS, "--stop_after", str(step))
    flags = [*FLAGS, *words(f"--run_name run --resume auto --stop_after {stop}")]
    said = refused(train.main, *flags)
    assert f"--stop_after {stop} is not from {step}, where the run is, to 12, its last" in said
