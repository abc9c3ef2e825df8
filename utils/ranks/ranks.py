"""The process group, and everything that the ranks say to each other."""

import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from utils.config.settings import LaunchConfig
from utils.errors import USER_ERRORS, AgreedError, LostRank, fix_of, is_lost_rank, lost_rank_text, one_line, problem_of
from utils.launch.command import launcher
from utils.launch.devices import choose_backend, choose_device, cpu_was_asked_for, gpu_id, why_cpu
from utils.launch.environment import Topology, is_launched, restarts_are_possible, threads_per_process
from utils.launch.network import address_of, set_interface
from utils.launch.rendezvous import check_init_method, check_own_gpus, launchers_store, meet
from utils.memory import keep_freed_memory
from utils.ranks.watch import Watch
from utils.waiting import call_with_timeout

Result = TypeVar("Result")
_PATIENCE = timedelta(days=1)  # for slow work on one rank, such as a download
_CONNECT = timedelta(seconds=12)  # for 32 ranks; gloo takes up to five times as long to give up connecting


class Ranks:
    """The processes of the run: this one's place among them, its device, and their agreements.

    Collective, called by all ranks or none: `join`, `run_on_all`, `gather_text`, `broadcast_text`, `any_rank`,
    `broadcast_buffers`, `finish`.
    """

    def __init__(self, topology: Topology, launch: LaunchConfig, prog: str = "train.py"):
        self.topology, self.launch, self.prog = topology, launch, prog
        self.device = choose_device(topology, launch.cpu)
        self.threads = launch.threads or threads_per_process(topology)
        if self.threads > (os.cpu_count() or 1):
            raise ValueError(f"--threads {self.threads}: this machine has {os.cpu_count()} processor cores")
        self.backend = choose_backend(topology, launch.backend, self.device)
        check_init_method(launch.init_method)
        topology.export()
        os.environ["OMP_NUM_THREADS"] = str(self.threads)  # Accelerate would set its own number where there is none
        torch.set_num_threads(self.threads)
        if self.device.type == "cpu":
            keep_freed_memory()
        # A killed launcher tells nobody, and its processes would train on. A shell may go away: nohup expects that.
        self._launcher = launcher()
        self.interface, self.members, self.meets = "", [], False
        self._store = self._launchers_store = self._fast_group = self._slow_group = self._watch = None

    @property
    def is_main(self) -> bool:
        return self.topology.is_main

    @property
    def orphaned(self) -> bool:
        """Whether the launcher that started this process is gone."""
        return self._launcher is not None and os.getppid() != self._launcher

    def join(self, give_up: Callable[[str], None] | None = None) -> None:
        """Make the process group, if there are several processes; Accelerate adopts the one it finds.

        When the ranks cannot connect, the main thread may wait on: `give_up` is then called in another one, with what
        is wrong, and has to end the process (default: with that as its line).
        """
        topology, launch = self.topology, self.launch
        if self.is_main and self.device.type == "cpu" and not cpu_was_asked_for(launch.cpu):
            several = topology.world_size > 1
            print(f"{why_cpu()}: running on the CPU" + f", {topology.world_size} processes over gloo" * several)
        self.meets = topology.world_size > 1
        if restarts_are_possible():
            self._launchers_store = launchers_store(launch.timeout)
        if topology.world_size == 1:
            return
        store, self.members = meet(topology, launch.init_method, launch.timeout, launch.interface, gpu_id(self.device))
        # Accelerate asks for an address on several machines, and does nothing with it.
        os.environ.setdefault("MASTER_ADDR", self.members[0].master)
        if self.backend == "nccl":
            check_own_gpus(self.members)
        self._watch = Watch(store, self.members, topology.rank, launch.timeout, self.prog)
        several_machines = topology.world_size > topology.local_world_size or len({m.host for m in self.members}) > 1
        self.interface = set_interface([m.master for m in self.members], launch.interface, several_machines)
        trouble = (
            f"the processes met but could not connect over {self.backend}, from {address_of(self.interface)} on "
            f"interface {self.interface} of {socket.gethostname()} (REASON); see --interface, and whether a firewall "
            "is between the machines"
        )
        overdue = threading.Timer(
            launch.timeout + 1, give_up or self._give_up, [trouble.replace("REASON", "no answer")]
        )
        overdue.daemon = True
        overdue.start()
        try:
            self._make_groups(store)
        except (RuntimeError, ValueError) as error:
            reason = re.sub(r"\[/\S+\] ", "", one_line(error))  # gloo names its source files
            raise ValueError(trouble.replace("REASON", reason[:160])) from error
        finally:
            overdue.cancel()
        self._store = dist.PrefixStore("lockstep", store)

    def _give_up(self, text: str) -> None:
        """End this process while its main thread waits for a connection, for which gloo has a time of its own."""
        if self.topology.local_rank == 0:
            sys.stderr.write(f"{self.prog}: error: {text}\n")
            sys.stderr.flush()
        time.sleep(0.5)  # a launcher that sees this rank gone ends the others: let the one that speaks finish
        os._exit(2)

    def _make_groups(self, store: dist.Store) -> None:
        self.at("connecting")
        timeout = timedelta(seconds=self.launch.timeout)
        # Gloo waits five times as long for a connection. All ranks are there, so that it takes no time, or for ever.
        connecting = min(timeout, _CONNECT * max(1.0, self.topology.world_size / 32))
        rank, world_size = self.topology.rank, self.topology.world_size
        dist.init_process_group(
            self.backend,
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=world_size,
            timeout=connecting if self.backend == "gloo" else timeout,
        )
        # Agreements go over groups of their own: unlike a wait in the store, which may live in the launcher, they end
        # when a rank dies and go on when the launcher does; and unlike NCCL's they need no GPU.
        self._fast_group = dist.new_group(backend="gloo", timeout=connecting)
        self._slow_group = dist.new_group(backend="gloo", timeout=connecting)
        for group, seconds in ((None, timeout), (self._fast_group, timeout), (self._slow_group, _PATIENCE)):
            _set_timeout(seconds, group)

    def at(self, place: str) -> None:
        """Note where this rank is, for others that wait for it. Not collective."""
        if self._watch is not None:
            self._watch.at(place)

    def enter(self, place: str) -> None:
        """Note that this rank is about to wait for the others there. Not collective."""
        if self._watch is not None:
            self._watch.at(place)
            self._watch.enter()

    def run_on_all(self, action: Callable[[], Result], main_first: bool = False, at: str = "") -> Result:
        """Run `action` on every rank; an error on any of them is raised on all, as AgreedError.

        With `main_first` each machine's first rank runs it alone and the others after it, so that they find the files
        that it downloaded or decoded. They wait for it as long as it lives. `at` tells what they do.
        """
        if self._store is None:
            return action()
        if at:
            self.at(at)
        if not main_first:
            return self._agreed(action, self._fast_group)
        mine = self.topology.local_rank == 0
        first = self._agreed(action if mine else _nothing, self._slow_group)
        others = self._agreed(_nothing if mine else action, self._slow_group)
        return first if mine else others

    def _agreed(self, action: Callable[[], Any], group: dist.ProcessGroup) -> Any:
        result, error = None, None
        try:
            result = action()
        except USER_ERRORS as raised:
            error = raised
        who = "" if self.is_main else f"rank {self.topology.rank}: "
        own = json.dumps([who + problem_of(error), fix_of(error)]) if error else ""
        text = next((text for text in self._exchange(own, group) if text), None)
        if text is not None:
            raise AgreedError(*json.loads(text)) from error
        return result

    def _exchange(self, text: str, group: dist.ProcessGroup) -> list[str]:
        texts = [""] * self.topology.world_size
        self._watch.enter(patient=group is self._slow_group)
        dist.all_gather_object(texts, text, group)
        self._watch.at()
        return texts

    def finish(self) -> None:
        """Wait until all ranks are done with the store: it may live in the main process, which must then go last."""
        if self._watch is not None:
            self._watch.end()
        if self._store is None or self.orphaned:
            return
        with suppress(RuntimeError):  # of a launcher that goes just now
            self._store.set(f"parted-{self.topology.rank}", "")
            if self.is_main:
                self._keys_arrive(*(f"parted-{rank}" for rank in range(self.topology.world_size)), seconds=10)

    def gather_text(self, text: str) -> list[str]:
        """Every rank's text, in the order of the ranks."""
        return [text] if self._store is None else self._exchange(text, self._fast_group)

    def check_same(self, text: str, what: str) -> None:
        """Raise ValueError on all ranks unless all have the same text; `what` describes a difference; collective."""
        texts = self.gather_text(text)
        other = next((rank for rank, theirs in enumerate(texts) if theirs != texts[0]), None)
        if other is not None:
            raise ValueError(f"rank {other} has {what} than rank 0; give all ranks the same files")

    def any_rank(self, wish: bool) -> bool:
        """Whether any rank wishes so."""
        return any(self.gather_text("x" if wish else ""))

    def broadcast_text(self, text: str) -> str:
        """The main process's text on every rank."""
        return self.gather_text(text)[0]

    def remember(self, key: str, text: str) -> None:
        """Leave a note for the attempt after a restart by the launcher, where it keeps a store. Not collective."""
        if self._launchers_store is not None:
            self._launchers_store.set(f"lockstep-{key}", text)

    def remembered(self, key: str) -> str:
        """What an attempt before this one left; empty when there is none. Not collective."""
        store, key = self._launchers_store, f"lockstep-{key}"
        return store.get(key).decode() if store is not None and store.check([key]) else ""

    def broadcast_buffers(self, model: nn.Module) -> None:
        """Give every rank the main process's buffers (batch statistics), which each has gathered of its own batches."""
        if self._store is not None:
            self._watch.enter()
            for buffer in model.buffers():
                dist.broadcast(buffer, 0)
            self._watch.at()

    def all_reduce(self, values: Tensor) -> None:
        """Put the sum of all ranks' values in their place, bare of what Accelerate does around it; collective."""
        if self._store is not None:
            dist.all_reduce(values)

    def send_recv(self, values: Tensor, source: int, target: int) -> None:
        """One rank's values replace another's; called by these two. A tensor on the CPU goes over gloo."""
        group = self._fast_group if values.device.type == "cpu" else None
        if self.topology.rank == source:
            dist.send(values, target, group)
        elif self.topology.rank == target:
            dist.recv(values, source, group)

    def ping_store(self) -> None:
        """Leave a word in the store where the processes met, and read it again. Not collective."""
        if self._store is not None:
            self._store.set(f"asked-{self.topology.rank}", "")
            self._store.get(f"asked-{self.topology.rank}")

    def should_report(self, error: BaseException) -> bool:
        """Whether this rank is to tell the user of an error that ends it. Not collective.

        The main process tells what all know. If a rank was lost, another one speaks up only if the main process stays
        silent, since that may be the lost one. Any other error is told by the first rank that has it. Those that did
        not find each other tell it on each machine, which may have a screen of its own.
        """
        rank = str(self.topology.rank)
        if self._store is None:  # without a launcher rank 0 may be the one that is gone
            return self.topology.local_rank == 0 or (self.meets and not is_launched())
        if self._watch.lost:  # nobody can be asked
            return True
        with suppress(RuntimeError):
            if isinstance(error, AgreedError) and not self.is_main:
                return False
            if is_lost_rank(error) and not self.is_main:
                return not self._keys_arrive("main-spoke", seconds=3)
            if self.is_main:
                self._store.set("main-spoke", "")
            return self._store.compare_set(f"said {one_line(error)}", "", rank).decode() == rank
        return True

    def _keys_arrive(self, *keys: str, seconds: float) -> bool:
        try:
            call_with_timeout(lambda: self._store.wait(list(keys), timedelta(seconds=seconds)), seconds + 1)
            return True
        except RuntimeError:
            return False

    def record_end(self, error: BaseException) -> BaseException:
        """Leave word that this rank ends; a lost rank's error then says for whom the others waited. Not collective."""
        where = ()
        if self._watch is not None:
            where = self._watch.place, self._watch.waiting_for()
            self._watch.end(one_line(error))
        return LostRank(lost_rank_text(error, *where)) if is_lost_rank(error) else error

    def announce_exit(self, text: str, code: int) -> bool:
        """Tell the others, from a thread, that this rank exits with `code`; returns whether it should report why.

        Not collective.
        """
        return self._watch is None or self._watch.announce_exit(text, code)

    def describe(self) -> str:
        """This rank's place, for the start table."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else f"{self.threads} threads"
        return f"{socket.gethostname()}, {self.device} ({name}), process {os.getpid()}"


# Public since PyTorch 2.15.
_set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout


def _nothing() -> None:
    return None
