"""What is printed about a model: its parameters, FLOPs and memory, and what depends on the number of processes."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode

from utils.config.settings import TrainConfig
from utils.data.spec import InputSpec
from utils.memory import bytes_text
from utils.models.batch_norm import has_batch_norm


def describe_parameters(module: nn.Module) -> str:
    """How many parameters a model has, and how many of them are trained, if not all."""
    total = count_parameters(module.parameters())
    trained = count_parameters(p for p in module.parameters() if p.requires_grad)
    return f"{total:,} parameters" + (f", {trained:,} of them trained" if trained < total else "")


def count_parameters(parameters: Iterable[nn.Parameter]) -> int:
    """The number of values in these parameters."""
    return sum(parameter.numel() for parameter in parameters)


def count_flops(module: nn.Module, spec: InputSpec) -> int:
    """The floating-point operations of a model for an image; a multiply-add counts as two.

    Only convolutions, matrix products and attention are counted. With test-time augmentation, all views count.
    """
    was_training = module.training
    device = next((parameter.device for parameter in module.parameters()), None)
    image = torch.zeros(1, spec.channels, spec.height, spec.width, device=device)
    eager = torch.compiler.set_stance("force_eager")
    # Without gradients, PyTorch computes attention by a function that the counter does not know.
    with eager, torch.enable_grad(), FlopCounterMode(display=False) as counter:
        module.eval()(image)
    module.train(was_training)
    return counter.get_total_flops()


def memory_line(module: nn.Module, optimizer: Optimizer, average: Iterable[Tensor] = ()) -> str:
    """How much memory the weights, gradients and optimizer state of a process take; call it after an update.

    `average` has the tensors of --ema_decay.
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    state = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
    sizes: dict[str, Sequence[Tensor]] = {
        "weights and buffers": [*module.parameters(), *module.buffers()],
        "gradients": trained,
        "optimizer state": state,
        "average of the weights": list(average),
    }
    texts = (
        f"{name} {bytes_text(sum(tensor.nbytes for tensor in tensors))}" for name, tensors in sizes.items() if tensors
    )
    return f"memory: {', '.join(texts)}; the rest is mostly activations, which grow with the batch, and libraries"


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
