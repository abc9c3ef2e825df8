"""--resume: what it derives anew, and when checkpoints are due."""

import os
import shutil
import signal
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.ranks import returned, run_ranks
from helpers.training_runs import (
    codes,
    full,
    kill_myself,
    records,
    refused,
    same_tensors,
    steps,
    train_run,
    train_watched,
    weights,
    words,
)

import eval
import train
import utils.training.meter
from utils.data.datasets import ArrayDataset
from utils.runs.state import TrainState
from utils.settings.train import TrainConfig, read_config
from utils.training.schedule import due_after

MLP = words("--model mlp --max_train_samples 480 --threads 1 --lr 0.01")
FLAGS = [*MLP, *words("--run_name run --lr_schedule constant")]
AUTO = [*FLAGS, "--resume", "auto"]


def batch_of(record):
    return tuple(
        record[name] for name in words("processes batch_size grad_accum global_batch_size")
    )


def last_batch(run="run"):
    return batch_of(records(run, "start")[-1])


@pytest.mark.parametrize(
    "flags, starts",
    [
        # as many samples at once as before, or fewer; the same global batch
        ("--batch_size 60", [(2, 60, 1, 120), (1, 60, 2, 120), (3, 40, 1, 120), (2, 60, 1, 120)]),
        # asked for, so it is given
        full("--global_batch_size 120 --grad_accum 1", [(2, 60, 1, 120), (1, 120, 1, 120)]),
    ],
)
def test_the_same_command_on_another_number_of_processes_keeps_the_global_batch(flags, starts):
    for step, (processes, *_) in enumerate(starts, 1):
        train_run(processes, "run", *AUTO, *words(flags), "--max_steps", str(step))
    assert [batch_of(record) for record in records("run", "start")] == starts


@pytest.mark.full
def test_processes_that_cannot_keep_it_are_refused_before_data_is_loaded():
    def without_data(flags):
        np.loadtxt = None  # a call of it would be another error
        train.main(flags)

    train_run(2, "run", *FLAGS, "--max_steps", "1")
    line = refused(without_data, *AUTO, "--max_steps", "2", processes=3)
    assert "its global batch of 64 is not divisible by 3 processes; resume with 1, 2 or 4" in line


def test_what_is_due_after_an_update():
    def due(step, position, **settings):
        config = TrainConfig(log_every=50, **settings)
        return tuple(due_after(config, TrainState(step=step, position=position), updates=100))

    assert due(7, 128) == (False, False, False)
    assert due(50, 128) == (True, False, False)  # --log_every 50
    assert due(13, 0) == (False, True, True)  # an epoch ends
    assert due(13, 0, save_every=5, eval_every=6) == (False, False, False)
    assert due(30, 128, save_every=5, eval_every=6) == (False, True, True)
    assert due(13, 0, save_seconds=60) == (False, True, False)  # by time instead of by epoch
    assert due(30, 128, save_seconds=60, save_every=5) == (False, False, True)
    assert due(100, 128, save_seconds=60) == (True, True, True)


@pytest.mark.full
def test_save_seconds_saves_by_wall_time():
    flags = words("--save_seconds 1.5 --eval_every 999 --keep 99 --max_steps 50")
    returned(2, _train_at_ten_updates_a_second, [*FLAGS, *flags])
    steps = sorted(int(path.name[5:]) for path in Path("runs/run/checkpoints").glob("step-*"))
    assert steps[-1] == 50 and len(steps) >= 3  # in five seconds, the last at the end
    # not before 1.5 seconds, and about a second later at most, as the ranks look at the clock once
    # a second
    assert all(15 <= later - earlier <= 27 for earlier, later in pairwise([0, *steps[:-1]]))


def _train_at_ten_updates_a_second(flags):
    """Train by a simulated clock, as an update may take any time on a busy machine."""
    clock = [0.0]

    def tick(run):
        clock[0] += 0.1

    utils.training.meter.time = SimpleNamespace(perf_counter=lambda: clock[0])
    train_watched(flags, tick)


def test_a_resume_reads_no_sample_to_skip_it():
    flags = [*AUTO, *words("--global_batch_size 10 --max_steps")]
    train_run(1, "run", *flags, "40")
    assert returned(1, _samples_read, [*flags, "41"]) == [10]


