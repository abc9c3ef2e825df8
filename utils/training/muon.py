"""Muon for hidden matrices and AdamW for all other parameters, as one optimizer."""

from typing import Any

import torch
from torch import Tensor

from utils.training.groups import Groups


class MuonAndAdamW(torch.optim.Optimizer):
    """torch's Muon on the groups with `hidden`, and torch's AdamW on the others.

    Both work on the groups and the state of this optimizer, so it is saved, restored and scheduled like any other.
    """

    def __init__(self, groups: Groups, lr: float, muon: dict[str, Any], adamw: dict[str, Any]):
        placeholder = [torch.zeros(1, 1)]  # the groups are given before each step
        self._muon = _MuonOfKernels(placeholder, lr=lr, **muon)
        self._adamw = torch.optim.AdamW(placeholder, lr=lr, **adamw)
        super().__init__([self._of(group).defaults | group for group in groups], {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step of both optimizers."""
        for part in (self._muon, self._adamw):
            part.state = self.state
            part.param_groups = [group for group in self.param_groups if self._of(group) is part]
            part.step()

    def _of(self, group: dict[str, Any]) -> torch.optim.Optimizer:
        return self._muon if group["hidden"] else self._adamw


class _MuonOfKernels(torch.optim.Muon):
    """torch's Muon, which sees a convolution kernel as the matrix [out, in * height * width] (Jordan et al., 2024)."""

    def _init_group(self, group, params_with_grad, grads, muon_momentum_bufs):
        for kernel in group["params"]:
            if kernel.grad is not None:
                state, order = self.state[kernel], _memory_order(kernel)
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(kernel)  # the gradient may have another layout
                params_with_grad.append(kernel.permute(order).view(len(kernel), -1))
                grads.append(kernel.grad.permute(order).reshape(len(kernel), -1))
                muon_momentum_bufs.append(state["momentum_buffer"].permute(order).view(len(kernel), -1))
        return False  # no complex numbers


def _memory_order(kernel: Tensor) -> list[int]:
    """The dimensions, output first, then the others as in memory: permuted so, a kernel can be viewed as a matrix."""
    return [0, *sorted(range(1, kernel.ndim), key=kernel.stride, reverse=True)]
