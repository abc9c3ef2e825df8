"""Optimizers.

To add one, write a function like those below and add it to `OPTIMIZERS`: its parameters with a default are what
--optimizer_args may set. Settings that it does not use belong in `advice` (config/advice.py).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from utils.config.settings import TrainConfig
from utils.config.table import Table

Groups = list[dict[str, Any]]


def sgd(groups: Groups, config: TrainConfig, nesterov: bool = True) -> torch.optim.Optimizer:
    """SGD with Nesterov momentum, see --momentum."""
    nesterov = nesterov and config.momentum > 0
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=nesterov, fused=True)


def adamw(
    groups: Groups, config: TrainConfig, betas: Sequence[float] = (0.9, 0.999), eps: float = 1e-8
) -> torch.optim.Optimizer:
    """Adam with decoupled weight decay."""
    beta1, beta2 = betas
    return torch.optim.AdamW(groups, lr=config.lr, betas=(beta1, beta2), eps=eps, fused=True)


OPTIMIZERS = Table(
    "optimizer",
    {"sgd": sgd, "adamw": adamw},
    trial=lambda config: _try_arguments(config),
)


def build_optimizer(config: TrainConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that --optimizer names. Raises ValueError if it does not accept --optimizer_args."""
    optimizer = OPTIMIZERS.call(config, parameter_groups(config, model), config)
    for group in optimizer.param_groups:  # all have one, so that a resumed run keeps its own, not the checkpoint's
        group.setdefault("lr_scale", 1.0)
    return optimizer


def _try_arguments(config: TrainConfig) -> None:
    """Raise ValueError if the optimizer does not accept --optimizer_args."""
    # The default of --lr is chosen later, from the data.
    known = replace(config, lr=config.lr or 1.0, weight_decay=config.weight_decay or 0.0)
    build_optimizer(known, nn.Linear(1, 1))


def parameter_groups(config: TrainConfig, model: nn.Module) -> Groups:
    """The trainable parameters. Vectors (biases and normalisation weights) have no weight decay.

    A group may have an `lr_scale`, the factor of its learning rate (default: 1).
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of each group to `lr` times the group's `lr_scale`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def begin_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Set the momentum of every parameter of SGD to 0, which does not change the updates.

    PyTorch's fused SGD fails if a parameter gets its first gradient in a later update than others.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
