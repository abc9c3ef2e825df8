"""Accelerate on top of our ranks: what it wraps, and the parts of it that need care."""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs
from torch import Tensor, nn

from utils.config import EvalConfig, TrainConfig
from utils.distributed import Ranks


def check_precision(config: TrainConfig | EvalConfig, ranks: Ranks) -> None:
    """Raise ValueError for fp16 on the CPU, which Accelerate would silently train in fp32."""
    asked = config.mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION")
    if ranks.device.type == "cpu" and asked == "fp16":
        raise ValueError("mixed precision fp16 needs a GPU; use --mixed_precision bf16 or no")


def make_accelerator(ranks: Ranks, config: TrainConfig | EvalConfig) -> Accelerator:
    """Accelerate on top of our process group; ValueError when it sees another number of processes than we do."""
    if os.environ.pop("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", None) and ranks.is_main:
        print("ACCELERATE_GRADIENT_ACCUMULATION_STEPS is ignored; use --grad_accum")
    cpu = ranks.device.type == "cpu"
    if getattr(config, "deterministic", False):
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses
        torch.use_deterministic_algorithms(True)
    else:
        torch.backends.cudnn.benchmark = True  # image shapes do not change, so trying the kernels out pays
    accelerator = Accelerator(
        cpu=cpu,
        mixed_precision=config.mixed_precision,
        gradient_accumulation_steps=1,  # train.py accumulates itself: Accelerate scales a partial window wrongly
        # The samplers cut exact batches; Accelerate must deal them out as they are.
        dataloader_config=DataLoaderConfiguration(even_batches=False, non_blocking=not cpu),
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )
    if accelerator.num_processes != ranks.topology.world_size:
        raise ValueError(
            f"{ranks.topology.world_size} processes were launched but Accelerate made a run of "
            f"{accelerator.num_processes}; start with one of accelerate_configs/"
        )
    return accelerator


def sum_over_ranks(accelerator: Accelerator, values: Tensor) -> Tensor:
    """The element-wise sum of every rank's tensor, on every rank; exact for float64 counts below 2**53."""
    return accelerator.reduce(values, "sum")


def settle_buckets(model: nn.Module, module: nn.Module, no_images: Tensor) -> None:
    """One backward on an empty batch, after which DDP keeps its gradient buckets as they are.

    It rearranges them after its first backward. Three or more ranks would then add gradients in another order in a
    resumed run than in one that went on. `no_images` is [0, C, H, W]; the module's buffers are put back.
    """
    if model is module:
        return
    buffers = [buffer.clone() for buffer in module.buffers()]
    model(no_images).sum().backward()
    model.zero_grad()
    with torch.no_grad():
        for buffer, before in zip(module.buffers(), buffers, strict=True):
            buffer.copy_(before)
