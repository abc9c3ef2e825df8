"""eval.py --throughput: operations against published numbers, speed against a clock that the test sets."""

import json
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torchvision
from helpers.ranks import run_ranks
from helpers.training_runs import train_run
from torch import nn

import eval
from utils.config.settings import TrainConfig
from utils.data.spec import InputSpec
from utils.models.layers import Views
from utils.models.zoo import build_model
from utils.training import summary as throughput


class Attention(nn.Module):
    """Self-attention over the rows of grey images [n, 1, 10, 16]."""

    def __init__(self):
        super().__init__()
        self.layer = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, images):
        rows = images[:, 0]
        return self.layer(rows, rows, rows, need_weights=False)[0].mean(1)


def test_operations_and_parameters_are_those_that_torchvision_publishes():
    published = torchvision.models.get_model_weights("resnet18").DEFAULT.meta
    spec = InputSpec(224, 224, 3, [0.5] * 3, [0.5] * 3)
    model = build_model(TrainConfig(model="resnet18"), spec, 1000).train()
    size = throughput.size_of(model, spec)
    assert size["parameters"] == published["num_params"]
    assert size["flops_per_image"] / 2e9 == pytest.approx(published["_ops"], abs=0.001)  # _ops are multiply-adds
    flops = throughput.size_of(Views(model, "flip,shift"), spec)["flops_per_image"]
    assert flops == 6 * size["flops_per_image"]


def test_the_operations_of_attention_are_counted():
    rows, width = 10, 16
    projections, products = 4 * rows * width * width, 2 * rows * rows * width
    model = Attention()
    size = throughput.size_of(model, InputSpec(rows, width, 1, [0.5], [0.5]))
    assert size == {"parameters": 4 * width * width + 4 * width, "flops_per_image": 2 * (projections + products)}


def test_the_speed_is_the_median_after_a_warm_up(monkeypatch):
    monkeypatch.setattr(throughput, "_SECONDS", 1.0)
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
    found = throughput.speed_of(Model(), spec, config, accelerator, ranks)
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
