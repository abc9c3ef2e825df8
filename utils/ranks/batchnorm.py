"""Batch statistics over all processes (--sync_batchnorm), including on CPUs, which PyTorch's layer
does not support.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from utils.errors import UserError


def convert_batch_norm(module: nn.Module) -> nn.Module:
    """Make the module's batch normalisation use all processes, in place. Parameters and buffers do
    not change.

    Raises UserError for a layer that does more than that of PyTorch (some of timm's also apply an
    activation).
    """
    for layer in module.modules():
        if isinstance(layer, _BatchNorm):
            if type(layer).forward is not _BatchNorm.forward:
                name = type(layer).__name__
                raise UserError(
                    f"--sync_batchnorm: {name} is not plain batch normalisation",
                    "leave out the flag",
                )
            layer.__class__ = _SyncBatchNorm
    return module


class _SyncBatchNorm(_BatchNorm):
    """Batch normalisation of [N, C, ...] with sums over the ranks; autograd differentiates the
    other operations.

    nn.SyncBatchNorm is not used, because under autocast a rank without samples would send a
    different dtype. Sums are in float64 on CPUs, and in float32 on GPUs, where float64 is slow.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        """Accept any number of dimensions; the second holds the channels."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        with torch.autocast(input.device.type, enabled=False):
            return self._normalise(input)

    def _normalise(self, input: Tensor) -> Tensor:
        channels, shape = input.shape[1], [1, input.shape[1], *[1] * (input.ndim - 2)]
        values = input.double() if input.device.type == "cpu" else input.float()
        dims = [0, *range(2, input.ndim)]
        # does not wait
        count = torch.full(
            (1,), input.numel() // channels, dtype=values.dtype, device=values.device
        )
        *sums, total = _SumOfRanks.apply(torch.cat([values.sum(dims), count])).split([channels, 1])
        total = total.detach()
        mean = sums[0] / total.clamp(min=1)  # a microbatch may have no samples on any rank
        centred = values - mean.view(shape)
        variance = _SumOfRanks.apply(centred.square().sum(dims)) / total.clamp(min=1)
        if self.track_running_stats:
            self._track(
                mean.detach(),
                variance.detach() * total / (total - 1).clamp(min=1),
                (total > 0).double(),
            )
        result = centred * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            result = result * self.weight.view(shape) + self.bias.view(shape)
        return result.to(input.dtype)

    def _track(self, mean: Tensor, variance: Tensor, any_samples: Tensor) -> None:
        assert (
            self.running_mean is not None
            and self.running_var is not None
            and self.num_batches_tracked is not None
        )
        self.num_batches_tracked.add_(any_samples.to(torch.int64).squeeze())
        share = (
            1 / self.num_batches_tracked.clamp(min=1) if self.momentum is None else self.momentum
        )
        for statistic, value in ((self.running_mean, mean), (self.running_var, variance)):
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