def _samples_read(flags):
    read, get = [], ArrayDataset.__getitems__

    def watched(dataset, microbatch):
        if len(dataset) == 480:  # the training split
            read.extend(microbatch.indices)
        return get(dataset, microbatch)

    ArrayDataset.__getitems__ = watched
    train.main(flags)
    return len(read)


@pytest.mark.full
def test_the_run_folder_and_its_checkpoints_can_be_named_to_go_on_in_place():
    train_run(1, "run", *FLAGS, "--max_steps", "2", "--save_every", "1")
    for number, path in enumerate(("", "/checkpoints/step-00000003", "/checkpoints"), 3):
        train_run(1, "run", *FLAGS, "--max_steps", str(number), "--resume", f"runs/run{path}")
    assert steps("run", "start") == [0, 2, 3, 4]


@pytest.mark.full
def test_a_resumed_run_keeps_its_data_and_settings_unless_others_are_given(
    monkeypatch,
):
    flags = "--data synthetic/3x28x480 --eval_fraction 0.2 --mixed_precision bf16 --max_steps 2"
    more = words("--label_smoothing 0.1 --report_to tensorboard")
    train_run(1, "run", *FLAGS, *words(flags), *more)
    old = read_config(Path("runs/run/config.yaml"))
    # no manifest has its checksum, so nothing is read from it
    Path("runs/run/config.yaml").write_text("")
    monkeypatch.setenv("SCRATCH", str(Path.cwd()))
    flags = "--resume $SCRATCH/runs/run --label_smoothing 0 --max_steps 3"
    train_run(1, "new", *words(flags))
    train_run(1, "new", "--resume", "auto", "--epochs", "1")  # which --max_steps would override
    new = read_config(Path("runs/new/config.yaml"))
    changed = {"epochs": 1, "max_steps": None, "grad_accum": 1, "report_to": None}
    assert new == replace(old, label_smoothing=0.0, **changed)
    assert steps("new", "start") == [2, 3]
    assert records("new", "train")[-1]["step"] == 12


@pytest.mark.full
def test_a_run_killed_before_its_first_checkpoint_continues_with_its_own_settings():
    flags = words("--momentum 0.5 --batch_size 30 --grad_accum 2 --max_steps 5 --seed 3")
    flags += [*MLP, "--report=false"]
    train_run(2, "whole", *flags)
    outcomes = run_ranks(2, _train_until_killed, flags)
    assert codes(outcomes) == [-signal.SIGKILL] * 2
    assert not list(Path("runs/run/checkpoints").iterdir())
    (main, _) = run_ranks(2, train.main, words("--run_name run --resume auto --threads 1"))
    assert main.code == 0 and "no checkpoint; starting from the beginning, with" in main.out
    assert read_config(Path("runs/run/config.yaml")) == read_config(Path("runs/whole/config.yaml"))
    assert last_batch() == (2, 30, 2, 120) and same_tensors(weights("run"), weights("whole"))
    shutil.rmtree("runs/run/checkpoints")
    # given: used
    train_run(1, "run", *words("--batch_size 60 --seed 4 --max_steps 2 --resume auto"))
    assert last_batch() == (1, 60, 2, 120)
    assert read_config(Path("runs/run/config.yaml")).seed == 4


@pytest.mark.full
def test_a_run_without_a_checkpoint_starts_again_from_that_of_another_run():
    train_run(1, "other", *MLP, "--max_steps", "2")
    flags = words("--run_name run --threads 1")
    first = words("--resume runs/other --max_steps 4 --momentum 0.5 --save_every 9 --threads 1")
    train_run(1, "whole", *first)
    (outcome,) = run_ranks(1, _train_until_killed, [*flags, *first], 3)
    assert outcome.code == -signal.SIGKILL and not list(Path("runs/run/checkpoints").iterdir())
    # a newer one, which is not used
    train_run(1, "other", *words("--resume auto --max_steps 3 --keep 9"))
    (outcome,) = run_ranks(1, train.main, [*flags, "--resume", "auto"])
    assert outcome.code == 0 and "step-00000002, with the settings of its" in outcome.out
    assert steps("run", "start") == [2, 2]
    assert same_tensors(weights("run"), weights("whole"))

    shutil.rmtree("runs/run/checkpoints")
    shutil.rmtree("runs/other")
    line = refused(train.main, *flags, "--resume", "auto")
    assert f"{Path.cwd()}/runs/other/checkpoints/step-00000002" in line
    assert "start a new run with another --run_name" in line


