"""Set up Accelerate on top of the process group that `Ranks` creates."""

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
from torch.nn.parallel import DistributedDataParallel

from utils.config.scripts import EvalConfig
from utils.config.settings import TrainConfig
from utils.errors import UserError
from utils.launch.command import precision_is_chosen
from utils.ranks.ranks import Ranks

_OF_SIZE_1 = r"Grad strides do not match bucket view strides[\s\S]*\bgrad\.sizes\(\) = \[(\d+, )*1[,\]]"


def check_precision(config: TrainConfig | EvalConfig, ranks: Ranks) -> None:
    """Raise UserError for fp16 on the CPU, where Accelerate would silently train in fp32."""
    asked = config.mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION")
    if ranks.device.type == "cpu" and asked == "fp16":
        raise UserError("mixed precision fp16 needs a GPU", "use --mixed_precision bf16 or no")


def has_native_bf16(device: torch.device) -> bool:
    """Whether the device has instructions for bfloat16; without them bfloat16 is slower than float32."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    capabilities: dict = getattr(torch.cpu, "get_capabilities", dict)()  # older versions of PyTorch lack it
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def make_accelerator(ranks: Ranks, config: TrainConfig | EvalConfig) -> Accelerator:
    """An Accelerator on top of the process group of `ranks`; collective."""
    precision: str | None = config.mixed_precision
    if precision is None and ranks.device.type == "cuda" and not precision_is_chosen():
        precision = "auto"
    precision = ranks.gather(precision)[0]  # each machine may have its own accelerate config
    if precision == "auto":
        precision = "no" if ranks.any_rank(not has_native_bf16(ranks.device)) else "bf16"
    with ranks.agree():
        return _accelerator(ranks, config, precision)


def _accelerator(ranks: Ranks, config: TrainConfig | EvalConfig, precision: str | None) -> Accelerator:
    if os.environ.pop("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", None) and ranks.is_main:
        print("ACCELERATE_GRADIENT_ACCUMULATION_STEPS is ignored; use --grad_accum")
    # Accelerate would give DDP the local rank as its GPU, but a task of a scheduler may see only one, number 0.
    os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"
    config, on_gpu = config if isinstance(config, TrainConfig) else TrainConfig(), ranks.device.type == "cuda"
    choose_kernels(ranks.device, config.deterministic or (on_gpu and config.microbatches is not None), config.tf32)
    # DDP would broadcast the running batch statistics in each update. Only evaluation uses them, and it first
    # broadcasts those of the main process (`Ranks.broadcast_buffers`).
    # PyTorch has deprecated this argument of DDP, but Accelerate does not have its successor yet.
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
    wrapping = DistributedDataParallelKwargs(
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
        comm_hook=DDPCommunicationHookType(config.comm_hook),
        find_unused_parameters=config.find_unused_parameters,
    )
    accelerator = Accelerator(
        cpu=not on_gpu,
        mixed_precision=precision,
        gradient_accumulation_steps=1,  # train.py accumulates itself: Accelerate scales partial windows wrongly
        # The samplers make exact batches, which Accelerate must pass to the ranks unchanged.
        dataloader_config=DataLoaderConfiguration(even_batches=False),
        kwargs_handlers=[wrapping],
    )
    assert accelerator.num_processes == ranks.topology.world_size
    return accelerator


def choose_kernels(device: torch.device, deterministic: bool, tf32: bool | None) -> None:
    """Set the precision of float32 products on GPUs (None: TF32 unless `deterministic`) and how kernels are chosen.

    It sets everything each time, because an earlier run in the same process may have had other settings.
    """
    tf32 = not deterministic if tf32 is None else tf32
    tf32 = tf32 and device.type == "cuda"  # not on CPUs, some of which it would make less precise
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS requires it
    torch.use_deterministic_algorithms(deterministic)
    # PyTorch would fill new tensors with NaN, to find programs that read them. That takes a kernel for each tensor.
    torch.utils.deterministic.fill_uninitialized_memory = not deterministic  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = not deterministic  # image shapes do not change, so kernels are timed once


def compile_model(accelerator: Accelerator, module: nn.Module) -> None:
    """Compile the module in place, as set by `dynamo_config` in the accelerate config.

    Accelerate would compile the DDP wrapper, whose keys begin with `_orig_mod`. If the module is compiled in place, its
    checkpoint keys do not change, evaluation also uses the compiled module, and DDP still overlaps communication.
    """
    plugin = accelerator.state.dynamo_plugin
    if plugin.backend != DynamoBackend.NO:
        if plugin.use_regional_compilation and accelerator.is_main_process:
            print("dynamo_use_regional_compilation is ignored: the whole model is compiled")
        # With None, PyTorch's default, the first smaller batch would make all later ones use slower code for any size.
        module.compile(**plugin.to_kwargs() | {"dynamic": bool(plugin.dynamic)})
        plugin.backend = DynamoBackend.NO  # done


def prepare_buckets(model: nn.Module, module: nn.Module, no_images: Tensor) -> None:
    """Run one backward pass on an empty batch, so that DDP rebuilds its gradient buckets now; collective.

    DDP rebuilds them after its first backward pass. With three or more ranks, gradients are then added in a different
    order, so a resumed run would differ from an uninterrupted one. `no_images` is [0, C, H, W]. The buffers of the
    module are restored.
    """
    if not isinstance(model, DistributedDataParallel):
        return
    # By default, DDP waits for the GPU in the first 10 updates, which cannot be changed, and in each 100th update.
    model._set_ddp_runtime_logging_sample_rate(10**9)
    # DDP warns if a gradient and its parameter have different layouts. For kernels of grey images and kernels of one
    # pixel this warning is wrong, because the stride of a dimension of size 1 has no meaning.
    warnings.filterwarnings("ignore", message=_OF_SIZE_1)
    buffers = [buffer.clone() for buffer in module.buffers()]
    with torch.compiler.set_stance("force_eager"):  # do not compile for an empty batch
        model(no_images).sum().backward()
    model.zero_grad()
    with torch.no_grad():
        for buffer, before in zip(module.buffers(), buffers, strict=True):
            buffer.copy_(before)
