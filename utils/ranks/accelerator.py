"""Set up Accelerate on top of the process group that `Ranks` creates."""

import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DistributedType,
    DynamoBackend,
    FullyShardedDataParallelPlugin,
    ProjectConfiguration,
    patch_environment,
)
from accelerate.utils.memory import clear_device_cache
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from utils.console import say
from utils.errors import UserError
from utils.launch import is_set, precision_is_chosen, shards_model
from utils.ranks.ranks import Ranks
from utils.settings.ranks import RankSettings


def check_precision(config: RankSettings, ranks: Ranks) -> None:
    """Raise UserError for fp16 on the CPU, where Accelerate would silently train in fp32."""
    asked = config.mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION")
    if ranks.device.type == "cpu" and asked == "fp16":
        raise UserError("mixed precision fp16 needs a GPU", "use --mixed_precision bf16 or no")


_LONG = 10_000  # updates; minutes of training with most networks
_NEED_FULL = ("muon", "adafactor")
_FULL = "needs full matrices, but with FSDP each process has only some rows"
_OF_DDP = "is a setting of DDP, which FSDP replaces"


def check_sharding(
    config: RankSettings, ranks: Ranks, *, optimizer: str, fixed_order: bool
) -> None:
    """Raise UserError for settings that do not work with FSDP, if the accelerate config asks for
    it.

    `fixed_order`: whether gradients are added up in one fixed order (--microbatches).
    """
    if not shards_model() or ranks.topology.world_size == 1:
        return
    on_gpu = ranks.device.type == "cuda"
    without = "leave it out, or train without FSDP"
    asked = config.mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION")
    ignored = os.environ.get("FSDP_IGNORED_MODULES", "None") != "None"
    order = "with FSDP the order depends on the number of processes"
    adamw = "use adamw, or train without FSDP"
    precision = "use --mixed_precision bf16 or no"
    hidden = "hide the GPUs: CUDA_VISIBLE_DEVICES=-1"
    unused_gpu = "FSDP would use the GPU although the CPU is selected"
    for refused, problem, fix in (
        (os.environ.get("FSDP_VERSION") != "2", "FSDP 1 is not supported",
         "set fsdp_version: 2 in fsdp_config, or FSDP_VERSION=2"),
        (fixed_order, f"--microbatches adds gradients in a fixed order, but {order}", without),
        (optimizer in _NEED_FULL, f"--optimizer {optimizer} {_FULL}", adamw),
        (config.find_unused_parameters, f"--find_unused_parameters {_OF_DDP}", without),
        (config.comm_hook != "no", f"--comm_hook {config.comm_hook} {_OF_DDP}", without),
        (asked == "fp16", "mixed precision fp16 is not supported with FSDP", precision),
        (is_set("FSDP_ACTIVATION_CHECKPOINTING"), "fsdp_activation_checkpointing is not supported",
         "remove it from fsdp_config, and use --grad_checkpointing"),
        (ignored, "fsdp_ignored_modules is not supported", "remove it from fsdp_config"),
        (on_gpu and ranks.backend == "gloo", "--backend gloo does not work with FSDP on GPUs",
         "leave it out"),
        (not on_gpu and torch.cuda.is_available(), unused_gpu, hidden),
    ):  # fmt: skip
        if refused:
            raise UserError(problem, fix)


