"""The process group, the device, and everything that the ranks say to each other."""

import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from utils.config import EvalConfig, TrainConfig
from utils.errors import (
    USER_ERRORS,
    LostRank,
    is_lost_rank,
    is_main_process,
    is_out_of_memory,
    leave,
    lost_rank_text,
    one_line,
)
from utils.launch import Topology, read_topology, threads_per_process

Result = TypeVar("Result")
_PATIENCE = timedelta(days=1)  # for slow work on one rank, such as a download; a launcher ends it if that rank dies


class Ranks:
    """The processes of the run: this one's place among them, its device, and their agreements.

    `join`, `together`, `gather`, `share`, `same_buffers` and `part` are collective: all ranks call them, or none.
    """

    def __init__(self, topology: Topology, threads: int | None = None, timeout: float = 600.0):
        self.topology, self.timeout = topology, timedelta(seconds=timeout)
        self.device = _device(topology)
        self.threads = threads or threads_per_process(topology)
        if self.threads > (os.cpu_count() or 1):
            raise ValueError(f"--threads {self.threads}: this machine has {os.cpu_count()} processor cores")
        os.environ["OMP_NUM_THREADS"] = str(self.threads)  # Accelerate would set its own number where there is none
        torch.set_num_threads(self.threads)
        self.backend, self._store, self._calls, self._all_know = "none", None, 0, False

    @property
    def is_main(self) -> bool:
        return self.topology.is_main

    def join(self) -> None:
        """Make the process group, if there are several processes; Accelerate adopts the one it finds."""
        if self.is_main and self.device.type == "cpu" and not _cpu_was_asked_for():
            several = self.topology.world_size > 1
            print(
                "No GPU is visible: running on the CPU" + f", {self.topology.world_size} processes over gloo" * several
            )
        if self.topology.world_size == 1:
            return
        self.backend = "nccl" if self.device.type == "cuda" else "gloo"
        try:
            self._store = self._meet()
        except (RuntimeError, ValueError) as error:
            where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise ValueError(
                f"the processes could not meet at {where} over {self.backend} ({one_line(error)[:160]}); check "
                "that the port is free there, that the address can be reached, and the network interface"
            ) from error

    def _meet(self) -> dist.Store:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=self.timeout))
        # A restarted attempt must not read the addresses that the one before it left in the launcher's store.
        store = dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        dist.init_process_group(
            self.backend, store=dist.PrefixStore("group", store), rank=rank, world_size=world_size, timeout=self.timeout
        )
        return dist.PrefixStore("lockstep", store)

    def together(self, action: Callable[[], Result], main_first: bool = False) -> Result:
        """Run `action` on every rank; an error on any of them is raised on all.

        With `main_first` each machine's first rank runs it alone and the others after it, so that they find the files
        that it downloaded or decoded. They wait for it in the store, which no collective's timeout cuts short.
        """
        if self._store is None:
            return action()
        if not main_first:
            return self._agreed(action, self.timeout)
        mine = self.topology.local_rank == 0
        first = self._agreed(action if mine else _nothing, _PATIENCE)
        others = self._agreed(_nothing if mine else action, _PATIENCE)
        return first if mine else others

    def _agreed(self, action: Callable[[], Any], patience: timedelta) -> Any:
        self._calls += 1
        key, result, error = f"together-{self._calls}", None, None
        try:
            result = action()
        except USER_ERRORS as raised:
            error = raised
        who = "" if self.is_main else f"rank {self.topology.rank}: "
        self._store.set(f"{key}-{self.topology.rank}", who + one_line(error) if error else "")
        if self.is_main:
            keys = [f"{key}-{rank}" for rank in range(self.topology.world_size)]
            self._store.wait(keys, patience)
            texts = [self._store.get(k).decode() for k in keys]
            self._store.set(key, next((text for text in texts if text), ""))
        self._store.wait([key], patience)
        verdict = self._store.get(key).decode()
        if verdict:
            self._all_know = True
            self.part()
        if error:
            raise error
        if verdict:
            raise ValueError(verdict)
        return result

    def part(self) -> None:
        """Wait until all ranks are done with the store: it may live in the main process, which must then go last."""
        if self._store is None:
            return
        self._store.set(f"parted-{self.topology.rank}", "")
        if self.is_main:
            self._hears(*(f"parted-{rank}" for rank in range(self.topology.world_size)), seconds=10)

    def gather(self, text: str) -> list[str]:
        """Every rank's text, in the order of the ranks."""
        if self._store is None:
            return [text]
        self._calls += 1
        self._store.set(f"text-{self._calls}-{self.topology.rank}", text)
        keys = [f"text-{self._calls}-{rank}" for rank in range(self.topology.world_size)]
        self._store.wait(keys, self.timeout)
        return [self._store.get(key).decode() for key in keys]

    def share(self, text: str) -> str:
        """The main process's text on every rank."""
        return self.gather(text)[0]

    def same_buffers(self, model: nn.Module) -> None:
        """Give every rank the main process's buffers (batch statistics), as DDP does before a training forward."""
        if self._store is not None:
            for buffer in model.buffers():
                dist.broadcast(buffer, 0)

    def speaks(self, error: BaseException) -> bool:
        """Whether this rank is to tell the user of an error that ends it. Not collective.

        The main process tells what all know. If a rank was lost, another one speaks up only if the main process stays
        silent, since that may be the lost one. An error that only this rank knows, it tells itself.
        """
        if self._store is None or self._all_know or self.is_main:
            if self._store is not None:
                self._store.set("main-spoke", "")
            return self.is_main
        return not is_lost_rank(error) or not self._hears("main-spoke", seconds=3)

    def _hears(self, *keys: str, seconds: float) -> bool:
        try:
            self._store.wait(list(keys), timedelta(seconds=seconds))
            return True
        except RuntimeError:
            return False

    def describe(self) -> str:
        """This rank's place, for the start table."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else f"{self.threads} threads"
        return f"{socket.gethostname()}, {self.device} ({name}), process {os.getpid()}"


def _nothing() -> None:
    return None


def _cpu_was_asked_for() -> bool:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("-1")  # as accelerate_configs/2cpu.yaml does
    return hidden or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")


def _device(topology: Topology) -> torch.device:
    """This rank's GPU, or the CPU where there is none or it was asked for."""
    if not torch.cuda.is_available() or _cpu_was_asked_for():
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
        ranks.part()
    except KeyboardInterrupt:
        if ranks is None or ranks.is_main:
            sys.stderr.write(f"\n{prog}: interrupted; --run_name NAME --resume auto goes on from the last checkpoint\n")
        raise SystemExit(130) from None
    except Exception as error:
        if is_out_of_memory(error):
            error = ValueError(f"out of memory ({one_line(error)[:120]}); lower --batch_size, or raise --grad_accum")
        if not isinstance(error, USER_ERRORS) and not is_lost_rank(error):
            raise  # a bug: its traceback is what helps
        speaks = ranks.speaks(error) if ranks else is_main_process()
        leave(LostRank(lost_rank_text(error)) if is_lost_rank(error) else error, prog, speaks, config.traceback)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
