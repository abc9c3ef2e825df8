"""utils/training/summary.py: the parameters of a model, against published numbers."""

import pytest
import torchvision
from torch import nn

from utils.data.spec import InputSpec
from utils.models.zoo import build_model
from utils.settings.train import TrainConfig
from utils.training import summary


@pytest.mark.parametrize("name", ["resnet18", pytest.param("vit_b_16", marks=pytest.mark.full)])
def test_parameters_are_those_that_torchvision_publishes(name):
    published = torchvision.models.get_model_weights(name).DEFAULT.meta
    spec = InputSpec(224, 224, 3, [0.5] * 3, [0.5] * 3)
    model = build_model(TrainConfig(model=name), spec, 1000)
    assert summary.count_parameters(model.parameters()) == published["num_params"]


def test_parameters_that_are_not_trained_are_told_apart():
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4).requires_grad_(False), nn.Linear(144, 5)
    text = "845 parameters, 837 of them trained"
    assert summary.describe_parameters(nn.Sequential(*layers)) == text
