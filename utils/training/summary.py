"""What is printed about a model and its data: classes, parameters, FLOPs, memory, speed, and what depends on the
number of processes.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode

from utils.config.settings import TrainConfig
from utils.console import join_names, printable
from utils.data.spec import InputSpec
from utils.data.splits import Data, Split
from utils.memory import bytes_text
from utils.models.checking import has_batch_norm
from utils.ranks.ranks import Ranks
from utils.training.evaluation import same_kernels


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


_SECONDS = 2.5  # that the measurement takes


def size_of(model: nn.Module, spec: InputSpec) -> dict[str, int]:
    """The parameters of a model, and its floating-point operations for an image (see `count_flops`)."""
    return {"parameters": count_parameters(model.parameters()), "flops_per_image": count_flops(model, spec)}


def speed_of(
    model: nn.Module, spec: InputSpec, config: TrainConfig, accelerator: Accelerator, ranks: Ranks
) -> dict[str, Any]:
    """Images per second of the model alone, on a random batch on the device, on all ranks at once; collective."""
    shape = config.eval_batch_size, spec.channels, spec.height, spec.width
    layout = torch.channels_last if config.channels_last else torch.contiguous_format
    with ranks.agree():
        images = torch.randn(shape, device=accelerator.device).contiguous(memory_format=layout)
        own = _images_per_second(model.eval(), images, accelerator)
    each = ranks.gather(own)
    return {"batch_size": shape[0], "model_images_per_second": sum(each), "of_each_process": each}


@torch.no_grad()
def _images_per_second(model: nn.Module, images: Tensor, accelerator: Accelerator) -> float:
    """The median over several blocks of batches, after a warm-up."""

    from torch.utils.benchmark import Timer  # slow, and it may print a warning about CUDA

    def compute() -> None:
        with accelerator.autocast():
            model(images)

    with same_kernels():
        timer = Timer("compute()", globals={"compute": compute}, num_threads=torch.get_num_threads())
        return len(images) / timer.blocked_autorange(min_run_time=_SECONDS).median


def speed_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """The rows of the table of eval.py for the `throughput` of a record."""
    processes = len(found["of_each_process"])

    def rate(images_per_second: float) -> str:
        each = f", {images_per_second / processes:,.1f} per process" * (processes > 1)
        return f"{images_per_second:,.1f} images/s{each}"

    return [
        ("parameters", f"{found['parameters']:,}"),
        ("operations", f"{found['flops_per_image'] / 1e9:.4g} GFLOP per image"),
        ("model alone", rate(found["model_images_per_second"])),
        ("evaluation", rate(found["images_per_second"])),
    ]


_FEW = 20  # evaluation samples; one of fewer changes the accuracy by more than 5 percent


def classes_row(data: Data) -> str:
    """The number of classes, and the smallest and the largest one in training and evaluation."""
    names, parts = data.class_names, ((data.train, "training"), (data.evaluation, "evaluation"))
    labels = data.train.labels
    several = f", {labels.sum() / len(labels):.1f} per image" if labels.ndim == 2 else ""
    counts = ", ".join(f"{_range(split, names)} {word} images" for split, word in parts)
    return f"{len(names)}{several}, each with {counts}"


def warn_about_data(data: Data) -> list[str]:
    """Lines to print about the data at the start of a run."""
    lines, names = [*data.train.notes, *data.evaluation.notes], data.class_names
    for split, word in ((data.train, "training"), (data.evaluation, "evaluation")):
        absent = [names[index] for index in np.flatnonzero(_counts(split, len(names)) == 0)]
        if absent:
            lines.append(f"{len(absent)} of {len(names)} classes have no {word} image: {join_names(absent)}")
    if (count := len(data.evaluation)) < _FEW:
        fix = "give more with --eval_fraction or --eval_split"
        lines.append(f"{count} evaluation images are too few to compare models or checkpoints; {fix}")
    return [printable(line) for line in dict.fromkeys(lines)]


def _range(split: Split, names: list[str]) -> str:
    """For example `12 (class cat) to 40 (class dog)`, or `12` if all classes have the same number."""
    counts = _counts(split, len(names))
    least, most = int(counts.argmin()), int(counts.argmax())
    if counts[least] == counts[most]:
        return str(counts[least])
    return " to ".join(f"{counts[index]} (class {printable(names[index])})" for index in (least, most))


def _counts(split: Split, classes: int) -> np.ndarray:
    """The number of samples of each class, int64 [classes]."""
    labels = split.labels
    return labels.sum(0, dtype=np.int64) if labels.ndim == 2 else np.bincount(labels, minlength=classes)
