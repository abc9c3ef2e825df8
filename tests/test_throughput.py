"""Sizes of models against published numbers; eval.py --throughput against a clock that the test sets."""

import json
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torchvision
from helpers.ranks import run_ranks
from helpers.training_runs import same_tensors, train_run
from torch import nn

import eval
from utils.config.settings import TrainConfig
from utils.data.spec import InputSpec
from utils.models.layers import Views
from utils.models.small import MnistCNN
from utils.models.zoo import build_model
from utils.training import summary


@pytest.mark.parametrize("name", ["resnet18", pytest.param("vit_b_16", marks=pytest.mark.full)])
def test_operations_and_parameters_are_those_that_torchvision_publishes(name):
    published = torchvision.models.get_model_weights(name).DEFAULT.meta
    spec = InputSpec(224, 224, 3, [0.5] * 3, [0.5] * 3)
    model = build_model(TrainConfig(model=name), spec, 1000).train()
    size = summary.size_of(model, spec)
    assert size["parameters"] == published["num_params"]
    assert size["flops_per_image"] / 2e9 == pytest.approx(published["_ops"], rel=1e-3)  # _ops are multiply-adds
    if name == "resnet18":
        flops = summary.size_of(Views(model, "flip,shift"), spec)["flops_per_image"]
        assert flops == 6 * size["flops_per_image"]


def test_the_speed_is_the_median_after_a_warm_up(monkeypatch):
    monkeypatch.setattr(summary, "_SECONDS", 1.0)
    passes = []

    class Model(nn.Module):
        def forward(self, images):
            assert not self.training and not torch.is_grad_enabled()
            assert images.shape == (8, 3, 4, 5) and images.std() > 0.5
            passes.append(1)
            time.sleep(1 if len(passes) == 1 else 0.02)
            return images

    accelerator = SimpleNamespace(device=torch.device("cpu"), autocast=lambda: torch.autocast("cpu", enabled=False))
    ranks = SimpleNamespace(agree=nullcontext, gather=lambda own: [own, 100.0])
    spec, config = InputSpec(4, 5, 3, [0.5] * 3, [0.5] * 3), TrainConfig(eval_batch_size=8)
    found = summary.speed_of(Model(), spec, config, accelerator, ranks)
    own, other = found["of_each_process"]
    assert 100 < own <= 8 / 0.02 and other == 100.0  # the first pass alone would make it 30
    assert found["model_images_per_second"] == own + other and found["batch_size"] == 8


@pytest.mark.full
def test_the_record_and_the_table_have_the_speed_of_each_process_and_of_all():
    train_run(1, "run", "--model", "mlp", "--model_args", "{hidden: 8}", "--threads", "1", "--max_steps", "1")
    main, other = run_ranks(2, eval.main, ["--ckpt", "runs/run", "--throughput", "--json", "found.json"])
    assert (main.code, other.code) == (0, 0), main.err
    record = json.loads(Path("found.json").read_text())
    found = record["throughput"]
    assert record["count"] == 180 and found["images_per_second"] == 180 / record["seconds"]
    each, total = found["of_each_process"], found["model_images_per_second"]
    assert len(each) == 2 and min(each) > 0 and total == sum(each)
    assert (found["parameters"], found["flops_per_image"]) == (64 * 8 + 8 + 8 * 10 + 10, 2 * (64 * 8 + 8 * 10))
    assert main.value["throughput"]["of_each_process"] == other.value["throughput"]["of_each_process"]
    rows = dict(line.split("  ", 1) for line in main.out.splitlines() if "  " in line)
    assert rows["model alone"].strip() == f"{total:,.1f} images/s, {total / 2:,.1f} per process"
    assert rows["parameters"].strip() == "610" and rows["evaluation"].endswith(" per process")


# What --dry_run prints about a model


def spec(channels: int, side: int) -> InputSpec:
    return InputSpec(side, side, channels, [0.5] * channels, [0.5] * channels)


def test_parameters_and_flops_are_those_of_the_layers():
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4).requires_grad_(False), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)
    module = nn.Sequential(*layers)
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    convolution, linear = 2 * 4 * 36 * 3 * 9, 2 * 144 * 5
    assert summary.count_flops(module, spec(3, 8)) == convolution + linear
    assert summary.describe_parameters(module) == "845 parameters, 837 of them trained"
    assert module.training and same_tensors(state, module.state_dict())


def test_the_network_of_the_tutorials_is_counted_on_the_cpu_too():
    flops = summary.count_flops(MnistCNN(spec(1, 28), 10), spec(1, 28))
    convolutions = [2 * 32 * 24**2 * 9, 2 * 64 * 10**2 * 32 * 9]  # the last rows and columns are not needed
    assert flops == sum(convolutions) + 2 * (1600 * 500 + 500 * 10)
