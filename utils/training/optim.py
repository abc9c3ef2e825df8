"""Optimizers, and their parameter groups: which parameters have weight decay, and how fast each
layer learns.

The optimizers are those of torch.optim that need nothing but the gradients of an update. To add
one, write a function like `sgd` and add it to `OPTIMIZERS`: its parameters with a default are what
--optimizer_args may set. If it has a method `groups(model)`, as in `muon.py`, this returns what is
added to the group of each parameter: a dictionary for each name. If it ignores a setting, add a
line to `without_effect` (training/defaults.py).
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn, optim
from torch.optim import Optimizer

from utils.config import Registry
from utils.models import find_blocks, head_prefixes
from utils.settings.training import TrainingSettings

Groups = list[dict]

# The others of torch.optim need several gradients in an update, all samples, or sparse gradients.
_OF_TORCH = ["Adafactor", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax"]
_OF_TORCH += ["ASGD", "NAdam", "RAdam", "RMSprop"]
# Arguments that have flags, and those about how torch computes a step
_NOT_ARGUMENTS = {"params", "lr", "momentum", "weight_decay"}
_NOT_ARGUMENTS |= {"maximize", "foreach", "capturable", "differentiable", "fused"}
# The last parts of the names of embeddings, tokens and scales. Not all models list them in
# `no_weight_decay`.
_UNDECAYED = {"class_token", "cls_token", "pos_embed", "pos_embedding", "layer_scale"}
_UNDECAYED |= {"relative_position_bias_table"}


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
OPTIMIZERS = Registry(
    "optimizer",
    {"sgd": sgd, "muon": "utils.training.muon:Muon", **_FROM_TORCH},
)


def build_optimizer(config: TrainingSettings, model: nn.Module) -> Optimizer:
    """The optimizer that --optimizer names.

    Raises ValueError if it does not accept --optimizer_args.
    """
    groups_of = getattr(OPTIMIZERS.choose(config.optimizer), "groups", None)
    more = groups_of(model) if groups_of else None
    return OPTIMIZERS.call(config, parameter_groups(config, model, more), config)


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
        if isinstance(optimizer, optim.Adagrad):
            for state in optimizer.state.values():
                state["step"] = state["step"].cpu()
        if isinstance(optimizer, optim.ASGD):
            for group in optimizer.param_groups:
                group["capturable"] = True
    if isinstance(optimizer, optim.SGD):
        for group in optimizer.param_groups:
            if accelerator.is_fsdp2:
                group["fused"] = False  # fused SGD does not support DTensor
            if group["momentum"]:
                for parameter in group["params"]:
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return prepared if accelerator.scaler else optimizer


def parameter_groups(
    config: TrainingSettings, model: nn.Module, more: Mapping[str, dict] | None = None
) -> Groups:
    """The trainable parameters with their names; groups with weight decay come first.

    A group has its `weight_decay`, and `lr_scale`, the factor of its learning rate. `more` has,
    by the names of parameters, what the optimizer adds to their groups.
    """
    undecayed = names_without_decay(model)
    scales = layer_scales(model, config.layer_decay)
    of_head = head_prefixes(model)
    groups: dict[tuple, dict] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        decay = 0.0 if name in undecayed else config.weight_decay
        scale = scales[name]
        if name.startswith(of_head):
            scale *= config.head_scale or 1.0
        group = {"weight_decay": decay, "lr_scale": scale} | (more or {}).get(name, {})
        # groups have the same keys in the same order, so their values can be compared
        key = (name in undecayed, *group.values())
        groups.setdefault(key, {"params": []} | group)["params"].append((name, parameter))
    return [groups[key] for key in sorted(groups)]


def names_without_decay(model: nn.Module) -> set[str]:
    """The parameters without weight decay: vectors, biases, position embeddings and class tokens.

    Vectors are the parameters of normalisation layers. timm's models name more in
    `no_weight_decay()`.
    """
    patterns: Iterable[str] = getattr(model, "no_weight_decay", tuple)()
    return {
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim <= 1
        or name.endswith("bias")
        or name.rpartition(".")[2] in _UNDECAYED
        or any(fnmatchcase(name, pattern) for pattern in patterns)
    }


def layer_scales(model: nn.Module, decay: float | None) -> dict[str, float]:
    """The factor of each parameter's learning rate: `decay` ** (layers between its layer and the
    last), or 1.

    This is layer-wise learning rate decay (Clark et al., 2020; Bao et al., 2022).
    """
    if decay is None:
        return {name: 1.0 for name, _ in model.named_parameters()}
    numbers = layer_numbers(model)
    last = max(numbers.values())
    return {name: decay ** (last - numbers.get(name, last)) for name, _ in model.named_parameters()}


def layer_numbers(model: nn.Module) -> dict[str, int]:
    """The number of each parameter's layer, from 0 at the input. timm's models number them
    themselves.

    In other models, each block (`find_blocks`) and each module outside of them is a layer, in the
    order in which the model creates them. One that has only vectors, such as a normalisation, has
    the number of the layer before it. So do parameters outside all layers, such as class tokens.
    """
    if matcher := getattr(model, "group_matcher", None):
        from timm.models import group_parameters

        return group_parameters(model, matcher(coarse=False), reverse=True)
    blocks = {*find_blocks(model)}
    numbers = dict[str, int]()
    number = -1
    inside = "."
    for path, module in model.named_modules():
        if path.startswith(inside):
            continue
        is_layer = module in blocks or next(module.children(), None) is None
        named = list(module.named_parameters(path, recurse=is_layer))
        number += is_layer and any(parameter.ndim > 1 for _, parameter in named)
        numbers |= {name: max(0, number) for name, _ in named}
        inside = f"{path}." if is_layer else inside
    return numbers