def has_native_bf16(device: torch.device) -> bool:
    """Whether the device has instructions for bfloat16; without them bfloat16 is slower than
    float32.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    # older versions of PyTorch lack it
    capabilities: dict = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def leave_run() -> None:
    """Free the memory of a run that has ended; the next one starts as in a new process."""
    AcceleratorState._reset_state(True)  # it keeps what FSDP and the compiler have changed
    torch.compiler.reset()  # after eight models, PyTorch would stop compiling
    clear_device_cache(garbage_collection=True)


def make_accelerator(
    ranks: Ranks, config: RankSettings, *, fixed_order: bool, trackers: Sequence[str] = ()
) -> Accelerator:
    """An Accelerator on top of the process group of `ranks`; collective.

    `fixed_order` as in `check_sharding`. `trackers` are those of --report_to.
    """
    precision = config.mixed_precision
    if precision is None and ranks.device.type == "cuda" and not precision_is_chosen():
        precision = "auto"
    precision = ranks.gather(precision)[0]  # each machine may have its own accelerate config
    if precision == "auto":
        precision = "no" if ranks.any_rank(not has_native_bf16(ranks.device)) else "bf16"
    with ranks.agree():
        accelerator = _accelerator(ranks, config, precision, trackers)
        # After the constructor, which turns TF32 on if the model is to be compiled in float32.
        fixed = config.deterministic or (fixed_order and ranks.device.type == "cuda")
        choose_kernels(ranks.device, fixed, config.tf32)
        return accelerator


def _accelerator(
    ranks: Ranks, config: RankSettings, precision: str | None, trackers: Sequence[str]
) -> Accelerator:
    if os.environ.pop("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", None):
        say("ACCELERATE_GRADIENT_ACCUMULATION_STEPS is ignored; use --grad_accum")
    # Accelerate would give DDP the local rank as its GPU, but a task of a scheduler may see only
    # one, number 0.
    os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"
    on_gpu = ranks.device.type == "cuda"
    shards = shards_model()
    alone = {}
    if ranks.topology.world_size == 1:
        # Accelerate would connect to an address, which need not answer.
        alone = {"LOCAL_RANK": "-1", "PMI_SIZE": "1"}
        if shards:
            say("FSDP has no effect: one process has the whole model")
            shards = False
    plugin = _fsdp_plugin(on_gpu) if shards else None
    # With FSDP, autocast would keep a copy of each parameter in bfloat16 until the end of the pass.
    wrapping = AutocastKwargs(cache_enabled=False) if shards else _ddp_settings(config)
    with patch_environment(ACCELERATE_USE_FSDP=str(shards).lower(), **alone):
        accelerator = Accelerator(
            cpu=not on_gpu,
            mixed_precision=precision,
            kwargs_handlers=[wrapping],
            fsdp_plugin=plugin,
            log_with=[*trackers] or None,  # it warns about an empty list
            project_config=ProjectConfiguration(logging_dir="."),  # until the run folder is known
            # train.py accumulates itself: Accelerate scales partial windows wrongly
            gradient_accumulation_steps=1,
            # The samplers make exact batches, which Accelerate must pass to the ranks unchanged.
            dataloader_config=DataLoaderConfiguration(even_batches=False),
        )
        if plugin and not on_gpu:
            use_fsdp(plugin)
    # Accelerate takes NCCL for granted, whose `gather` gloo does not have
    if on_gpu and ranks.backend == "gloo":
        PartialState().backend = "gloo"
    assert accelerator.num_processes == ranks.topology.world_size
    return accelerator


def _ddp_settings(config: RankSettings) -> DistributedDataParallelKwargs:
    # DDP would broadcast the running batch statistics in each update. Only evaluation uses them,
    # and it first broadcasts those of the main process (`Ranks.broadcast_buffers`). PyTorch has
    # deprecated this argument of DDP, but Accelerate does not have its successor yet.
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
    return DistributedDataParallelKwargs(
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
        comm_hook=DDPCommunicationHookType(config.comm_hook),
        find_unused_parameters=config.find_unused_parameters,
    )


def _fsdp_plugin(on_gpu: bool) -> FullyShardedDataParallelPlugin:
    """The FSDP2 settings of the accelerate config, which `accelerate launch` passes as environment
    variables.
    """
    if is_set("FSDP_OFFLOAD_PARAMS") and not on_gpu:
        say("fsdp_offload_params is ignored: on CPUs there is nothing to offload")
    return FullyShardedDataParallelPlugin(
        # Autocast chooses the precision, as with DDP. FSDP2's own mixed precision would also reduce
        # gradients in bfloat16.
        mixed_precision_policy=MixedPrecisionPolicy(),
        cpu_offload=None if on_gpu else False,
        cpu_ram_efficient_loading=False,  # only for models of the transformers library
        # `save_state` writes whole tensors, which any number of processes can load
        state_dict_type="FULL_STATE_DICT",
    )


def use_fsdp(plugin: FullyShardedDataParallelPlugin) -> None:
    """Make Accelerate use FSDP2 on CPUs, too. By itself it selects FSDP only on GPUs."""
    state = AcceleratorState()
    state.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = plugin
    PartialState().distributed_type = DistributedType.FSDP  # what a new AcceleratorState copies


def choose_kernels(device: torch.device, deterministic: bool, tf32: bool | None) -> None:
    """Set the precision of float32 products on GPUs (None: TF32 unless `deterministic`) and how
    kernels are chosen.

    It sets everything each time, because an earlier run in the same process may have had other
    settings.
    """
    tf32 = not deterministic if tf32 is None else tf32
    tf32 = tf32 and device.type == "cuda"  # not on CPUs, some of which it would make less precise
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS requires it
        # The switches of NVLink may add up in another order. NCCL reads this at the first
        # collective over it, and none comes before.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    torch.use_deterministic_algorithms(deterministic)
    # PyTorch would fill new tensors with NaN, to find programs that read them. That takes a kernel
    # for each tensor.
    of_tensors: Any = torch.utils.deterministic
    of_tensors.fill_uninitialized_memory = not deterministic
    torch.backends.cudnn.benchmark = False  # training may set it, see `search_pays`


def search_pays(updates: int) -> bool:
    """Whether cuDNN should search for its fastest kernels, with this many updates left.

    With the search, the first ten updates of a ResNet-50 took 14.5 seconds on an H100.
    """
    return updates >= _LONG and not torch.are_deterministic_algorithms_enabled()


def compile_model(accelerator: Accelerator, module: nn.Module) -> None:
    """Compile the module in place, as set by `dynamo_config` in the accelerate config.

    Accelerate would compile the DDP wrapper, whose keys begin with `_orig_mod`. If the module is
    compiled in place, its checkpoint keys do not change, evaluation also uses the compiled module,
    and DDP still overlaps communication.
    """
    plugin = accelerator.state.dynamo_plugin
    if plugin.backend != DynamoBackend.NO:
        if plugin.use_regional_compilation:
            say("dynamo_use_regional_compilation is ignored: the whole model is compiled")
        # With None, PyTorch's default, the first smaller batch would make all later ones use slower
        # code for any size.
        module.compile(**plugin.to_kwargs() | {"dynamic": bool(plugin.dynamic)})
        plugin.backend = DynamoBackend.NO  # or Accelerate would compile it again
