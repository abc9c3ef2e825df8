"""This process as one of the ranks of a run: its device, and how it finds the others."""

import os
import re
import socket
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from utils.config import PLUGIN_HASHES, require
from utils.console import say
from utils.errors import USER_ERRORS, UserError, as_lost_rank, counted, one_line
from utils.launch import (
    Topology,
    address_of,
    choose_backend,
    choose_device,
    cpu_is_requested,
    end_status,
    gpu_id,
    is_set,
    launcher_pid,
    set_interface,
    shards_model,
    threads_per_process,
)
from utils.memory import keep_freed_memory
from utils.ranks.collectives import Collectives
from utils.ranks.watch import Watch
from utils.settings.ranks import LaunchConfig
from utils.waiting import call_with_timeout, wait_for_keys

if TYPE_CHECKING:
    from utils.launch.rendezvous import Member

_PATIENCE = timedelta(days=1)  # for slow work on one rank, such as a download
# NCCL aborts later than the timeout, with a dump, so that the watch reports the timeout first
_NCCL_LATER = timedelta(seconds=30)
_CONNECT = 36.0  # seconds to connect 32 ranks


class Ranks(Collectives):
    """The processes of a run: the rank and device of this process, and the communication between
    all of them.

    `join` and `finish` are collective too: all ranks must call them, or none.
    """

    def __init__(
        self,
        topology: Topology,
        launch: LaunchConfig,
        prog: str = "train.py",
        fixed_order: bool = False,
    ):
        watch = Watch(topology.rank, launch.timeout, prog, lambda: self.orphaned)
        super().__init__(topology, watch)
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
        self.store: dist.Store | None = None  # once the ranks are connected
        self._launchers_store: dist.Store | None = None

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
            line = "No GPU is visible: running on the CPU"
            if self.expects_peers:
                line += f", {topology.world_size} processes over gloo"
            say(line)
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
        self._connect(store)
        self.store = dist.PrefixStore("lockstep", store)
        self.watch.enter()
        self.check_same(str(PLUGIN_HASHES), "another --plugin file")

    def _connect(self, store: dist.Store) -> None:
        """Create the default group, and two groups of gloo for agreements: one has the
        timeout --timeout, the other `_PATIENCE`, for slow work.
        """
        backend = self.backend
        processes = self.topology.world_size
        limit = timedelta(seconds=self.launch.timeout)
        # FSDP with offload keeps its shards on the host, where only gloo can exchange them.
        offloads = backend == "nccl" and shards_model() and is_set("FSDP_OFFLOAD_PARAMS")

        def create() -> tuple[Any, Any]:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # also in this thread
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if offloads else backend,
                store=dist.PrefixStore("group", store),
                rank=self.topology.rank,
                world_size=processes,
                timeout=limit + _NCCL_LATER if backend == "nccl" else limit,
            )
            fast = dist.new_group(backend="gloo", timeout=limit)
            return fast, dist.new_group(backend="gloo", timeout=_PATIENCE)

        limit_to_connect = connect_timeout(backend, processes, self.launch.timeout)
        try:
            # Not in the thread, which continues after its time: with groups, ranks can agree.
            self._fast, self._slow = call_with_timeout(create, limit_to_connect)
        except (RuntimeError, ValueError) as error:
            reason = re.sub(r"\[/\S+\] ", "", one_line(error))  # gloo names its source files
            place = f"{address_of(self.interface)} on interface {self.interface}"
            problem = f"the processes found each other but could not connect over {backend}"
            raise UserError(
                f"{problem}, from {place} of {socket.gethostname()} ({reason[:160]})",
                "check --interface, and whether a firewall is between the machines",
            ) from error

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
        name = counted(self.threads, "thread")
        if self.device.type == "cuda":
            name = torch.cuda.get_device_name(self.device)
        return f"{socket.gethostname()}, {self.device} ({name}), process {os.getpid()}"


def connect_timeout(backend: str, processes: int, timeout: float) -> float:
    """The seconds that the processes have to connect; all of them are running."""
    # ProcessGroupNCCL2 starts NCCL in this time, the older class later
    if backend == "nccl" and os.environ["TORCH_DIST_USE_NCCL2"] != "0":
        return timeout
    # They connect immediately, or one has died. With the time limit of a group, gloo would block
    # for up to five times as long.
    return min(timeout, _CONNECT * max(1.0, processes / 32))
