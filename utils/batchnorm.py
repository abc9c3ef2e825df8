"""Batch statistics over all processes (--sync_batchnorm), on CPUs too, for which PyTorch's layer is not made."""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from utils.distributed import sum_with_gradient


def synchronise(module: nn.Module, device: torch.device) -> nn.Module:
    """The module with its batch normalisation over all processes; parameters, buffers and their names stay."""
    if device.type != "cpu":
        return nn.SyncBatchNorm.convert_sync_batchnorm(module)
    for layer in module.modules():
        if isinstance(layer, _BatchNorm):
            layer.__class__ = _SyncBatchNormOnCPU
    return module


class _SyncBatchNormOnCPU(_BatchNorm):
    """Batch normalisation with sums over the ranks in float64, and autograd for the rest."""

    def _check_input_dim(self, input: Tensor) -> None:
        """Any number of dimensions will do, the channels in the second."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        channels, values = input.shape[1], input.double()
        dims = [0, *range(2, input.ndim)]
        count = values.new_tensor([input.numel() // channels])
        sums = sum_with_gradient(torch.cat([values.sum(dims), values.square().sum(dims), count]))
        total = sums[-1].clamp(min=1)  # 0 in the backward on an empty batch that settles DDP's buckets
        mean = sums[:channels] / total
        variance = (sums[channels:-1] / total - mean.square()).clamp(min=0)
        if self.track_running_stats:
            self._track(mean.detach(), variance.detach() * total / (total - 1).clamp(min=1))
        shape = [1, channels, *[1] * (input.ndim - 2)]
        result = (values - mean.view(shape)) * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            result = result * self.weight.view(shape) + self.bias.view(shape)
        return result.to(input.dtype)

    def _track(self, mean: Tensor, variance: Tensor) -> None:
        self.num_batches_tracked.add_(1)
        share = 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)
