"""The process group, the device, and everything that the ranks say to each other."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs
from torch import Tensor, nn

from utils.config import EvalConfig, TrainConfig
from utils.errors import USER_ERRORS, LostRank, is_lost_rank, is_main_process, leave, lost_rank_text, one_line
from utils.launch import Topology, read_topology, threads_per_process

Result = TypeVar("Result")
_PATIENCE = timedelta(days=1)  # for slow work on one rank, such as a download; a dead rank is noticed much sooner


class Ranks:
    """The processes of the run: this one's place among them, its device, and their agreements.

    Its public methods are collective: all ranks call them, or none.
    """

    def __init__(self, topology: Topology, threads: int | None = None, timeout: float = 600.0):
        self.topology, self.timeout = topology, timedelta(seconds=timeout)
        self.device = _device(topology)
        self.threads = threads or threads_per_process(topology)
        os.environ["OMP_NUM_THREADS"] = str(self.threads)  # Accelerate would set its own number where there is none
        torch.set_num_threads(self.threads)
        self.backend, self._store, self._calls = "none", None, 0

    @property
    def is_main(self) -> bool:
        return self.topology.is_main

    def join(self) -> None:
        """Make the process group, if there are several processes; Accelerate adopts the one it finds."""
        if self.topology.world_size == 1:
            return
        self.backend = "nccl" if self.device.type == "cuda" else "gloo"
        store, rank, world_size = next(dist.rendezvous("env://", timeout=self.timeout))
        # A restarted attempt must not read the addresses that the one before it left in the launcher's store.
        store = dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        dist.init_process_group(
            self.backend, store=dist.PrefixStore("group", store), rank=rank, world_size=world_size, timeout=self.timeout
        )
        self._store = dist.PrefixStore("lockstep", store)

    def together(self, action: Callable[[], Result], main_first: bool = False) -> Result:
        """Run `action` on every rank; an error on any of them is raised on all.

        With `main_first` each machine's first rank runs it alone and the others after it, so that they find the files
        that it downloaded or decoded. They wait for it in the store, which no collective's timeout cuts short.
        """
        if self._store is None:
            return action()
        if not main_first:
            return self._agreed(action)
        mine = self.topology.local_rank == 0
        first = self._agreed(action if mine else _nothing)
        others = self._agreed(_nothing if mine else action)
        return first if mine else others

    def _agreed(self, action: Callable[[], Any]) -> Any:
        self._calls += 1
        key, result, error = f"together-{self._calls}", None, None
        try:
            result = action()
        except USER_ERRORS as raised:
            error = raised
        self._store.set(f"{key}-{self.topology.rank}", one_line(error) if error else "")
        if self.is_main:
            keys = [f"{key}-{rank}" for rank in range(self.topology.world_size)]
            self._store.wait(keys, _PATIENCE)
            texts = [self._store.get(k).decode() for k in keys]
            self._store.set(key, next((text for text in texts if text), ""))
        self._store.wait([key], _PATIENCE)
        verdict = self._store.get(key).decode()
        if error:
            raise error
        if verdict:
            raise ValueError(verdict)
        return result

    def share(self, value: Any) -> Any:
        """The main process's `value` on every rank."""
        values = [value]
        if self._store is not None:
            dist.broadcast_object_list(values, device=self.device)
        return values[0]

    def gather(self, value: Any) -> list:
        """Every rank's `value`, in the order of the ranks."""
        values = [value] * self.topology.world_size
        if self._store is not None:
            dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        if self._store is not None:
            dist.barrier()

    def same_buffers(self, model: nn.Module) -> None:
        """Give every rank the main process's buffers (batch statistics), as DDP does before a training forward."""
        if self._store is not None:
            for buffer in model.buffers():
                dist.broadcast(buffer, 0)

    def _explain(self, error: BaseException) -> tuple[BaseException, bool]:
        """What to say of an error that ends this rank, and whether this rank is to say it. Not collective.

        The main process speaks, for an error of another rank too. Another rank speaks up only if the main process,
        told of the error and its connection cut, stays silent for three seconds (it may be waiting for its GPU).
        """
        if self._store is None:
            return error, self.is_main
        if is_lost_rank(error):
            error = self._error_of_another_rank() or LostRank(lost_rank_text(error))
        elif not self.is_main:
            self._store.set("error", f"rank {self.topology.rank}: {one_line(error)}")
        if self.is_main:
            self._store.set("shown", "yes")
            return error, True
        if dist.is_initialized():
            dist.destroy_process_group()
        return error, not self._hears("shown", seconds=3)

    def _error_of_another_rank(self) -> BaseException | None:
        return ValueError(self._store.get("error").decode()) if self._hears("error", seconds=2) else None

    def _hears(self, key: str, seconds: float) -> bool:
        try:
            self._store.wait([key], timedelta(seconds=seconds))
            return True
        except RuntimeError:
            return False

    def describe(self) -> str:
        """This rank's place, for the start table."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else f"{self.threads} threads"
        return f"{socket.gethostname()}, {self.device} ({name}), process {os.getpid()}"


def _nothing() -> None:
    return None


def _device(topology: Topology) -> torch.device:
    """This rank's GPU, or the CPU where there is none or it was asked for."""
    if not torch.cuda.is_available() or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes"):
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if topology.local_world_size > gpus:
        raise ValueError(
            f"{topology.local_world_size} processes on this machine, but {gpus} GPU{'s' * (gpus != 1)}; "
            f"launch with --num_processes {gpus}, or on the CPU with accelerate_configs/2cpu.yaml"
        )
    device = torch.device("cuda", topology.local_rank)
    torch.cuda.set_device(device)  # first of all, or every rank would open a context on GPU 0
    return device


@contextmanager
def ranks_of_launch(prog: str, config: TrainConfig | EvalConfig) -> Iterator[Ranks]:
    """This process's place among those launched; an error inside ends it with one line on one rank and code 2."""
    ranks = None
    try:
        ranks = Ranks(read_topology(), config.threads, config.timeout)
        yield ranks
    except Exception as error:
        if not isinstance(error, USER_ERRORS) and not is_lost_rank(error):
            raise  # a bug: its traceback is what helps
        explained, speaks = ranks._explain(error) if ranks else (error, is_main_process())
        leave(explained, prog, speaks, config.traceback)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def make_accelerator(ranks: Ranks, config: TrainConfig | EvalConfig) -> Accelerator:
    """Accelerate on top of our process group; ValueError when it sees another number of processes than we do."""
    if os.environ.pop("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", None) and ranks.is_main:
        print("ACCELERATE_GRADIENT_ACCUMULATION_STEPS is ignored; use --grad_accum")
    cpu, mixed_precision = ranks.device.type == "cpu", config.mixed_precision
    if cpu and (mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION")) == "fp16":
        raise ValueError("mixed precision fp16 needs a GPU; use --mixed_precision bf16 or no")
    accelerator = Accelerator(
        cpu=cpu,
        mixed_precision=mixed_precision,
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
