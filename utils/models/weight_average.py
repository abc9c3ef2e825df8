"""An exponential moving average (EMA) of the weights and buffers of a model."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from utils.models.sharded import copy_into, distinct_state, local


class WeightAverage:
    """The averages, by the names of `distinct_state`. Integer and boolean buffers are copied
    instead.

    Those of a sharded model are sharded in the same way.

    Update t, counted from 0, multiplies them by d = min(`decay`, (1 + t) / (10 + t)) and adds 1 - d
    times the new weights. This is TensorFlow's ExponentialMovingAverage with `num_updates`: the
    decay rises with t, so that the initial weights are forgotten soon.
    """

    def __init__(self, module: nn.Module, decay: float):
        self.decay = decay
        own = distinct_state(module)
        self._state = {name: tensor.clone() for name, tensor in own.items()}
        # in the memory of the model
        self._weights = {name: local(tensor) for name, tensor in own.items()}
        self._averages = {name: local(tensor) for name, tensor in self._state.items()}
        self._averaged = [
            name for name, tensor in self._weights.items() if tensor.is_floating_point()
        ]
        self._copied = self._weights.keys() - self._averaged

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Average in the weights after update `step`, counted from 0.

        Does not wait for the device.
        """
        averages, weights = (
            [tensors[name] for name in self._averaged]
            for tensors in (self._averages, self._weights)
        )
        torch._foreach_lerp_(averages, weights, 1 - min(self.decay, (1 + step) / (10 + step)))
        _copy({name: self._averages[name] for name in self._copied}, self._weights)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """In this context the model has the averages; afterwards it has its own weights again."""
        before = {name: tensor.clone() for name, tensor in self._weights.items()}
        _copy(self._weights, self._averages)
        try:
            yield
        finally:
            _copy(self._weights, before)

    def state_dict(self) -> dict[str, Tensor]:
        return self._state

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        for name, average in self._state.items():
            copy_into(average, state_dict[name])


@torch.no_grad()
def _copy(targets: Mapping[str, Tensor], sources: Mapping[str, Tensor]) -> None:
    if targets:
        torch._foreach_copy_([*targets.values()], [sources[name] for name in targets])
