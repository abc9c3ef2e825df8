"""This process as one of the ranks of a run: its device, and all communication between the ranks."""

import os
import re
import socket
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from utils.config.settings import LaunchConfig
from utils.errors import LostRank, UserError, is_lost_rank, lost_rank_text, one_line
from utils.launch.command import launcher
from utils.launch.devices import choose_backend, choose_device, cpu_is_requested, gpu_id, why_cpu
from utils.launch.environment import Topology, can_be_restarted, is_launched, threads_per_process
from utils.launch.network import address_of, set_interface
from utils.launch.rendezvous import Member, check_init_method, check_own_gpus, launcher_store, meet
from utils.memory import keep_freed_memory
from utils.ranks.group import Group, time_to_connect
from utils.ranks.watch import Watch, print_error

Result = TypeVar("Result")


class Ranks:
    """The processes of a run: the rank and device of this process, and the communication between all of them.

    These methods are collective and must be called by all ranks or none: `join`, `run_on_all`, `run_on_main`,
    `gather_text`, `check_same`, `any_rank`, `broadcast_text`, `broadcast_buffers`, `all_reduce`, `finish`.
    """

    def __init__(self, topology: Topology, launch: LaunchConfig, prog: str = "train.py"):
        self.topology, self.launch, self.prog = topology, launch, prog
        self.device = choose_device(topology, launch.cpu)
        # The number of threads changes the bits of sums on the CPU, so with --microbatches it must not follow from the
        # number of processes.
        fixed = self.device.type == "cpu" and getattr(launch, "microbatches", None)
        self.threads = launch.threads or (1 if fixed else threads_per_process(topology))
        cores = os.cpu_count() or 1
        if self.threads > cores:
            raise UserError(
                f"--threads {self.threads}: this machine has {cores} processor cores", f"use at most {cores}"
            )
        self.backend = choose_backend(topology, launch.backend, self.device)
        check_init_method(launch.init_method)
        topology.export()
        os.environ["OMP_NUM_THREADS"] = str(self.threads)  # otherwise Accelerate would set a different number
        torch.set_num_threads(self.threads)
        if self.device.type == "cpu":
            keep_freed_memory()
        # A launcher that is killed cannot stop its processes, so they check for it. A shell may exit, as with nohup.
        self._launcher = launcher()
        self.interface = ""
        self.members: list[Member] = []
        self.expects_peers = False  # whether `join` has begun to look for other processes
        self._group: Group | None = None  # a single process needs none
        self._watch: Watch | None = None
        self._launchers_store: dist.Store | None = None

    @property
    def is_main(self) -> bool:
        return self.topology.is_main

    @property
    def orphaned(self) -> bool:
        """Whether the launcher that started this process has exited."""
        return self._launcher is not None and os.getppid() != self._launcher

    def join(self, give_up: Callable[[UserError], None] | None = None) -> None:
        """Create the process group, which Accelerate then uses, if there are several processes.

        If the ranks meet but cannot connect in time, a second thread calls `give_up` with the error, because gloo may
        block the main thread for longer. `give_up` must exit (default: print the error, exit with code 2).
        """
        topology, launch = self.topology, self.launch
        if self.is_main and self.device.type == "cpu" and not cpu_is_requested(launch.cpu):
            several = topology.world_size > 1
            print(f"{why_cpu()}: running on the CPU" + f", {topology.world_size} processes over gloo" * several)
        self.expects_peers = topology.world_size > 1
        if can_be_restarted():
            self._launchers_store = launcher_store(launch.timeout)
        if topology.world_size == 1:
            return
        store, self.members = meet(topology, launch.init_method, launch.timeout, launch.interface, gpu_id(self.device))
        # With several machines Accelerate requires an address, which it does not use.
        os.environ.setdefault("MASTER_ADDR", self.members[0].master)
        check_own_gpus(self.members)
        self._watch = Watch(store, self.members, topology.rank, launch.timeout, self.prog)
        several_machines = topology.world_size > topology.local_world_size or len({m.host for m in self.members}) > 1
        self.interface = set_interface([m.master for m in self.members], launch.interface, several_machines)
        self._watch.mark_waiting("connecting")
        seconds = 1 + 3 * time_to_connect(topology.world_size, launch.timeout)
        overdue = threading.Timer(seconds, give_up or self._give_up, [self._unconnected("no answer")])
        overdue.daemon = True
        overdue.start()
        try:
            self._group = Group(store, self._watch, topology, self.backend, launch.timeout)
            self._watch.mark()
        except (RuntimeError, ValueError) as error:
            reason = re.sub(r"\[/\S+\] ", "", one_line(error))  # gloo names its source files
            raise self._unconnected(reason[:160]) from error
        finally:
            overdue.cancel()

    def _unconnected(self, reason: str) -> UserError:
        place = f"from {address_of(self.interface)} on interface {self.interface} of {socket.gethostname()}"
        return UserError(
            f"the processes met but could not connect over {self.backend}, {place} ({reason})",
            "check --interface, and whether a firewall is between the machines",
        )

    def _give_up(self, error: UserError) -> None:
        if self.topology.local_rank == 0 or not is_launched():  # or local rank 0 may be the lost one
            print_error(self.prog, f"error: {error}", last=True)
        time.sleep(0.5)  # when this rank exits, the launcher ends the others: wait for the one that reports
        os._exit(2)

    def mark(self, place: str) -> None:
        """Record what this rank is doing, so that ranks that wait for it can report it. Not collective."""
        if self._watch is not None:
            self._watch.mark(place)

    def mark_waiting(self, place: str) -> None:
        """Record that this rank is about to wait for the others, and where. Not collective."""
        if self._watch is not None:
            self._watch.mark_waiting(place)

    def run_on_all(self, action: Callable[[], Result], main_first: bool = False, place: str = "") -> Result:
        """Run `action` on every rank; an error on any rank is raised on all of them, as AgreedError.

        With `main_first`, the first rank of each machine runs it before the others, so that they find the files that it
        has downloaded or decoded. They wait for it as long as it is alive. `place` is passed to `mark`.
        """
        if self._group is None:
            return action()
        if place:
            self.mark(place)
        if not main_first:
            return self._group.agree(action)
        mine = self.topology.local_rank == 0
        first = self._group.agree(action if mine else _nothing, patient=True)
        others = self._group.agree(_nothing if mine else action, patient=True)
        return first if mine else others

    def run_on_main(self, action: Callable[[], Result], main_first: bool = False) -> Result | None:
        """`run_on_all` with nothing to do on other ranks than the main process, where the result is None."""
        return self.run_on_all(lambda: action() if self.is_main else None, main_first)

    def gather_text(self, text: str) -> list[str]:
        """Every rank's text, in the order of the ranks."""
        return [text] if self._group is None else self._group.exchange(text)

    def check_same(self, text: str, what: str, fix: str = "give all ranks the same files") -> None:
        """Raise UserError on all ranks unless all have the same text; `what` describes the difference."""
        texts = self.gather_text(text)
        other = next((rank for rank, theirs in enumerate(texts) if theirs != texts[0]), None)
        if other is not None:
            raise UserError(f"rank {other} has {what} than rank 0", fix)

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return any(self.gather_text("x" if flag else ""))

    def broadcast_text(self, text: str) -> str:
        """The main process's text on every rank."""
        return self.gather_text(text)[0]

    def broadcast_buffers(self, model: nn.Module) -> None:
        """Copy the main process's buffers to all ranks, whose batch statistics are those of their own batches."""
        if self._watch is not None:
            self._watch.mark_waiting()
            for buffer in model.buffers():
                dist.broadcast(buffer, 0)
            self._watch.mark()

    def all_reduce(self, values: Tensor) -> None:
        """Replace the values by their sum over all ranks, without Accelerate."""
        if self._group is not None:
            dist.all_reduce(values)

    def send_recv(self, values: Tensor, source: int, target: int) -> None:
        """Copy the values from one rank to another; called by these two ranks. CPU tensors are sent over gloo."""
        group = self._group.fast if self._group is not None and values.device.type == "cpu" else None
        if self.topology.rank == source:
            dist.send(values, target, group)
        elif self.topology.rank == target:
            dist.recv(values, source, group)

    def ping_store(self) -> None:
        """Write a key to the store of the processes, and read it. Not collective."""
        if self._group is not None:
            self._group.store.set(f"ping-{self.topology.rank}", "")
            self._group.store.get(f"ping-{self.topology.rank}")

    def remember(self, key: str, text: str) -> None:
        """Store a text for the attempt after a restart by the launcher, if it has a store. Not collective."""
        if self._launchers_store is not None:
            self._launchers_store.set(f"lockstep-{key}", text)

    def remembered(self, key: str) -> str:
        """The text that an earlier attempt stored; empty if there is none. Not collective."""
        store, key = self._launchers_store, f"lockstep-{key}"
        return store.get(key).decode() if store is not None and store.check([key]) else ""

    def finish(self) -> None:
        """Stop the watch, and wait until no rank needs this one any more."""
        if self._watch is not None:
            self._watch.end()
        if self._group is not None and not self.orphaned:
            self._group.finish()

    def should_report(self, error: BaseException) -> bool:
        """Whether this rank prints the error that it exits with. Not collective.

        If the ranks are connected, one of them prints it. Otherwise the first rank of each machine does, because the
        machines may have different terminals.
        """
        if self._group is None:  # without a launcher, rank 0 may be missing
            return self.topology.local_rank == 0 or (self.expects_peers and not is_launched())
        return self._group.should_report(error)

    def record_end(self, error: BaseException) -> BaseException:
        """Inform the other ranks that this rank exits; returns the error, as LostRank if it is one. Not collective."""
        if self._watch is None:
            return LostRank(lost_rank_text(error)) if is_lost_rank(error) else error
        place, waiting_for = self._watch.place, self._watch.waiting_for()
        self._watch.end(one_line(error))
        return LostRank(lost_rank_text(error, place, waiting_for)) if is_lost_rank(error) else error

    def announce_exit(self, text: str, code: int) -> bool:
        """Inform the other ranks, from a thread, that this rank exits with `code`; returns whether to print `text`.

        Not collective.
        """
        return self._watch is None or self._watch.announce_exit(text, code)

    def describe(self) -> str:
        """This rank's machine, device and process, for the start table."""
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}"
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else threads
        return f"{socket.gethostname()}, {self.device} ({name}), process {os.getpid()}"


def _nothing() -> None:
    return None
