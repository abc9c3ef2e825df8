"""Optimizers, and the learning rate as a pure function of the update."""

import math

import torch
from torch import nn

from utils.config import TrainConfig


def build_optimizer(config: TrainConfig, model: nn.Module) -> torch.optim.Optimizer:
    """SGD with Nesterov momentum or AdamW; vectors (biases, normalisation) are in a group without weight decay."""
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
    """Give every parameter its momentum, 0, now; the updates are the same.

    PyTorch's fused SGD fails when a parameter gets its first gradient in a later update than others.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("momentum") else ():
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def learning_rate(config: TrainConfig, update: int, updates: int) -> float:
    """The learning rate of update `update` (from 0) of `updates`, on any topology.

    After a linear warm-up of --warmup_steps, constant, linear and cosine go from --lr to 0 at the run's end; onecycle
    rises from lr/25 to lr and falls to lr/250000 by half cosines, the defaults of torch's OneCycleLR (Smith and Topin,
    2017), its momentum kept constant.
    """
    if config.lr_schedule == "onecycle":
        return _one_cycle(config, update, updates)
    warmup = config.warmup_steps or 0
    if update < warmup:
        return config.lr * (update + 1) / warmup
    done = (update - warmup) / max(1, updates - warmup)
    if config.lr_schedule == "cosine":
        return config.lr * (1 + math.cos(math.pi * done)) / 2
    return config.lr * (1 - done) if config.lr_schedule == "linear" else config.lr


def _one_cycle(config: TrainConfig, update: int, updates: int) -> float:
    start, end = config.lr / 25, config.lr / 25e4
    top = float(0.3 * updates - 1) if config.warmup_steps is None else float(config.warmup_steps)
    if update <= top and top > 0:
        return _half_cosine(start, config.lr, update / top)
    return _half_cosine(config.lr, end, (update - top) / max(1.0, updates - 1 - top))


def _half_cosine(start: float, end: float, done: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * min(1.0, done))) / 2


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
