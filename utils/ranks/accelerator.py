"""Accelerate on top of our ranks: what it wraps, and the parts of it that need care."""

import os
import warnings

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DynamoBackend,
)
from torch import Tensor, nn

from utils.config.settings import EvalConfig, TrainConfig
from utils.ranks.ranks import Ranks


def check_precision(config: TrainConfig | EvalConfig, ranks: Ranks) -> None:
    """Raise ValueError for fp16 on the CPU, which Accelerate would silently train in fp32."""
    asked = config.mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION")
    if ranks.device.type == "cpu" and asked == "fp16":
        raise ValueError("mixed precision fp16 needs a GPU; use --mixed_precision bf16 or no")


def has_native_bf16(device: torch.device) -> bool:
    """Whether the device has instructions for bfloat16; without them it is slower than float32."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    abilities = getattr(torch.cpu, "get_capabilities", dict)()  # younger than the oldest PyTorch that will do
    return any(abilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def make_accelerator(ranks: Ranks, config: TrainConfig | EvalConfig) -> Accelerator:
    """Accelerate on top of our process group; collective.

    Raises ValueError when it sees another number of processes than we do.
    """
    precision = config.mixed_precision
    if precision == "auto":  # the same on all ranks, or it would not be one run
        precision = "no" if ranks.any_rank(not has_native_bf16(ranks.device)) else "bf16"
    return ranks.run_on_all(lambda: _accelerator(ranks, config, precision))


def _accelerator(ranks: Ranks, config: TrainConfig | EvalConfig, precision: str | None) -> Accelerator:
    if os.environ.pop("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", None) and ranks.is_main:
        print("ACCELERATE_GRADIENT_ACCUMULATION_STEPS is ignored; use --grad_accum")
    cpu = ranks.device.type == "cpu"
    if not cpu:
        torch.set_float32_matmul_precision("high")  # TF32; on some processors it would mean less than float32 as well
        torch.backends.cudnn.allow_tf32 = True
    if getattr(config, "deterministic", False):
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses
        torch.use_deterministic_algorithms(True)
    else:
        torch.backends.cudnn.benchmark = True  # image shapes do not change, so trying the kernels out pays
    # Only evaluation uses the running batch statistics, and it first broadcasts those of the main process
    # (`Ranks.broadcast_buffers`). DDP would do so in each update.
    hook = DDPCommunicationHookType(getattr(config, "comm_hook", "no"))
    # Accelerate does not know yet what comes after it.
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
    wrapping = DistributedDataParallelKwargs(
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
        comm_hook=hook,
        find_unused_parameters=getattr(config, "find_unused_parameters", False),
        static_graph=getattr(config, "static_graph", False),
    )
    accelerator = Accelerator(
        cpu=cpu,
        mixed_precision=precision,
        gradient_accumulation_steps=1,  # train.py accumulates itself: Accelerate scales a partial window wrongly
        # The samplers cut exact batches; Accelerate must deal them out as they are.
        dataloader_config=DataLoaderConfiguration(even_batches=False),
        kwargs_handlers=[wrapping],
    )
    if accelerator.num_processes != ranks.topology.world_size:
        raise ValueError(
            f"{ranks.topology.world_size} processes were launched but Accelerate made a run of "
            f"{accelerator.num_processes}; start with one of accelerate_configs/"
        )
    return accelerator


def compile_model(accelerator: Accelerator, module: nn.Module) -> None:
    """Compile the module as the accelerate config says (`dynamo_config`), in place.

    Accelerate would compile around DDP and call the result `_orig_mod`; so the keys of a checkpoint stay as they are,
    the bare module that is evaluated is compiled too, and DDP overlaps its exchange as always.
    """
    plugin = accelerator.state.dynamo_plugin
    if plugin.backend != DynamoBackend.NO:
        if plugin.use_regional_compilation and accelerator.is_main_process:
            print("dynamo_use_regional_compilation has no effect: the whole model is compiled")
        module.compile(**plugin.to_kwargs())
        plugin.backend = DynamoBackend.NO  # done


def sum_over_ranks(accelerator: Accelerator, values: Tensor) -> Tensor:
    """The element-wise sum of every rank's tensor, on every rank; exact for float64 counts below 2**53."""
    return accelerator.reduce(values, "sum")


def prepare_buckets(model: nn.Module, module: nn.Module, no_images: Tensor) -> None:
    """One backward on an empty batch, after which DDP keeps its gradient buckets as they are; collective.

    It rearranges them after its first backward. Three or more ranks would then add gradients in another order in a
    resumed run than in one that went on. `no_images` is [0, C, H, W]; the module's buffers are put back.
    """
    if model is module:
        return
    # DDP copies a gradient of another layout than the parameter's. Those of a grey image's first layer count as that,
    # and are not: the strides of a dimension of size 1 mean nothing.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    buffers = [buffer.clone() for buffer in module.buffers()]
    with torch.compiler.set_stance("force_eager"):  # nothing is compiled for the sake of no images
        model(no_images).sum().backward()
    model.zero_grad()
    with torch.no_grad():
        for buffer, before in zip(module.buffers(), buffers, strict=True):
            buffer.copy_(before)
