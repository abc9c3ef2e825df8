"""utils/training/meter.py: updates that fp16 skips are counted on the device, over a resume."""

import math
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from helpers.ranks import returned
from torch import nn

from utils.settings.train import TrainConfig
from utils.tasks.classification import Classification
from utils.training.meter import Meter

ALONE = SimpleNamespace(num_processes=1, reduce=lambda values, _: values)  # an accelerator


def skipped(fused: bool) -> list[float]:
    """The skipped updates of four, of which two have no finite gradients, after three skipped
    earlier; read twice.
    """
    Accelerator(cpu=True)  # the wrapper of the optimizer needs its state
    weight, scaler = nn.Parameter(torch.ones(1)), torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = AcceleratedOptimizer(torch.optim.SGD([weight], fused=fused), False, scaler)
    sums = dict.fromkeys(["loss", "accuracy", "count", "wait"], 0.0) | {"skipped": 3.0}
    task = Classification(TrainConfig(), ["a", "b"])
    meter = Meter(task, torch.device("cpu"), sums, True, optimizer)
    for factor in (1.0, math.inf, 1.0, math.nan):
        meter.updates += 1
        scaler.scale(weight.sum() * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [meter.reduce(ALONE, False, False)[0]["skipped"] for _ in range(2)]


@pytest.mark.parametrize("fused", [False, True])
def test_updates_that_fp16_skips_are_counted(fused):
    assert returned(1, skipped, fused) == [[5, 5]]
