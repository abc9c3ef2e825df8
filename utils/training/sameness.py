"""Which parts of a run depend on the number of processes."""

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from utils.config.settings import TrainConfig
from utils.models.batch_norm import has_batch_norm


def differences(config: TrainConfig, module: nn.Module, grad_accum: int, microbatches: int) -> str:
    """What would differ on another number of processes, besides rounding, and how to avoid it; empty if nothing."""
    if config.microbatches:
        return ""
    parts = []
    if has_batch_norm(module) and not config.sync_batchnorm:
        parts.append("batch statistics (not with --sync_batchnorm)")
    elif has_batch_norm(module) and grad_accum > 1:
        parts.append("batch statistics (not with --grad_accum 1)")
    if has_dropout(module):
        parts.append(f"dropout masks (unless processes x accumulation is {microbatches})")
    if config.comm_hook != "no":
        parts.append(f"gradients, rounded to {config.comm_hook} (not with --comm_hook no)")
    if not parts:
        return ""
    return f"on another number of processes, besides rounding: {', '.join(parts)}"


def has_dropout(module: nn.Module) -> bool:
    """Whether a layer draws random numbers in training: dropout, also of attention weights, or stochastic depth."""
    names = ("dropout", "drop_prob", "drop_rate", "attention_dropout")
    for layer in module.modules():
        rates = [getattr(layer, name, 0.0) for name in names]
        if isinstance(layer, _DropoutNd) or type(layer).__name__ == "StochasticDepth":
            rates.append(layer.p)
        if any(isinstance(rate, int | float) and rate > 0 for rate in rates):
            return True
    return False
