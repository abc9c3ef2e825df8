"""An exponential moving average (EMA) of the weights and buffers of a model."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from utils.config import require
from utils.models.sharded import copy_into, distinct_state, local_shard


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
        self._module = module
        own = self._own()
        self._state = {name: tensor.clone() for name, tensor in own.items()}
        self._weights = [*map(local_shard, own.values())]  # in the memory of the model
        self._is_checked = False
        self._averages = [*map(local_shard, self._state.values())]
        self._copied = sum(not tensor.is_floating_point() for tensor in self._weights)

    def _own(self) -> dict[str, Tensor]:
        state = distinct_state(self._module).items()
        return dict(sorted(state, key=lambda item: item[1].is_floating_point()))  # these come last

    def _check(self) -> None:
        # Once, after the first update: FSDP2 with offload replaces memory that is not page-locked.
        now = map(local_shard, self._own().values())
        same = all(a.data_ptr() == b.data_ptr() for a, b in zip(now, self._weights, strict=True))
        fix = "use fsdp_offload_params: false, or leave out --ema_decay"
        require(same, "--ema_decay: the weights have other memory after an update", fix)
        self._is_checked = True

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Average in the weights after update `step`, counted from 0.

        Does not wait for the device. Raises UserError if the weights have moved in memory.
        """
        if not self._is_checked:
            self._check()
        share = 1 - min(self.decay, (1 + step) / (10 + step))
        first = self._copied
        torch._foreach_lerp_(self._averages[first:], self._weights[first:], share)
        _copy(self._averages[:first], self._weights[:first])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """In this context the model has the averages; afterwards it has its own weights again."""
        before = [tensor.clone() for tensor in self._weights]
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
def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)
