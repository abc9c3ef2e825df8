"""What is printed about a model: parameters and operations, against published numbers."""

import pytest
import torchvision
from helpers.training_runs import same_tensors
from torch import nn

from utils.config.settings import TrainConfig
from utils.data.spec import InputSpec
from utils.models.small import MnistCNN
from utils.models.zoo import build_model
from utils.training import summary


@pytest.mark.parametrize("name", ["resnet18", pytest.param("vit_b_16", marks=pytest.mark.full)])
def test_operations_and_parameters_are_those_that_torchvision_publishes(name):
    published = torchvision.models.get_model_weights(name).DEFAULT.meta
    spec = InputSpec(224, 224, 3, [0.5] * 3, [0.5] * 3)
    model = build_model(TrainConfig(model=name), spec, 1000).train()
    assert summary.count_parameters(model.parameters()) == published["num_params"]
    flops = summary.count_flops(model, spec)
    assert flops / 2e9 == pytest.approx(published["_ops"], rel=1e-3)  # _ops are multiply-adds


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
