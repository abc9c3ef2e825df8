"""Checkpoints are whole and verified before anything changes; runs go on from them exactly."""

import json
import os
import shutil
import stat
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator, load_checkpoint_and_dispatch
from helpers.ranks import returned, run_ranks
from helpers.training_runs import (
    codes,
    full,
    make_saver,
    records,
    refused,
    rewrite_manifest,
    same_tensors,
    steps,
    train_run,
    weights,
    words,
)
from safetensors.torch import load_file, save_file

import eval
import train
from utils import version
from utils.data.spec import InputSpec
from utils.models.small import MnistCNN
from utils.models.zoo import OWN_MODELS
from utils.runs.loading import load_scale
from utils.runs.manifest import find_checkpoint
from utils.runs.state import TrainState
from utils.settings.train import read_config
from utils.version import VERSION

# 4 updates an epoch
FLAGS = words(
    "--model mnist_cnn --image_size 12 --crop_padding 1 --global_batch_size 120 --epochs 3"
)
FLAGS += words("--max_train_samples 480 --threads 1 --lr 0.02 --report false")


def names(run="run"):
    return sorted(path.name for path in Path(f"runs/{run}/checkpoints").iterdir())


def states_of(run):
    paths = Path(f"runs/{run}/checkpoints").glob("step-*/state.json")
    return [json.loads(path.read_text())["state"] for path in sorted(paths)]


