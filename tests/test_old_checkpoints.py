"""Checkpoints of format 2, whose optimizer state is the `optimizer.bin` of Accelerate, are resumed and evaluated."""

import shutil
from pathlib import Path

import pytest
import torch
from helpers.ranks import returned, run_ranks
from helpers.training_runs import ROOT, make_old, records, refused, rewrite_manifest, train_run, write_format

import eval
import train
from utils.runs.manifest import damage_of, sha256_of

# 4 updates an epoch
FLAGS = ("--model", "mnist_cnn", "--image_size", "12", "--global_batch_size", "120", "--max_train_samples", "480")
FLAGS += ("--threads", "1", "--lr_schedule", "constant", "--lr", "0.001", "--ema_decay", "0.9", "--report", "false")
FLAGS += ("--max_steps", "7", "--save_every", "3", "--eval_every", "99", "--keep", "9")
OLD, NEW = (Path(f"runs/run/checkpoints/step-0000000{step}") for step in (3, 7))
FILES = ("model.safetensors", "ema.safetensors", "optimizer.safetensors")


@pytest.mark.parametrize(
    ("processes", "optimizer"),
    [
        (2, "adamw"),
        pytest.param(1, "muon", marks=pytest.mark.full),
        pytest.param(2, "sgd", marks=pytest.mark.full),
        pytest.param(1, "adafactor", marks=pytest.mark.full),
    ],
)
def test_an_old_run_goes_on_to_the_bits_of_an_uninterrupted_one(processes, optimizer):
    flags = [*FLAGS, "--optimizer", optimizer]
    train_run(processes, "whole", *flags)
    train_run(processes, "run", *flags, "--max_steps", "3")
    make_old(OLD)
    assert damage_of(OLD) is None and not (OLD / FILES[2]).exists()
    train_run(processes, "run", *flags, "--resume", "auto")
    assert [record["step"] for record in records("run", "start")] == [0, 3]
    for file in FILES:
        assert sha256_of(NEW / file) == sha256_of(Path("runs/whole/checkpoints", NEW.name, file)), file
    assert not (NEW / "optimizer.bin").exists()


@pytest.mark.parametrize("processes", [1, 2])
def test_a_checkpoint_that_version_0_1_0_wrote_goes_on(processes):
    """tests/format_2 has update 3 of a run with `--model mlp --model_args '{hidden: 8}' --optimizer adamw`."""
    train_run(processes, "run", "--resume", str(ROOT / "tests/format_2/step-00000003"))
    found = [record["loss"] for record in records("run", "train")]
    assert found == pytest.approx([2.3294075, 2.3164118, 2.2775757], abs=1e-5)  # as in the log of that version


@pytest.fixture
def old():
    """The checkpoint of update 3, in format 2."""
    train_run(1, "run", *FLAGS, "--max_steps", "3")
    expected = returned(1, eval.main, ["--ckpt", str(OLD)])[0]
    make_old(OLD)
    return expected


def test_old_checkpoints_are_evaluated_and_older_ones_refused(old):
    found = returned(1, eval.main, ["--ckpt", str(OLD)])[0]
    assert {**found, "seconds": 0} == {**old, "seconds": 0}
    write_format(OLD, 1)
    for main, flags in ((eval.main, ["--ckpt", str(OLD)]), (train.main, ["--run_name", "run", "--resume", str(OLD)])):
        problem = f"{OLD}/state.json: has format 1, of Lockstep "
        line = refused(main, *flags)
        assert problem in line and line.endswith("this version reads formats 2 to 3; use the version that wrote it")
    assert "config.yaml: has format 1" in refused(train.main, "--config", str(OLD / "config.yaml"))


def test_an_old_optimizer_that_does_not_fit_is_refused_with_what_differs(old):
    path = OLD / "optimizer.bin"
    saved = torch.load(path, weights_only=True)
    first = saved["param_groups"][0]["param_names"][0]
    saved["state"][0]["momentum_buffer"] = torch.zeros(1)
    torch.save(saved, path)
    rewrite_manifest(OLD)
    problem = f"{path}: not this run's optimizer (momentum_buffer: shape [1] in the checkpoint, shape ["
    assert problem in refused(train.main, "--run_name", "run", *FLAGS, "--resume", "auto")
    saved["param_groups"][0]["param_names"] = ["other"]
    torch.save(saved, path)
    rewrite_manifest(OLD)
    line = refused(train.main, "--run_name", "run", *FLAGS, "--resume", "auto")
    assert f"only one of both has {first}" in line


def test_an_optimizer_file_that_the_manifest_does_not_name_is_not_read(old):
    shutil.copytree("runs/run", "runs/other")
    (OLD / "optimizer.safetensors").write_bytes(b"of a stranger")
    (outcome,) = run_ranks(1, train.main, ["--run_name", "run", *FLAGS, "--resume", "auto"])
    assert outcome.code == 0, outcome.err
    train_run(1, "other", *FLAGS, "--resume", "auto")
    assert sha256_of(NEW / FILES[2]) == sha256_of(Path("runs/other/checkpoints", NEW.name, FILES[2]))