@pytest.mark.parametrize("text", ["", "lr: ["])
def test_damaged_settings_of_a_run_without_checkpoints_name_a_way_on(text):
    Path("runs/run").mkdir(parents=True)
    Path("runs/run/config.yaml").write_text(text)
    line = refused(train.main, *AUTO)
    assert "runs/run/config.yaml: " in line and "; start a new run with another --run_name" in line


def _train_until_killed(flags, step=2):
    train_watched(flags, after=lambda run: run.state.step == step and kill_myself())


@pytest.mark.full
def test_given_settings_are_checked_with_those_of_the_checkpoint():
    train_run(1, "run", *FLAGS, "--eval_fraction", "0.2", "--max_steps", "2")
    for flags, text in (
        (
            ("--lr_schedule_args", "{end: 1}"),
            "for constant: got an unexpected keyword argument 'end'",
        ),
        (("--data_dir", "/tmp"), "--data_dir is for --data torchvision/NAME only"),
        (("--eval_split", "test"), "--eval_split and --eval_fraction cannot be used together"),
    ):
        assert text in refused(train.main, "--resume", "runs/run", *flags)


@pytest.mark.full
def test_a_refused_resume_into_a_new_folder_can_be_typed_again():
    train_run(1, "run", *FLAGS, "--max_steps", "2")
    flags = words("--resume runs/run --run_name new --max_steps 3")
    (refused,) = run_ranks(1, train.main, [*FLAGS, *flags, "--optimizer", "adamw"])
    assert refused.code == 2 and not Path("runs/new").exists()
    train_run(1, "new", *FLAGS, *flags)


@pytest.mark.full
def test_batch_flags_that_cannot_be_kept_are_said_aloud():
    train_run(1, "run", *FLAGS, "--global_batch_size", "240", "--max_steps", "1")
    for step, (flags, batch, said) in enumerate([
        ("--grad_accum 4", (1, 60, 4, 240), False),
        ("--batch_size 60", (1, 60, 4, 240), False),  # what one does when memory was short
        ("--batch_size 100", (1, 80, 3, 240), True),
        ("--batch_size 50 --grad_accum 7", (1, 48, 5, 240), True),
    ], 2):  # fmt: skip
        (outcome,) = run_ranks(1, train.main, [*AUTO, *words(flags), "--max_steps", str(step)])
        assert outcome.code == 0 and last_batch() == batch, outcome.err
        assert ("does not give the run's global batch; using" in outcome.out) == said
    # the saved settings start a run
    train_run(1, "other", *words("--config runs/run/config.yaml --threads 1 --max_steps 1"))
    assert last_batch("other") == last_batch()


@pytest.mark.full
def test_machines_that_do_not_share_the_run_folder_are_refused():
    outcomes = run_ranks(2, _train_in_a_folder_of_its_own, [*FLAGS, "--max_steps", "2"])
    assert codes(outcomes) == [2, 2]
    assert "is not the folder that rank 0 has created; choose an --output_dir" in outcomes[0].err


def _train_in_a_folder_of_its_own(flags):
    folder = Path(f"machine-{os.environ['RANK']}")
    folder.mkdir()
    os.chdir(folder)
    train.main(flags)


@pytest.mark.full
def test_eval_takes_the_checkpoint_that_rank_0_sees():
    """Training may move `best` between the looks of two ranks."""
    train_run(1, "run", *FLAGS, "--max_steps", "8", "--save_every", "4", "--keep", "9")
    results = returned(2, _evaluate_while_best_moves)
    assert results[0]["step"] == results[1]["step"] == 8
    alone = returned(1, eval.main, ["--ckpt", "runs/run/checkpoints/step-00000008"])[0]
    assert results[0]["loss"] == pytest.approx(alone["loss"], rel=1e-6)


def _evaluate_while_best_moves():
    seen = "step-00000008" if os.environ["RANK"] == "0" else "step-00000004"
    eval.find_checkpoint = lambda path: Path("runs/run/checkpoints") / seen
    return eval.main(["--ckpt", "runs/run"])
