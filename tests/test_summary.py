"""What --dry_run prints about a model: parameters, FLOPs, and the memory of weights, gradients and optimizer."""

import re

import pytest
import torch
from helpers.ranks import run_ranks
from helpers.training_runs import same_tensors
from torch import nn

import train
from utils.data.spec import InputSpec
from utils.models.small import MnistCNN
from utils.models.weight_average import WeightAverage
from utils.training.summary import count_flops, describe_parameters, memory_line


def spec(channels: int, side: int) -> InputSpec:
    return InputSpec(side, side, channels, [0.5] * channels, [0.5] * channels)


def test_parameters_and_flops_are_those_of_the_layers():
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4).requires_grad_(False), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)
    module = nn.Sequential(*layers)
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    convolution, linear = 2 * 4 * 36 * 3 * 9, 2 * 144 * 5
    assert count_flops(module, spec(3, 8)) == convolution + linear
    assert describe_parameters(module) == "845 parameters, 837 of them trained"
    assert module.training and same_tensors(state, module.state_dict())


def test_the_network_of_the_tutorials_is_counted_on_the_cpu_too():
    flops = count_flops(MnistCNN(spec(1, 28), 10), spec(1, 28))
    convolutions = [2 * 32 * 24**2 * 9, 2 * 64 * 10**2 * 32 * 9]  # the last rows and columns are not needed
    assert flops == sum(convolutions) + 2 * (1600 * 500 + 500 * 10)


@pytest.mark.parametrize("flags", [["--ema_decay", "0.9"], pytest.param(["--sync_batchnorm"], marks=pytest.mark.full)])
def test_a_dry_run_prints_the_model_once_and_changes_no_statistics(flags):
    flags = ["--model", "resnet18", "--image_size", "32", "--max_train_samples", "64", "--dry_run", *flags]
    main, other = run_ranks(2, with_statistics, [*flags, "--global_batch_size", "16", "--threads", "1"])
    assert (main.code, main.value, other.value) == (0, [True], [True]), main.err
    assert main.out.count("GFLOP per image") == 1 and "GFLOP" not in other.out
    assert re.search(r"memory: weights and buffers 44\.\d MB, gradients 44\.\d MB, optimizer state 44", main.out)
    assert ("average of the weights 44" in main.out) == ("--ema_decay" in flags)


def with_statistics(flags: list[str]) -> list[bool]:
    """For each update, whether the running statistics are those of a new model when it begins."""
    update, fresh = train.train_update, []

    def train_update(run, batches):
        fresh.append(run.module.training and not run.module.bn1.running_mean.any().item())
        update(run, batches)

    train.train_update = train_update
    train.main(flags)
    return fresh


def test_the_memory_of_the_optimizer_is_that_of_its_tensors():
    module = nn.Linear(1000, 1000, bias=False)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 1000)).sum().backward()
    optimizer.step()
    line = memory_line(module, optimizer, WeightAverage(module, 0.9).state_dict().values())
    assert line.startswith("memory: weights and buffers 4.0 MB, gradients 4.0 MB, optimizer state 8.0 MB, average of ")
