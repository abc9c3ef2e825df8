"""recipes/ reach what their headers and docs/settings.md say."""

import os
from pathlib import Path

import pytest
import torch
from helpers.ranks import returned
from helpers.training_runs import records, train_run, words
from timm.scheduler import CosineLRScheduler

import eval
from train import REGISTRIES
from utils.config.cli import parse_args
from utils.models.zoo import check_model, input_spec
from utils.settings.train import TrainConfig
from utils.training.schedule import learning_rate

RECIPES = Path(__file__).parents[2] / "recipes"
NAMES = sorted(path.name for path in RECIPES.glob("*.yaml"))


@pytest.mark.parametrize("name", NAMES)
def test_each_recipe_is_accepted_and_listed_and_has_its_command_in_its_header(name):
    config = parse_args(TrainConfig, "train.py", ["--config", str(RECIPES / name)], REGISTRIES)
    check_model(config)
    assert input_spec(config, 3, None).channels == 3
    header, _ = (RECIPES / name).read_text().split("\n\n", 1)
    assert all(line.startswith("#") for line in header.splitlines())
    assert f"train.py --config recipes/{name}" in header
    assert f"(../recipes/{name})" in (RECIPES.parent / "docs/settings.md").read_text()


@pytest.mark.full
def test_the_swin_recipe_has_its_authors_learning_rates_and_trains_at_64_pixels():
    recipe = str(RECIPES / "swin_tiny.yaml")
    config = parse_args(TrainConfig, "train.py", ["--config", recipe], REGISTRIES)
    updates, warmup = 300 * (1_281_167 // 1024), 20 * (1_281_167 // 1024)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 5e-4 * 1024 / 512)
    ends = {"lr_min": 5e-6 * 1024 / 512, "warmup_lr_init": 5e-7 * 1024 / 512, "warmup_t": warmup}
    theirs = CosineLRScheduler(
        optimizer, updates - warmup, **ends, t_in_epochs=False, warmup_prefix=True
    )
    for update in range(0, updates, 997):
        (lr,) = theirs._get_lr(update)
        assert learning_rate(config, update, updates) == pytest.approx(
            lr, rel=1e-9, abs=(update < warmup) * 1e-6
        )
    small = words("--data synthetic/4x64x32 --image_size 64 --global_batch_size 8 --report false")
    small += ["--model_args", "{mlp_ratio: 0.5}"]
    small += words("--max_steps 3 --warmup_steps 1 --log_every 1")
    log = train_run(1, "run", "--config", recipe, *small)
    trained = [record for record in log if record["kind"] == "train"]
    assert [record["lr"] for record in trained] == pytest.approx([0.001, 0.001, 0.000505])
    assert 1 < trained[0]["loss"] < 2 and log[-1]["kind"] == "eval"


@pytest.mark.full
def test_the_digits_recipe_learns_in_two_processes_and_evaluates_the_same_in_one():
    recipe = str(RECIPES / "digits.yaml")
    log = train_run(
        2, "run", "--config", recipe, "--epochs", "8", "--log_every", "46", "--eval_every", "92"
    )
    losses = [record["loss"] for record in log if record["kind"] == "train"]
    assert losses[-1] < losses[0] / 4
    best = max(record["accuracy"] for record in records("run", "eval"))
    assert best > 0.95
    assert returned(1, eval.main, ["--ckpt", "runs/run"])[0]["accuracy"] == best


@pytest.mark.slow
def test_the_digits_recipe_reaches_98_percent_over_five_hold_outs():
    accuracies = []
    for seed in range(5):
        flags = ("--config", str(RECIPES / "digits.yaml"), "--seed", str(seed))
        accuracies.append(train_run(2, f"run{seed}", *flags, seconds=600)[-1]["accuracy"])
    print(f"digits: {accuracies}, mean {sum(accuracies) / 5:.4f}")
    assert sum(accuracies) / 5 >= 0.98


@pytest.mark.slow
@pytest.mark.skipif(
    "LOCKSTEP_MNIST" not in os.environ,
    reason="set LOCKSTEP_MNIST to a folder with MNIST's parquet files",
)
def test_the_mnist_recipe_reaches_99_5_percent():
    flags = ("--config", str(RECIPES / "mnist.yaml"), "--data", os.environ["LOCKSTEP_MNIST"])
    log = train_run(2, "run", *flags, seconds=1800)
    print(f"mnist: {log[-1]}")
    assert log[-1]["accuracy"] >= 0.995 and log[-1]["count"] == 10000
