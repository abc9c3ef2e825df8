"""Stochastic depth (--drop_path): whole residual branches are dropped at random, per sample (Huang et al., 2016)."""

from typing import Any

from torch import nn
from torchvision.ops import StochasticDepth

from utils.config.bounds import require
from utils.errors import UserError

FAMILIES = "timm models such as timm/vit_* and timm/convnext_*; convnext_*, efficientnet_*, maxvit_t and swin_*"


def has_drop_path(model: nn.Module) -> bool:
    return any(type(layer).__name__ in ("DropPath", "StochasticDepth") for layer in model.modules())


def unsupported(name: str) -> UserError:
    return UserError(f"--drop_path: {name} does not support it", f"use one of {FAMILIES}")


def set_drop_path(model: nn.Module, name: str, rate: float) -> None:
    """Set the stochastic depth of a torchvision model: its rate grows linearly from block to block, up to `rate`.

    Raises UserError if the model has none, or if --model_args turn it off.
    """
    layers: list[Any] = [layer for layer in model.modules() if isinstance(layer, StochasticDepth)]
    if not layers:
        raise unsupported(name)
    # Not all of torchvision's functions accept a rate, so the rates of the layers are scaled. The last of n blocks has
    # the full rate, except in EfficientNet, where it has (n - 1) / n of it.
    last = max(layer.p for layer in layers)
    require(last > 0, "--drop_path has no effect: --model_args set the stochastic depth to 0", "use only one of them")
    full = last * len(layers) / (len(layers) - 1) if name.startswith("efficientnet") else last
    for layer in layers:
        layer.p *= rate / full
