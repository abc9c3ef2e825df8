"""What a checkpoint holds besides the weights comes back exactly: any optimizer's state, and the parts of a run."""

from pathlib import Path

import torch
from accelerate import Accelerator
from helpers.ranks import returned, run_ranks
from helpers.training_runs import (
    Average,
    refused,
    rewrite_manifest,
    same_tensors,
    train_run,
    train_with_average,
    weights,
)
from safetensors.torch import load_file, save
from torch import nn

import train
from utils.runs.loading import load_parts
from utils.runs.manifest import files_of
from utils.runs.parts import LOSS_SCALE, LossScale
from utils.runs.writing import publish, write_partial

FLAGS = ["--model", "mnist_cnn", "--image_size", "12", "--global_batch_size", "120", "--threads", "1", "--lr", "0.02"]
FLAGS += ["--max_train_samples", "480", "--lr_schedule", "constant", "--max_steps", "7"]
RUN = ["--run_name", "run", *FLAGS, "--resume", "auto"]
CHECKPOINT = Path("runs/run/checkpoints/step-00000004")


def optimizer_state(name):
    """All tensors of a run's optimizer, by their places."""
    folder = Path("runs") / name / "checkpoints"
    path = folder / (folder / "latest").read_text().strip() / "optimizer.bin"
    states = torch.load(path, weights_only=True)["state"]
    return {f"{number} {key}": value for number, state in states.items() for key, value in state.items()}


# Optimizers


def train_with_adafactor(flags):
    train.OPTIMIZERS["adafactor"] = lambda groups, config: torch.optim.Adafactor(groups, lr=config.lr)
    train_with_average([*flags, "--optimizer", "adafactor"])


def test_parts_and_an_optimizer_with_statistics_of_rows_resume_bit_identically():
    returned(2, train_with_adafactor, ["--run_name", "whole", *FLAGS])
    for stop in ("3", "7"):
        returned(2, train_with_adafactor, [*RUN, "--max_steps", stop])
    shapes = {tuple(value.shape) for name, value in optimizer_state("whole").items() if "row" in name}
    assert len(shapes) > 2 and all(shape[-1] == 1 for shape in shapes)  # not those of the weights
    assert same_tensors(optimizer_state("run"), optimizer_state("whole"))
    assert same_tensors(weights("run"), weights("whole"))
    file = "average.safetensors"
    assert same_tensors(weights("run", file=file), weights("whole", file=file))
    assert not same_tensors(weights("run", file=file), weights("run"))


def test_an_optimizer_file_that_does_not_fit_is_refused_with_what_differs():
    train_run(1, "run", *FLAGS, "--max_steps", "4", "--optimizer", "adamw")
    path, flags = CHECKPOINT / "optimizer.bin", [*RUN, "--optimizer", "adamw"]
    good = path.read_bytes()
    for name, value, said in (
        ("exp_avg", torch.zeros(1), "exp_avg: shape [1] in the checkpoint, shape [32, 1, 3, 3] in this optimizer"),
        ("exp_avg_sq", None, "exp_avg_sq: nothing in the checkpoint, shape [32, 1, 3, 3] in this optimizer"),
        ("max_exp_avg_sq", torch.zeros(1), "max_exp_avg_sq: shape [1] in the checkpoint, nothing in this optimizer"),
    ):
        saved = torch.load(path, weights_only=True)
        saved["state"][0][name] = value
        torch.save(saved, path)
        rewrite_manifest(CHECKPOINT)
        problem = f"{path}: not this run's optimizer ({said}); use the same --optimizer"
        assert problem in refused(train.main, *flags)
        path.write_bytes(good)


# Parts


def test_parts_that_only_the_run_or_only_the_checkpoint_has_are_reported():
    train_run(1, "run", *FLAGS, "--max_steps", "4")
    (outcome,) = run_ranks(1, train_with_average, [*RUN, "--max_steps", "5"])
    assert "average.safetensors is not in the checkpoint: average keeps its initial state" in outcome.out
    tensors, now = (weights("run", file=file) for file in ("average.safetensors", "model.safetensors"))
    assert tensors and all(torch.equal(tensor, 0.1 * now[name]) for name, tensor in tensors.items())  # of one update
    (outcome,) = run_ranks(1, train.main, [*RUN, "--max_steps", "6"])
    assert outcome.code == 0 and "parts of the checkpoint that this run does not have: average" in outcome.out
    assert not Path("runs/run/checkpoints/step-00000006/average.safetensors").exists()


def test_a_part_that_does_not_fit_is_one_line_and_changes_nothing():
    returned(1, train_with_average, ["--run_name", "run", *FLAGS, "--max_steps", "4"])
    path, log = CHECKPOINT / "average.safetensors", Path("runs/run/log.jsonl")
    tensors, logged = load_file(path), log.read_bytes()
    first = next(iter(tensors))
    for bytes_of_file, text in (
        (save(tensors | {first: torch.zeros(2)}), f"{first}: shape [2] in the checkpoint"),
        (save(tensors | {"other": torch.zeros(2)}), "other"),
        (b"\x02" + bytes(7) + b"[]", ""),
    ):
        path.write_bytes(bytes_of_file)
        rewrite_manifest(CHECKPOINT)
        line = refused(train_with_average, *RUN)
        assert str(path) in line and text in line
        assert log.read_bytes() == logged and CHECKPOINT.is_dir()


def test_the_loss_scale_of_fp16_is_a_part():
    returned(1, _save_and_load_a_loss_scale)


def _save_and_load_a_loss_scale():
    folder, accelerator, layer = Path("checkpoints"), Accelerator(cpu=True), nn.Linear(2, 2)
    accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    used, average = torch.amp.GradScaler("cpu", growth_interval=7), Average(layer)
    used.scale(torch.ones(()))
    used.update(512.0)
    used._growth_tracker.fill_(5)
    average.update()
    folder.mkdir()
    write_partial(folder, 3, accelerator, {LOSS_SCALE: LossScale(used), "average": average}, {})
    publish(folder, 3)
    checkpoint, fresh = folder / "step-00000003", torch.amp.GradScaler("cpu")
    assert {"loss_scale.safetensors", "average.safetensors"} <= files_of(checkpoint).keys()
    other = Average(layer)
    assert load_parts(checkpoint, {LOSS_SCALE: LossScale(fresh), "average": other}) == []
    assert fresh.state_dict() == used.state_dict() and fresh.get_scale() == 512.0
    assert fresh.state_dict()["_growth_tracker"] == 5 and type(fresh.state_dict()["growth_interval"]) is int
    assert same_tensors(other.state_dict(), average.state_dict())
