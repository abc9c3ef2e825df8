"""What one forward and backward pass does in each layer."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

Layers = list[tuple[str, bool, bool]]  # name, and whether the inputs and the outputs are finite


@contextmanager
def observe_layers(module: nn.Module) -> Iterator[Layers]:
    """Add to the list, in the order of execution, each layer without layers of its own that runs in the block."""
    layers: Layers = []

    def observe(name: str, _layer: nn.Module, inputs: Any, outputs: Any) -> None:
        layers.append((name, _finite(inputs), _finite(outputs)))

    handles = [
        layer.register_forward_hook(partial(observe, name or type(layer).__name__))
        for name, layer in module.named_modules()
        if not list(layer.children())
    ]
    try:
        yield layers
    finally:
        for handle in handles:
            handle.remove()


def gradient_norms(module: nn.Module) -> dict[str, float]:
    """The norm of the gradient of each parameter that has one."""
    return {name: p.grad.float().norm().item() for name, p in module.named_parameters() if p.grad is not None}


def first_bad_layer(module: nn.Module, layers: Layers) -> str:
    """Where NaN or infinite values begin, in words; empty if all are finite."""
    parameters = [name for name, parameter in module.named_parameters() if not _finite(parameter)]
    if parameters:
        return f"weights are NaN or infinite before this update: {', '.join(parameters[:3])}"
    for name, inputs, outputs in layers:
        if not inputs:
            return f"the input of layer {name} is NaN or infinite"
        if not outputs:
            return f"the output of layer {name} is the first with NaN or infinite values; its input is finite"
    gradients = [name for name, norm in gradient_norms(module).items() if not norm < float("inf")]
    return f"the gradient of {gradients[-1]} is NaN or infinite; all layers' outputs are finite" if gradients else ""


def _finite(value: Any) -> bool:
    """Whether all floating-point tensors in a value are finite."""
    if isinstance(value, Tensor):
        value = value.to_dense() if value.is_mkldnn else value
        return not value.is_floating_point() or bool(value.isfinite().all())
    if isinstance(value, list | tuple):
        return all(map(_finite, value))
    return all(map(_finite, value.values())) if isinstance(value, dict) else True
