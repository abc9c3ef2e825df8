"""Layers that are not trained (--freeze)."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from utils.config.table import suggestion
from utils.errors import UserError
from utils.models.matching import heads_of

BACKBONE = "backbone"
"""The pattern that stands for all parameters but those of the head."""


def freeze(model: nn.Module, patterns: Sequence[str], new: Mapping[str, str] = {}) -> None:
    """Freeze the parameters that match a pattern, and the batch statistics of layers whose parameters are all frozen.

    A pattern is `backbone`, or the name of a layer or parameter, with the wildcards of `fnmatch`. Raises UserError for
    a pattern that matches nothing or a parameter in `new`, and if no parameter is left to train. `new` has parameters
    that --init_from did not set, with the reason; they would stay random.
    """
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        matching = [name for name in parameters if _matches(model, name, pattern)]
        if not matching:
            layers = [name for name, _ in model.named_modules() if name]
            fix = suggestion(pattern, [*layers, *parameters], f"use {BACKBONE}, or names such as {layers[0]}")
            raise UserError(f"--freeze {pattern}: no parameter has such a name", fix)
        for name in matching:
            if name in new:
                fix = "freeze other layers, or set --model and --channels to those of --init_from"
                raise UserError(f"--freeze {pattern}: {name} would stay random ({new[name]})", fix)
            parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise UserError(f"--freeze {' '.join(patterns)}: no parameter is left to train", f"try {BACKBONE}")
    for layer in _frozen_statistics(model):
        layer.eval()
        layer.__dict__["train"] = _keep_mode  # called by `train` of the model, also after an evaluation


def _matches(model: nn.Module, name: str, pattern: str) -> bool:
    if pattern == BACKBONE:
        return not name.startswith(tuple(f"{head}." for head in heads_of(model)))
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def _frozen_statistics(model: nn.Module) -> list[nn.Module]:
    """The layers with running statistics in modules that have parameters, all of them frozen."""
    found: list[nn.Module] = []
    for module in model.modules():
        parameters = list(module.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            found += [layer for layer in module.modules() if isinstance(layer, _NormBase)]
    return found


def _keep_mode(mode: bool = True) -> None:
    """Replaces a layer's method `train`, and changes nothing."""
