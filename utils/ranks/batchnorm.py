"""Batch statistics over all processes (--sync_batchnorm), including on CPUs, which PyTorch's layer
does not support.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from utils.config import require


def convert_batch_norm(module: nn.Module, fused: bool = False) -> nn.Module:
    """Make the module's batch normalisation use all processes, in place. Parameters and buffers do
    not change.

    `fused`: with PyTorch's layer, which has a few kernels, but runs only on GPUs, and only if a
    microbatch has samples on at least one rank. Raises UserError for a layer that does more than
    that of PyTorch (some of timm's also apply an activation).
    """
    for layer in module.modules():
        if isinstance(layer, _BatchNorm):
            is_plain = type(layer).forward is _BatchNorm.forward
            problem = f"--sync_batchnorm: {type(layer).__name__} is not plain batch normalisation"
            require(is_plain, problem, "leave it out")
            layer.__class__ = _FusedSyncBatchNorm if fused else _SyncBatchNorm
    return module


class _FusedSyncBatchNorm(nn.SyncBatchNorm):
    """PyTorch's layer for GPUs. With several ranks, its forward pass waits for the GPU."""

    process_group = None  # all ranks; set here, because the constructor of another class has run

    def forward(self, input: Tensor) -> Tensor:
        if input.numel():
            return super().forward(input)
        # In float32, because the other ranks send their sums in it, also under autocast. `zeros`
        # gives this rank gradients, which are 0: FSDP2 waits for them.
        input = input.float()
        zeros = nn.functional.batch_norm(input, None, None, self.weight, self.bias, training=True)
        return super().forward(input) + zeros


class _SyncBatchNorm(_BatchNorm):
    """Batch normalisation of [N, C, ...] with sums over the ranks; autograd differentiates the
    other operations.

    Sums are in float64 on CPUs, and in float32 on GPUs, where float64 is slow.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        """Accept any number of dimensions; the second holds the channels."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        with torch.autocast(input.device.type, enabled=False):
            return self._normalise(input)

    def _normalise(self, input: Tensor) -> Tensor:
        channels = input.shape[1]
        shape = [1, -1, *[1] * (input.ndim - 2)]
        values = input.double() if input.device.type == "cpu" else input.float()
        dims = [0, *range(2, input.ndim)]
        count = values.new_full((1,), input.numel() // channels)  # does not wait
        *sums, total = _SumOfRanks.apply(torch.cat([values.sum(dims), count])).split([channels, 1])
        total = total.detach()
        mean = sums[0] / total.clamp(min=1)  # a microbatch may have no samples on any rank
        centred = values - mean.view(shape)
        variance = _SumOfRanks.apply(centred.square().sum(dims)) / total.clamp(min=1)
        if self.track_running_stats:
            unbiased = variance.detach() * total / (total - 1).clamp(min=1)
            self._track(mean.detach(), unbiased, (total > 0).double())
        result = centred * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            result = result * self.weight.view(shape) + self.bias.view(shape)
        return result.to(input.dtype)

    def _track(self, mean: Tensor, variance: Tensor, any_samples: Tensor) -> None:
        batches: Any = self.num_batches_tracked
        batches.add_(any_samples.to(torch.int64).squeeze())
        share = 1 / batches.clamp(min=1) if self.momentum is None else self.momentum
        statistics: Any = self.running_mean, self.running_var
        for statistic, value in zip(statistics, (mean, variance), strict=True):
            # Without samples the statistic does not change. An `if` would wait for the GPU.
            statistic.add_((share * any_samples * (value - statistic)).to(statistic.dtype))


class _SumOfRanks(torch.autograd.Function):
    """The element-wise sum of every rank's tensor; its gradients flow back to all ranks;
    collective.
    """

    @staticmethod
    def forward(ctx, values: Tensor) -> Tensor:
        values = values.clone()
        if dist.is_initialized():
            dist.all_reduce(values)
        return values

    @staticmethod
    # the loss of each rank depends on the values of all ranks
    def backward(ctx, gradient: Tensor) -> Tensor:
        return _SumOfRanks.forward(ctx, gradient)
