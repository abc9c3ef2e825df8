"""This process as one of the ranks of a run: its device, and all communication between the ranks."""

import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from utils.config import PLUGIN_HASHES, require
from utils.console import say
from utils.errors import USER_ERRORS, AgreedError, as_lost_rank, one_line, split_error
from utils.launch import (
    Topology,
    choose_backend,
    choose_device,
    cpu_is_requested,
    end_status,
    gpu_id,
    launcher_pid,
    set_interface,
    shards_model,
    threads_per_process,
)
from utils.memory import keep_freed_memory
from utils.ranks.connecting import connect
from utils.ranks.watch import Watch
from utils.settings.ranks import LaunchConfig
from utils.waiting import wait_for_keys

if TYPE_CHECKING:
    from utils.launch.rendezvous import Member

Result = TypeVar("Result")


class Ranks:
    """The processes of a run: the rank and device of this process, and the communication between
    all of them.

    These methods are collective and must be called by all ranks or none: `join`, `agree`,
    `local_main_first`, `from_main`, `gather`, `check_same`, `any_rank`, `broadcast_buffers`,
    `finish`.
    """

    def __init__(
        self,
        topology: Topology,
        launch: LaunchConfig,
        prog: str = "train.py",
        fixed_order: bool = False,
    ):
        self.topology = topology
        self.launch = launch
        self.prog = prog
        self.device = choose_device(topology, launch.cpu)
        # The number of threads changes the bits of sums on the CPU, so with --microbatches it must
        # not follow from the number of processes.
        fixed = fixed_order and self.device.type == "cpu"
        self.threads = launch.threads or (1 if fixed else threads_per_process(topology))
        # not at the field: a checkpoint's settings are those of another machine
        cores = os.cpu_count() or 1
        require(self.threads <= cores, f"--threads must be at most {cores}, got {self.threads}")
        self.backend = choose_backend(topology, launch.backend, self.device)
        topology.export()
        # otherwise Accelerate would set a different number
        os.environ["OMP_NUM_THREADS"] = str(self.threads)
        torch.set_num_threads(self.threads)
        # it would keep what FSDP frees after each block
        if self.device.type == "cpu" and not shards_model():
            keep_freed_memory()
        # A launcher that is killed cannot stop its processes, so they check for it. A shell may
        # exit, as with nohup.
        self._launcher = launcher_pid()
        self.interface = ""
        self.members: list[Member] = []
        self.expects_peers = False  # whether `join` has begun to look for other processes
        self.watch = Watch(topology.rank, launch.timeout, prog, lambda: self.orphaned)
        # They record what this rank is doing, so that ranks that wait for it can report it. Not
        # collective.
        self.enter, self.enter_collective = self.watch.enter, self.watch.enter_collective
        # Agreements use separate gloo groups, because NCCL's groups need a GPU. The store could not
        # replace them: a wait in it does not end when a rank dies, and fails when the launcher,
        # which may serve the store, dies.
        self._fast: Any = None  # a single process needs none
        self._slow: Any = None
        self.store: dist.Store | None = None  # once the ranks are connected
        self._launchers_store: dist.Store | None = None

    @property
    def is_main(self) -> bool:
        return self.topology.is_main

    @property
    def orphaned(self) -> bool:
        """Whether the launcher that started this process has exited."""
        return self._launcher is not None and os.getppid() != self._launcher

    def join(self) -> None:
        """Create the process group, which Accelerate then uses, if there are several processes."""
        topology = self.topology
        launch = self.launch
        self.expects_peers = topology.world_size > 1
        if self.device.type == "cpu" and not cpu_is_requested(launch.cpu):
            several = f", {topology.world_size} processes over gloo" if self.expects_peers else ""
            say(f"No GPU is visible: running on the CPU{several}")
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            from utils.launch.rendezvous import launcher_store

            self._launchers_store = launcher_store(launch.timeout)
        if not self.expects_peers:
            return
        from utils.launch.rendezvous import rendezvous

        gpu = gpu_id(self.device)
        store, self.members = rendezvous(
            topology, launch.init_method, launch.timeout, gpu, self.backend
        )
        # With several machines Accelerate requires an address, which it does not use.
        os.environ.setdefault("MASTER_ADDR", self.members[0].master)
        self.watch.connect(store, self.members)
        hosts = {member.host for member in self.members}
        several_machines = topology.world_size > topology.local_world_size or len(hosts) > 1
        seen = [member.master for member in self.members]
        self.interface = set_interface(seen, launch.interface, several_machines)
        self.watch.enter_collective("connecting")
        self._fast, self._slow = connect(
            store, topology, self.device, self.backend, launch.timeout, self.interface
        )
        self.store = dist.PrefixStore("lockstep", store)
        self.watch.enter()
        self.check_same(str(PLUGIN_HASHES), "another --plugin file")

    @contextmanager
    def agree(self, place: str = "", no_timeout: bool = False) -> Iterator[None]:
        """Run the block on every rank; an error on any rank is raised on all of them, as
        AgreedError, at its end.

        The block must not communicate. `place` is passed to `enter`. With `no_timeout`, the wait for the other
        ranks lasts as long as they are alive. A single process raises its error unchanged.
        """
        self.enter(place)
        error = None
        try:
            yield
        except USER_ERRORS as raised:
            if self._fast is None:
                raise
            error = raised
        self._raise_on_all(error, no_timeout)

    def _raise_on_all(self, error: Exception | None, no_timeout: bool) -> None:
        who = "" if self.is_main else f"rank {self.topology.rank}: "
        mine = None
        if error:
            problem, fix = split_error(error)
            mine = AgreedError(who + problem, fix)
        if first := next(filter(None, self.gather(mine, no_timeout)), None):
            raise first from error

    @contextmanager
    def local_main_first(self, place: str = "") -> Iterator[None]:
        """`agree`, but the first rank of each machine runs the block before the others.

        So they find the files that it has downloaded or decoded. They wait for it as long as it is
        alive.
        """
        is_first = self.topology.local_rank == 0
        self.enter(place)
        if not is_first:
            self._raise_on_all(None, no_timeout=True)
        with self.agree(no_timeout=True):
            yield
        if is_first:
            self._raise_on_all(None, no_timeout=True)

    def from_main(self, action: Callable[[], Result], no_timeout: bool = False) -> Result:
        """The result of `action`, run on the main process, on every rank.

        An error is raised on all ranks, as AgreedError. With `no_timeout`, the wait lasts as long as the main
        process is alive.
        """
        result: Any = None
        with self.agree(no_timeout=no_timeout):
            if self.is_main:
                result = action()
        return self.gather(result)[0]

    def gather(self, value: Result, no_timeout: bool = False) -> list[Result]:
        """Every rank's value, in the order of the ranks. With `no_timeout`, the wait lasts as long as the
        ranks are alive.

        The values are pickled: the ranks of a run trust each other.
        """
        if self._fast is None:
            return [value]
        values = [value] * self.topology.world_size
        self.watch.enter_collective(no_timeout=no_timeout)
        dist.all_gather_object(values, value, self._slow if no_timeout else self._fast)
        self.watch.enter()
        return values

    def check_same(self, text: str, what: str, fix: str = "give all ranks the same files") -> None:
        """Raise UserError on all ranks unless all have the same text; `what` describes the
        difference.
        """
        texts = self.gather(text)
        other = next((rank for rank, theirs in enumerate(texts) if theirs != texts[0]), None)
        require(other is None, f"rank {other} has {what} than rank 0", fix)

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return any(self.gather(flag))

    def broadcast_buffers(self, model: nn.Module) -> None:
        """Copy the main process's buffers to all ranks, whose batch statistics are those of their
        own batches.
        """
        if self._fast is not None:
            self.watch.enter_collective()
            for buffer in model.buffers():
                dist.broadcast(buffer, 0)
            self.watch.enter()

    def store_set(self, key: str, text: str) -> None:
        """Store a text for the attempt after a restart by the launcher, if it has a store.

        Not collective.
        """
        if self._launchers_store:
            self._launchers_store.set(f"lockstep-{key}", text)

    def store_get(self, key: str) -> str:
        """The text that an earlier attempt stored; empty if there is none. Not collective."""
        store = self._launchers_store
        key = f"lockstep-{key}"
        return store.get(key).decode() if store and store.check([key]) else ""

    def finish(self) -> None:
        """Stop the watchdog, and wait until no rank needs the store, which the main process may
        serve.
        """
        self.watch.end()
        # if the store is lost, PyTorch prints a stack trace
        if self.store is None or (self.orphaned and self._launchers_store):
            return
        # the launcher or rank 0, one of which serves the store, may have exited
        with suppress(RuntimeError):
            self.store.set(f"finished-{self.topology.rank}", "")
            if self.is_main:
                ranks = range(self.topology.world_size)
                wait_for_keys(self.store, [f"finished-{rank}" for rank in ranks], seconds=10)

    def record_end(self, error: BaseException) -> BaseException:
        """Record in status.json and inform the other ranks that this rank exits; returns the error,
        as LostRank if it is one.

        Not collective.
        """
        final = as_lost_rank(error, self.watch.place, self.watch.describe_late())
        code = 2 if isinstance(final, USER_ERRORS) else getattr(error, "code", 1)
        end_status(code, one_line(final))  # first: a launcher ends this rank soon
        self.watch.end(one_line(error))
        return final

    @property
    def rounding(self) -> str:
        """What the rounding of this rank depends on: its processor, its threads and its version of
        PyTorch.
        """
        processor = torch.backends.cpu.get_cpu_capability()
        known = Path("/proc/cpuinfo")
        if self.device.type == "cuda":
            processor = torch.cuda.get_device_name(self.device)
        elif known.exists() and (found := re.search(r"model name\s*:(.*)", known.read_text())):
            processor += found[1]
        return f"{processor}, {self.threads} threads, torch {torch.__version__}"

    def describe(self) -> str:
        """This rank's machine, device and process, for the start table."""
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}"
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else threads
        return f"{socket.gethostname()}, {self.device} ({name}), process {os.getpid()}"
