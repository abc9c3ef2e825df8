"""Optimizers.

To add an optimizer, add its name to `optimizer` in config/settings.py and create it in `build_optimizer`.
Settings that it does not use belong in `advice` (config/settings.py).
"""

import torch
from torch import nn

from utils.config.settings import TrainConfig


def build_optimizer(config: TrainConfig, model: nn.Module) -> torch.optim.Optimizer:
    """SGD with Nesterov momentum, or AdamW. Vectors (biases and normalisation weights) have no weight decay."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=config.lr, fused=True)
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.momentum > 0, fused=True)


def begin_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Set the momentum of every parameter of SGD to 0, which does not change the updates.

    PyTorch's fused SGD fails if a parameter gets its first gradient in a later update than others.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
