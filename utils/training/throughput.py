"""The size and the speed of a model in evaluation (eval.py --throughput)."""

from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.benchmark import Timer

from utils.config.settings import TrainConfig
from utils.data.spec import InputSpec
from utils.ranks.ranks import Ranks
from utils.training.evaluation import same_kernels
from utils.training.summary import count_flops, count_parameters

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
