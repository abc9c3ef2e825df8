"""What is printed about a model: parameters and FLOPs."""

import pytest
import torch
import torchvision
from helpers.ranks import run_ranks
from torch import nn

import train
from utils.data.spec import InputSpec
from utils.models.small import MnistCNN
from utils.training.summary import count_flops, describe_parameters


def spec(channels: int, side: int) -> InputSpec:
    return InputSpec(side, side, channels, [0.5] * channels, [0.5] * channels)


class Tiny(nn.Module):
    """A convolution, a parameter of its own, a frozen layer and a linear layer."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4).requires_grad_(False)
        self.relu = nn.ReLU()
        self.head = nn.Linear(4 * 6 * 6, 5)

    def forward(self, images):
        return self.head((self.relu(self.norm(self.conv(images))) * self.scale[:, None, None]).flatten(1))


def test_parameters_and_flops_are_those_of_the_layers():
    module = Tiny()
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    convolution, linear = 2 * 4 * 36 * 3 * 9, 2 * 144 * 5
    assert count_flops(module, spec(3, 8)) == convolution + linear
    assert describe_parameters(module) == "849 parameters, 841 of them trained"
    assert module.training and all(torch.equal(state[name], tensor) for name, tensor in module.state_dict().items())


@pytest.mark.parametrize(
    ("name", "parameters", "multiply_adds"),
    [
        ("resnet18", 11_689_512, 1.814e9),
        pytest.param("vit_b_16", 86_567_656, 17.564e9, marks=pytest.mark.full),
    ],
)
def test_flops_are_twice_the_multiply_adds_that_torchvision_publishes(name, parameters, multiply_adds):
    module = torchvision.models.get_model(name)
    assert count_flops(module, spec(3, 224)) == pytest.approx(2 * multiply_adds, rel=1e-3)
    assert describe_parameters(module) == f"{parameters:,} parameters"


class Attention(nn.Module):
    """Self-attention over the rows of grey images [n, 1, 10, 16]."""

    def __init__(self):
        super().__init__()
        self.layer = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, images):
        rows = images[:, 0]
        return self.layer(rows, rows, rows, need_weights=False)[0].mean(1)


def test_the_operations_of_attention_are_counted():
    rows, width = 10, 16
    projections, products = 4 * rows * width * width, 2 * rows * rows * width
    flops = count_flops(Attention(), InputSpec(rows, width, 1, [0.5], [0.5]))
    assert flops == 2 * (projections + products)


def test_the_network_of_the_tutorials_is_counted_on_the_cpu_too():
    flops = count_flops(MnistCNN(spec(1, 28), 10), spec(1, 28))
    convolutions = [2 * 32 * 24**2 * 9, 2 * 64 * 10**2 * 32 * 9]  # the last rows and columns are not needed
    assert flops == sum(convolutions) + 2 * (1600 * 500 + 500 * 10)


@pytest.mark.parametrize("flags", [["--ema_decay", "0.9"], pytest.param(["--sync_batchnorm"], marks=pytest.mark.full)])
def test_a_dry_run_prints_the_model_once_and_changes_no_statistics(flags):
    flags = ["--model", "resnet18", "--image_size", "32", "--max_train_samples", "64", "--dry_run", *flags]
    outcomes = run_ranks(2, with_statistics, [*flags, "--global_batch_size", "16", "--threads", "1"])
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes[0].err
    assert outcomes[0].out.count("GFLOP per image") == 1 and "GFLOP" not in outcomes[1].out
    assert outcomes[0].value and outcomes[1].value


def with_statistics(flags: list[str]) -> bool:
    """Whether the running statistics are those of a new model when the first update begins."""
    update, fresh = train.train_update, []

    def train_update(run, batches):
        fresh.append(run.module.training and not run.module.bn1.running_mean.any().item())
        update(run, batches)

    train.train_update = train_update
    train.main(flags)
    return fresh == [True]
