"""What one forward and backward pass does in each layer."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn


class Inspection:
    """Observes the layers of a module during one forward and backward pass, in a `with` block.

    `layers` has, in the order of execution, the name of each layer without layers of its own, and whether its inputs
    and its outputs are finite.
    """

    def __init__(self, module: nn.Module):
        self.module = module
        self.layers: list[tuple[str, bool, bool]] = []
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        for name, layer in self.module.named_modules():
            if not list(layer.children()):
                self._handles.append(layer.register_forward_hook(self._observer(name or type(layer).__name__)))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _observer(self, name: str):
        def observe(layer: nn.Module, inputs: Any, outputs: Any) -> None:
            self.layers.append((name, _finite(inputs), _finite(outputs)))

        return observe

    def bad_parameters(self) -> list[str]:
        """The names of the parameters with NaN or infinite values."""
        return [name for name, parameter in self.module.named_parameters() if not _finite(parameter)]

    def gradient_norms(self) -> dict[str, float]:
        """The norm of the gradient of each parameter that has one."""
        parameters = self.module.named_parameters()
        return {name: p.grad.float().norm().item() for name, p in parameters if p.grad is not None}

    @staticmethod
    @contextmanager
    def restored(module: nn.Module) -> Iterator[None]:
        """Restore the buffers of a module, such as batch statistics, at the end; without gradients."""
        before = [buffer.clone() for buffer in module.buffers()]
        with torch.no_grad():
            yield
            for buffer, value in zip(module.buffers(), before, strict=True):
                buffer.copy_(value)


def first_bad_layer(found: Inspection) -> str:
    """Where NaN or infinite values begin, in words; empty if all are finite."""
    parameters = found.bad_parameters()
    if parameters:
        return f"weights are NaN or infinite before this update: {', '.join(parameters[:3])}"
    for name, inputs, outputs in found.layers:
        if not inputs:
            return f"the input of layer {name} is NaN or infinite"
        if not outputs:
            return f"the output of layer {name} is the first with NaN or infinite values; its input is finite"
    gradients = [name for name, norm in found.gradient_norms().items() if not norm < float("inf")]
    return f"the gradient of {gradients[-1]} is NaN or infinite; all layers' outputs are finite" if gradients else ""


def _finite(value: Any) -> bool:
    """Whether all floating-point tensors in a value are finite."""
    if isinstance(value, Tensor):
        value = value.to_dense() if value.is_mkldnn else value
        return not value.is_floating_point() or bool(value.isfinite().all())
    if isinstance(value, list | tuple):
        return all(map(_finite, value))
    return all(map(_finite, value.values())) if isinstance(value, dict) else True
