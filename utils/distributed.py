"""The process group, the device, and everything that the ranks say to each other."""

import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from utils.config import EvalConfig, TrainConfig
from utils.errors import (
    USER_ERRORS,
    AgreedError,
    LostRank,
    is_killed_worker,
    is_lost_rank,
    is_main_process,
    is_out_of_memory,
    leave,
    lost_rank_text,
    one_line,
)
from utils.host import keep_freed_memory
from utils.launch import (
    Topology,
    launcher,
    read_topology,
    restarts,
    restarts_are_possible,
    threads_per_process,
)

Result = TypeVar("Result")
_PATIENCE = timedelta(days=1)  # for slow work on one rank, such as a download


class Ranks:
    """The processes of the run: this one's place among them, its device, and their agreements.

    Collective, called by all ranks or none: `join`, `together`, `gather`, `share`, `any_rank`, `same_buffers`, `part`.
    """

    def __init__(self, topology: Topology, threads: int | None = None, timeout: float = 600.0):
        self.topology, self.timeout = topology, timedelta(seconds=timeout)
        self.device = _device(topology)
        self.threads = threads or threads_per_process(topology)
        if self.threads > (os.cpu_count() or 1):
            raise ValueError(f"--threads {self.threads}: this machine has {os.cpu_count()} processor cores")
        os.environ["OMP_NUM_THREADS"] = str(self.threads)  # Accelerate would set its own number where there is none
        torch.set_num_threads(self.threads)
        if self.device.type == "cpu":
            keep_freed_memory()
        # A killed launcher tells nobody, and its processes would train on. A shell may go away: nohup expects that.
        self._launcher = launcher()
        self.backend = "none"
        self._store = self._launchers_store = self._prompt = self._patient = None

    @property
    def is_main(self) -> bool:
        return self.topology.is_main

    @property
    def orphaned(self) -> bool:
        """Whether the launcher that started this process is gone."""
        return self._launcher is not None and os.getppid() != self._launcher

    def join(self) -> None:
        """Make the process group, if there are several processes; Accelerate adopts the one it finds."""
        if self.is_main and self.device.type == "cpu" and not _cpu_was_asked_for():
            several = self.topology.world_size > 1
            print(
                "No GPU is visible: running on the CPU" + f", {self.topology.world_size} processes over gloo" * several
            )
        if self.topology.world_size == 1 and not restarts_are_possible():
            return
        if self.topology.world_size > 1:
            self.backend = "nccl" if self.device.type == "cuda" else "gloo"
        try:
            self._store = self._meet()
        except (RuntimeError, ValueError) as error:
            where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise ValueError(
                f"the processes could not meet at {where} over {self.backend} ({one_line(error)[:160]}); check "
                "that the port is free there, that the address can be reached, and the network interface "
                "(GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)"
            ) from error

    def _meet(self) -> dist.Store | None:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=self.timeout))
        self._launchers_store = store
        if world_size == 1:
            return None
        # A restarted attempt must not read the addresses that the one before it left in the launcher's store.
        store = dist.PrefixStore(f"attempt-{restarts()}", store)
        dist.init_process_group(
            self.backend, store=dist.PrefixStore("group", store), rank=rank, world_size=world_size, timeout=self.timeout
        )
        # Agreements go over groups of their own: unlike a wait in the store, which may live in the launcher, they end
        # when a rank dies and go on when the launcher does; and unlike NCCL's they need no GPU.
        self._prompt = dist.new_group(backend="gloo", timeout=self.timeout)
        self._patient = dist.new_group(backend="gloo", timeout=_PATIENCE)
        return dist.PrefixStore("lockstep", store)

    def together(self, action: Callable[[], Result], main_first: bool = False) -> Result:
        """Run `action` on every rank; an error on any of them is raised on all, as AgreedError.

        With `main_first` each machine's first rank runs it alone and the others after it, so that they find the files
        that it downloaded or decoded. They wait for it as long as it lives.
        """
        if self._store is None:
            return action()
        if not main_first:
            return self._agreed(action, self._prompt)
        mine = self.topology.local_rank == 0
        first = self._agreed(action if mine else _nothing, self._patient)
        others = self._agreed(_nothing if mine else action, self._patient)
        return first if mine else others

    def _agreed(self, action: Callable[[], Any], group: dist.ProcessGroup) -> Any:
        result, error = None, None
        try:
            result = action()
        except USER_ERRORS as raised:
            error = raised
        who = "" if self.is_main else f"rank {self.topology.rank}: "
        texts = self._exchange(who + one_line(error) if error else "", group)
        verdict = next((text for text in texts if text), None)
        if verdict:
            raise AgreedError(verdict) from error
        return result

    def _exchange(self, text: str, group: dist.ProcessGroup) -> list[str]:
        texts = [""] * self.topology.world_size
        dist.all_gather_object(texts, text, group)
        return texts

    def part(self) -> None:
        """Wait until all ranks are done with the store: it may live in the main process, which must then go last."""
        if self._store is None or self.orphaned:
            return
        with suppress(RuntimeError):  # of a launcher that goes just now
            self._store.set(f"parted-{self.topology.rank}", "")
            if self.is_main:
                self._hears(*(f"parted-{rank}" for rank in range(self.topology.world_size)), seconds=10)

    def gather(self, text: str) -> list[str]:
        """Every rank's text, in the order of the ranks."""
        return [text] if self._store is None else self._exchange(text, self._prompt)

    def any_rank(self, wish: bool) -> bool:
        """Whether any rank wishes so."""
        return any(self.gather("x" if wish else ""))

    def share(self, text: str) -> str:
        """The main process's text on every rank."""
        return self.gather(text)[0]

    def remember(self, key: str, text: str) -> None:
        """Leave a note for the attempt after a restart by the launcher, where it keeps a store. Not collective."""
        if self._launchers_store is not None:
            self._launchers_store.set(f"lockstep-{key}", text)

    def remembered(self, key: str) -> str:
        """What an attempt before this one left; empty when there is none. Not collective."""
        store, key = self._launchers_store, f"lockstep-{key}"
        return store.get(key).decode() if store is not None and store.check([key]) else ""

    def same_buffers(self, model: nn.Module) -> None:
        """Give every rank the main process's buffers (batch statistics), which each has gathered of its own batches."""
        if self._store is not None:
            for buffer in model.buffers():
                dist.broadcast(buffer, 0)

    def speaks(self, error: BaseException) -> bool:
        """Whether this rank is to tell the user of an error that ends it. Not collective.

        The main process tells what all know. If a rank was lost, another one speaks up only if the main process stays
        silent, since that may be the lost one. An error that only this rank knows, it tells itself.
        """
        if self._store is None or self.is_main or isinstance(error, AgreedError):
            if self._store is not None:
                with suppress(RuntimeError):
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
    except KeyboardInterrupt as interrupt:
        if ranks is None or ranks.is_main:
            text = str(interrupt) or "interrupted"
            sys.stderr.write(f"\n{prog}: {text}; --run_name NAME --resume auto goes on from the last checkpoint\n")
        raise SystemExit(getattr(interrupt, "code", 130)) from None
    except Exception as error:
        if is_out_of_memory(error):
            error = ValueError(f"out of memory ({one_line(error)[:120]}); lower --batch_size, or raise --grad_accum")
        if is_killed_worker(error):
            text = f"a loader process was killed ({one_line(error)[:100]}); if memory is short, lower --num_workers"
            error = ValueError(text)
        if not isinstance(error, USER_ERRORS) and not is_lost_rank(error):
            raise  # a bug: its traceback is what helps
        if isinstance(error, AgreedError):
            ranks.part()
        speaks = ranks.speaks(error) if ranks else is_main_process()
        leave(LostRank(lost_rank_text(error)) if is_lost_rank(error) else error, prog, speaks, config.traceback)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
