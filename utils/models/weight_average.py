"""An exponential moving average (EMA) of the weights and buffers of a model."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightAverage:
    """The averages, by the names of the model's `state_dict`. Integer and boolean buffers are copied instead.

    Update t, counted from 0, multiplies them by d = min(`decay`, (1 + t) / (10 + t)) and adds 1 - d times the new
    weights. This is TensorFlow's ExponentialMovingAverage with `num_updates`: the decay rises with t, so that the
    initial weights are forgotten soon.
    """

    def __init__(self, module: nn.Module, decay: float):
        self.decay = decay
        own = module.state_dict()  # in the memory of the model
        self._averages = {name: tensor.clone() for name, tensor in own.items()}
        self._own, self._all = list(own.values()), list(self._averages.values())
        pairs = list(zip(self._all, self._own, strict=True))
        self._averaged = [pair for pair in pairs if pair[1].is_floating_point()]
        self._copied = [pair for pair in pairs if not pair[1].is_floating_point()]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Average in the weights after update `step`, counted from 0. Does not wait for the device."""
        averages, own = zip(*self._averaged, strict=True)
        torch._foreach_lerp_(averages, own, 1 - min(self.decay, (1 + step) / (10 + step)))
        _copy([average for average, _ in self._copied], [own for _, own in self._copied])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """In this context the model has the averages; afterwards it has its own weights again."""
        before = [tensor.clone() for tensor in self._own]
        _copy(self._own, self._all)
        try:
            yield
        finally:
            _copy(self._own, before)

    def state_dict(self) -> dict[str, Tensor]:
        return self._averages

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        _copy(self._all, [state_dict[name] for name in self._averages])

    def restart(self) -> str:
        """Start from the weights of the model."""
        _copy(self._all, self._own)
        return "starts from the weights"


@torch.no_grad()
def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)
