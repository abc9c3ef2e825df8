"""Optimizers: those of torch.optim that need nothing but the gradients of an update.

To add one, write a function like those below and add it to `OPTIMIZERS`: its parameters with a
default are what --optimizer_args may set. If it has a method `groups(model)`, as in
`muon.py`, this returns what is added to the group of each parameter: a dictionary for each name. If
it ignores a setting, add a line to `without_effect` (training/defaults.py).
"""

import inspect
from collections.abc import Callable
from dataclasses import replace

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn, optim
from torch.optim import Optimizer

from utils.config import Table
from utils.settings.training import TrainingSettings
from utils.training.groups import Groups, parameter_groups

# The others of torch.optim need several gradients in an update, all samples, or sparse gradients.
_OF_TORCH = ["Adafactor", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax"]
_OF_TORCH += ["ASGD", "NAdam", "RAdam", "RMSprop"]
# Arguments that have flags, and those about how torch computes a step
_NOT_ARGUMENTS = {"params", "lr", "momentum", "weight_decay"}
_NOT_ARGUMENTS |= {"maximize", "foreach", "capturable", "differentiable", "fused"}


def sgd(groups: Groups, config: TrainingSettings, nesterov: bool = True) -> Optimizer:
    """SGD with Nesterov momentum, see --momentum."""
    momentum = config.momentum
    nesterov = nesterov and config.momentum > 0
    return optim.SGD(groups, config.lr, momentum, nesterov=nesterov, fused=True)


def of_torch(kind: Callable[..., Optimizer]) -> Callable[..., Optimizer]:
    """The optimizer function of a class of torch.optim; --optimizer_args may set the arguments of
    the class.
    """
    parameters = inspect.signature(kind).parameters
    fused = {"fused": True} if kind in (optim.Adam, optim.AdamW) else {}

    def build(groups: Groups, config: TrainingSettings, **arguments) -> Optimizer:
        for name, value in arguments.items():  # torch ignores surplus values
            default = parameters[name].default
            if isinstance(default, tuple) and len(value) != len(default):
                raise ValueError(f"{name} must have {len(default)} values, got {value}")
        momentum = {"momentum": config.momentum} if "momentum" in parameters else {}
        return kind(groups, lr=config.lr, **momentum, **fused, **arguments)

    build.__doc__ = f"torch.optim.{kind.__name__}."
    own = [parameters[name] for name in parameters if name not in _NOT_ARGUMENTS]
    named = [each.replace(kind=each.KEYWORD_ONLY) for each in own]
    build.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    return build


_FROM_TORCH = {name.lower(): of_torch(getattr(optim, name)) for name in _OF_TORCH}
OPTIMIZERS = Table(
    "optimizer",
    {"sgd": sgd, "muon": "utils.training.muon:Muon", **_FROM_TORCH},
    trial=lambda config: _try_arguments(config),
)


def build_optimizer(config: TrainingSettings, model: nn.Module) -> Optimizer:
    """The optimizer that --optimizer names.

    Raises ValueError if it does not accept --optimizer_args.
    """
    groups_of = getattr(OPTIMIZERS.choose(config.optimizer), "groups", None)
    more = groups_of(model) if groups_of else None
    return OPTIMIZERS.call(config, parameter_groups(config, model, more), config)


def _try_arguments(config: TrainingSettings) -> None:
    """Take a step on a small model, which fails if the optimizer does not accept
    --optimizer_args.
    """
    # These defaults are chosen later, from the data.
    lr = config.lr or 1.0
    decay = config.weight_decay or 0.0
    known = replace(config, lr=lr, weight_decay=decay, layer_decay=None)
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    optimizer = build_optimizer(known, model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of each group to `lr` times the group's `lr_scale`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def unwrap_optimizer(prepared: AcceleratedOptimizer, accelerator: Accelerator) -> Optimizer:
    """The optimizer that the loop uses, after `Accelerator.prepare`: only fp16 needs its wrapper,
    which is slower.

    The momentum of every parameter of SGD is set to 0, which does not change the updates: PyTorch's
    fused SGD fails if a parameter gets its first gradient in a later update than others.
    """
    optimizer = prepared.optimizer
    if accelerator.is_fsdp2:
        optimizer.state.clear()  # that of Adagrad belongs to parameters that FSDP2 has replaced
    elif accelerator.device.type == "cuda":  # otherwise these two wait for each parameter
        for state in optimizer.state.values() if isinstance(optimizer, optim.Adagrad) else ():
            state["step"] = state["step"].cpu()
        for group in optimizer.param_groups if isinstance(optimizer, optim.ASGD) else ():
            group["capturable"] = True
    for group in optimizer.param_groups if isinstance(optimizer, optim.SGD) else ():
        if accelerator.is_fsdp2:
            group["fused"] = False  # fused SGD does not support DTensor
        for parameter in group["params"] if group["momentum"] else ():
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return prepared if accelerator.scaler else optimizer
