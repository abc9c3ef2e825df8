"""Stochastic depth (--drop_path): whole residual branches are dropped at random, per sample (Huang et al., 2016)."""

from typing import Any

from torch import nn
from torchvision.ops import StochasticDepth

from utils.errors import UserError

FAMILIES = "timm models such as timm/vit_* and timm/convnext_*; convnext_*, efficientnet_*, maxvit_t and swin_*"


def has_drop_path(model: nn.Module) -> bool:
    return any(type(layer).__name__ in ("DropPath", "StochasticDepth") for layer in model.modules())


def unsupported(name: str) -> UserError:
    return UserError(f"--drop_path: {name} does not have it", f"use one of {FAMILIES}")


def set_drop_path(model: nn.Module, name: str, rate: float) -> None:
    """Set the stochastic depth of a torchvision model: its rate grows linearly from block to block, up to `rate`.

    Raises UserError if the model has none.
    """
    layers: list[Any] = [layer for layer in model.modules() if isinstance(layer, StochasticDepth)]
    if not layers:
        raise unsupported(name)
    # torchvision's functions do not all accept a rate, so theirs is scaled. Its last block of n reaches the whole rate,
    # but (n - 1) / n of it in EfficientNet.
    last = max(layer.p for layer in layers)
    full = last * len(layers) / (len(layers) - 1) if name.startswith("efficientnet") else last
    for layer in layers:
        layer.p *= rate / full