@pytest.mark.full
def test_a_checkpoint_holds_all_that_evaluation_on_another_machine_needs(tmp_path):
    before = os.umask(0o027)
    try:
        train_run(2, "run", *FLAGS)
    finally:
        os.umask(before)
    checkpoint = find_checkpoint(Path("runs/run"))
    assert {path.name for path in checkpoint.iterdir()} == {
        "model.safetensors", "optimizer.bin",
        "state.json", "config.yaml", "samples.parquet", "manifest.json",
    }  # fmt: skip
    # as the umask says
    assert {stat.S_IMODE(path.stat().st_mode) for path in checkpoint.iterdir()} == {0o640}
    saved = read_config(checkpoint / "config.yaml")
    assert (saved.crop_padding, saved.task, saved.best_metric) == (1, "classification", "accuracy")
    model, file = MnistCNN(InputSpec(12, 12, 1, [0.5], [0.5]), 10), checkpoint / "model.safetensors"
    load_checkpoint_and_dispatch(model, str(file))
    assert same_tensors(dict(model.state_dict()), load_file(file))
    state = json.loads((checkpoint / "state.json").read_text())
    assert state["class_names"] == [str(i) for i in range(10)]
    versions = state["versions"]
    assert versions == records("run", "start")[0]["versions"]
    assert versions["lockstep"] == VERSION and versions["torch"] == torch.__version__
    there = returned(1, eval.main, ["--ckpt", "runs/run"])[0]
    shutil.move(checkpoint, tmp_path / "elsewhere")
    shutil.rmtree("runs")
    moved = returned(1, eval.main, ["--ckpt", str(tmp_path / "elsewhere")])[0]
    assert (moved["loss"], moved["accuracy"]) == (there["loss"], there["accuracy"])


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_that_of_the_code_and_a_changed_file_makes_it_dirty(tmp_path, monkeypatch):
    def git(*words):
        author = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        command = ["git", "-C", str(tmp_path), *author, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    monkeypatch.setattr(version, "_ROOT", tmp_path.resolve())
    commit = version.code_commit.__wrapped__  # without its cache
    assert commit() == ""
    git("init", "-q")
    (tmp_path / "code.py").write_text("one")
    git("add", "code.py")
    git("commit", "-qm", "one")
    assert commit() == git("rev-parse", "HEAD")
    (tmp_path / "code.py").write_text("another")
    assert commit() == git("rev-parse", "HEAD") + "-dirty"


@pytest.mark.full
def test_only_the_newest_checkpoints_and_the_best_are_kept():
    train_run(2, "run", *FLAGS, *words("--save_every 1 --eval_every 4 --keep 2"))
    best = Path("runs/run/checkpoints/best").read_text().strip()
    evals = records("run", "eval")
    assert best == f"step-{max(evals, key=lambda e: e['accuracy'])['step']:08d}"
    assert names() == sorted({"best", "latest", "step-00000011", "step-00000012", best})
    assert Path("runs/run/checkpoints/latest").read_text() == "step-00000012\n"


@pytest.mark.full
@pytest.mark.parametrize("processes", [2, full(3)])
def test_a_run_that_stops_in_the_middle_of_an_epoch_and_resumes_ends_bit_identical(processes):
    flags = (*FLAGS, "--lr_schedule", "constant")  # the others end at --max_steps
    train_run(processes, "whole", *flags)
    for stop in ("5", "7", "12"):
        train_run(processes, "run", *flags, "--resume", "auto", "--max_steps", stop)
    assert steps("run", "start") == [0, 5, 7]
    assert same_tensors(weights("run"), weights("whole"))


@pytest.mark.full
def test_a_run_that_is_past_its_end_says_so_and_ends_well():
    train_run(1, "run", *FLAGS, "--max_steps", "6")
    outcomes = run_ranks(2, train.main, [*RUN, "--max_steps", "4"])
    assert codes(outcomes) == [0, 0], outcomes[0].err
    assert "--max_steps 4 after update 6 of 4; raise it to continue" in outcomes[0].out


@pytest.mark.full
def test_going_back_to_an_older_checkpoint_forgets_the_later_ones():
    train_run(1, "run", *FLAGS, *words("--save_every 1 --keep all --eval_every 12"))
    assert len(names()) == 14  # and two pointers
    assert Path("runs/run/checkpoints/best").read_text() == "step-00000012\n"
    flags = words("--resume runs/run/checkpoints/step-00000005 --save_every 1 --keep 2")
    train_run(1, "run", *FLAGS, *flags, *words("--max_steps 7 --eval_every 12"))
    assert names()[-1] == "step-00000007"
    assert Path("runs/run/checkpoints/latest").read_text() == "step-00000007\n"
    assert Path("runs/run/checkpoints/best").read_text() == "step-00000007\n"
    assert steps("run", "start") == [0, 5]


def test_the_state_has_the_finite_numbers_of_the_last_evaluation():
    state = TrainState(step=7, batch_size=1)
    result = {"loss": float("inf"), "accuracy": 0.5, "per_class": [1.0], "split": "test"}
    state.add_evaluation(result, "accuracy", True)
    found = TrainState.from_dict(json.loads(json.dumps(asdict(state))))
    assert found == state and found.evaluation == {"step": 7, "loss": None, "accuracy": 0.5}


@pytest.mark.full
def test_after_a_resume_the_optimizer_has_the_settings_of_the_flags():
    train_run(1, "run", *FLAGS, "--max_steps", "2")
    first, second = run_ranks(2, train.main, [*RUN, *words("--max_steps 3 --momentum 0.5")])
    assert first.code == 0, first.err
    saved = torch.load("runs/run/checkpoints/step-00000003/optimizer.bin", weights_only=True)
    assert {group["momentum"] for group in saved["param_groups"]} == {0.5}
    assert "momentum was 0.9 in the checkpoint, now 0.5" in first.out and second.out == ""
    assert "processes was 1 in the checkpoint, now 2" in first.out and "lr was" not in first.out


@pytest.mark.full
def test_a_resume_with_another_optimizer_model_or_data_is_refused_by_name():
    train_run(1, "run", *FLAGS, "--max_steps", "2")
    for flags, text in (
        ("--optimizer adamw", "was trained with --optimizer sgd, not adamw"),
        # other updates would end an epoch
        ("--drop_last", "was trained with --drop_last False, not True"),
        ("--max_train_samples 400", "was trained with training samples 480, not 400"),
        ("--data synthetic/10x12x480", "split 'train' had 1797 samples and now has 480"),
    ):
        assert text in refused(train.main, *RUN, *words(flags))


@pytest.mark.full
def test_a_checkpoint_of_another_run_starts_a_run_of_its_own():
    train_run(1, "old", *FLAGS, "--max_steps", "4")
    before = names("old")
    more = "--max_steps 6 --eval_every 99 --keep 9 --resume runs/old"
    train_run(1, "new", *FLAGS, *words(more))
    assert names("old") == before
    assert steps("new", "start") == [4]
    assert Path("runs/new/checkpoints/best").read_text() == "step-00000006\n"
    train_run(1, "new", *FLAGS, *words("--max_steps 8 --resume auto"))
    ids = {name: {state["run_id"] for state in states_of(name)} for name in ("old", "new")}
    assert len(ids["old"]) == len(ids["new"]) == 1 and ids["old"] != ids["new"]


@pytest.mark.full
def test_precision_from_the_environment_is_kept_for_evaluation(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    log = train_run(1, "run", *FLAGS, "--max_steps", "4")
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    for flags, same in (((), True), (("--mixed_precision", "no"), False)):
        (found,) = returned(1, eval.main, ["--ckpt", "runs/run", *flags])
        assert (abs(found["loss"] - log[-1]["loss"]) < 1e-7) == same


# What a checkpoint holds besides the weights: any optimizer's state, the average, the loss scale.

SHORT = [*FLAGS, *words("--lr_schedule constant --max_steps 7")]
RUN = [*SHORT, *words("--run_name run --resume auto")]
EMA = ("--ema_decay", "0.5")
CHECKPOINT = Path("runs/run/checkpoints/step-00000004")


@pytest.mark.full
def test_an_optimizer_with_statistics_of_rows_resumes_bit_identically():
    flags = [*SHORT, *words("--optimizer adafactor --resume auto")]
    for name, stop in (("whole", "7"), ("run", "3"), ("run", "7")):
        train_run(2, name, *flags, "--max_steps", stop)
    for file in ("optimizer.bin", "model.safetensors"):
        assert same_tensors(weights("run", file=file), weights("whole", file=file))


class Tied(torch.nn.Module):
    """A network whose two hidden layers share a weight, and whose biases, which are not tied, share
    memory.
    """

    def __init__(self, spec, classes: int):
        super().__init__()
        self.stem = torch.nn.Linear(spec.height * spec.width, 16)
        self.first, self.second = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
        self.head, self.second.weight = torch.nn.Linear(16, classes), self.first.weight
        biases = torch.zeros(32).chunk(2)
        self.first.bias, self.second.bias = map(torch.nn.Parameter, biases)

    def forward(self, images):
        return self.head(self.second(self.first(self.stem(images.flatten(1)).relu()).relu()))


def with_tied(main, flags):
    OWN_MODELS["tied"] = Tied
    return main(flags)


@pytest.mark.full
def test_tied_weights_are_saved_once_and_resume_bit_identically():
    flags = [*SHORT, "--model", "tied", *EMA, "--eval_every", "7", "--resume", "auto"]
    for name, stop in (("whole", "7"), ("run", "4"), ("run", "7")):
        more = ["--run_name", name, "--max_steps", stop]
        for outcome in run_ranks(2, with_tied, train.main, [*flags, *more]):
            assert outcome.code == 0 and "shared tensor" not in outcome.out + outcome.err
    expected = Tied(InputSpec(12, 12, 1, [0.5], [0.5]), 10).state_dict().keys() - {"second.weight"}
    for file in ("model.safetensors", "ema.safetensors"):
        assert weights("run", file=file).keys() == expected
        assert same_tensors(weights("run", file=file), weights("whole", file=file))
    (found,) = returned(1, with_tied, eval.main, ["--ckpt", "runs/run"])
    assert found["loss"] == pytest.approx(records("whole", "eval")[-1]["loss"], rel=1e-6)


@pytest.mark.full
def test_an_optimizer_file_that_does_not_fit_is_refused_with_what_differs():
    train_run(1, "run", *SHORT, "--max_steps", "4", "--optimizer", "adamw")
    path, flags = CHECKPOINT / "optimizer.bin", [*RUN, "--optimizer", "adamw"]
    saved = torch.load(path, weights_only=True)
    state = dict(saved["state"][0])
    for name, here in (("exp_avg", "shape [32, 1, 3, 3]"), ("max_exp_avg_sq", "nothing")):
        saved["state"][0] = state | {name: torch.zeros(1)}
        torch.save(saved, path)
        rewrite_manifest(CHECKPOINT)
        problem = f"{path}: not this run's optimizer ({name}: shape [1] in the checkpoint, {here}"
        assert problem in refused(train.main, *flags)


@pytest.mark.full
def test_an_average_that_does_not_fit_or_has_a_nan_is_one_line_and_changes_nothing():
    train_run(1, "run", *SHORT, *EMA, "--max_steps", "4")
    path, log = CHECKPOINT / "ema.safetensors", Path("runs/run/log.jsonl")
    tensors, logged = load_file(path), log.read_bytes()
    first = next(iter(tensors))
    for change, text in (
        ({first: torch.zeros(2)}, f"{first}: shape [2] in the checkpoint"),
        ({"other": torch.zeros(2)}, "other"),
        ({first: tensors[first] * torch.nan}, f"NaN or infinite ({first}"),
    ):
        save_file(tensors | change, path)
        rewrite_manifest(CHECKPOINT)
        line = refused(train.main, *RUN, *EMA)
        assert str(path) in line and text in line
        assert log.read_bytes() == logged and CHECKPOINT.is_dir()


@pytest.mark.full
@pytest.mark.parametrize(
    "optimizer, key, text",
    [
        ("adagrad", None, "step: nothing in the checkpoint"),
        ("adamw", "exp_avg", "exp_avg: nothing in the checkpoint"),
        ("adamw", None, "of these parameters, which start new: output.bias"),
    ],
)
def test_a_state_of_a_parameter_that_must_be_there_is_refused_if_it_is_missing(
    optimizer, key, text
):
    """That of Adagrad always exists; adamw has none for a parameter before its first gradient."""
    flags = words("--model mlp --max_train_samples 240 --max_steps 4 --report false --threads 1")
    flags += words(f"--optimizer {optimizer} --run_name run --global_batch_size 120")
    returned(1, train.main, flags)
    path, name = CHECKPOINT / "optimizer.bin", "output.bias"
    saved = torch.load(path, weights_only=True)
    (group,) = (group for group in saved["param_groups"] if name in group["param_names"])
    number = group["params"][group["param_names"].index(name)]
    _ = saved["state"].pop(number) if key is None else saved["state"][number].pop(key)
    torch.save(saved, path)
    rewrite_manifest(CHECKPOINT)
    (outcome,) = run_ranks(1, train.main, [*flags, *words("--resume auto --max_steps 5")])
    shown, code = (outcome.err, 2) if "nothing" in text else (outcome.out, 0)
    assert text in shown and outcome.code == code
    assert "Traceback" not in outcome.err


def test_the_loss_scale_of_fp16_is_saved():
    returned(1, _save_and_load_a_loss_scale)


def _save_and_load_a_loss_scale():
    layer, folder = torch.nn.Linear(1, 1), Path("checkpoints")
    used, fresh = torch.amp.GradScaler("cpu", growth_interval=7), torch.amp.GradScaler("cpu")
    used.scale(torch.ones(()))
    used.update(512.0)
    used._growth_tracker.fill_(5)
    folder.mkdir()
    optimizer = torch.optim.SGD(layer.named_parameters(), lr=0.1)
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = used
    saved = make_saver(layer, optimizer, accelerator=accelerator)(folder, 3)
    load_scale(saved, fresh)
    assert fresh.state_dict() == used.state_dict() and fresh.get_scale() == 512.0
    for scale in ("abc", torch.nan, torch.inf, 0.0, 512):
        torch.save(used.state_dict() | {"scale": scale}, saved / "scaler.pt")
        with pytest.raises(ValueError, match=r"scaler.pt: is not a loss scale \("):
            load_scale(saved, fresh)
    assert fresh.get_scale() == 512.0
