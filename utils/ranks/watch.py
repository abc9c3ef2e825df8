"""Report which rank keeps the others waiting. Each rank records what it does, and a rank that waits long reports it."""

import json
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from utils.launch.exits import inform_launcher
from utils.launch.rendezvous import Member
from utils.ranks.stopping import EXIT_RESUME
from utils.waiting import call_with_timeout

TICK = 0.5  # seconds between two checks of a watching thread
_LATE = 1.0  # seconds that a tick may be late; if it is later, the process was paused
_ANSWER = 3.0  # seconds that the store may take to answer
_SILENT = 5.0  # seconds without a heartbeat after which a rank is reported as silent
_LATER = 3.0  # seconds after the timeout, because at the timeout gloo raises an error in the main thread
_GRACE = 5.0  # seconds that the main thread has to notice that another rank has ended
_STOPPED = "stopped: "  # the start of the message of a rank that was asked to stop and exited without the others


class RunningClock:
    """The seconds that this process has run, without pauses. `tick` must be called every TICK seconds.

    If all ranks are paused (SIGSTOP, a suspended job), this does not count as waiting for each other.
    """

    def __init__(self):
        self._ticked = 0.0, time.monotonic()  # seconds until the last tick, and the time of that tick

    def __call__(self) -> float:
        seconds, last = self._ticked
        return seconds + min(time.monotonic() - last, TICK + _LATE)

    def tick(self) -> None:
        self._ticked = self(), time.monotonic()

    def tick_until(self, stop: threading.Event) -> None:
        while not stop.wait(TICK):
            self.tick()


@dataclass
class Heartbeat:
    """The last state that a rank wrote: how many collectives it has entered, its place, and a growing counter."""

    entered: int
    place: str
    tick: int


class Watch:
    """A thread that publishes what this rank is doing, and reports which ranks keep it waiting.

    A rank waits for the ranks that have entered fewer collectives. After a tenth of the timeout, one of the waiting
    ranks reports them. After the whole timeout, the waiting ranks exit. A rank that exits with an error writes it to
    the store, so that the others exit even if no launcher stops them.
    """

    def __init__(self, store: dist.Store, members: list[Member], rank: int, timeout: float, prog: str):
        self.members, self.rank, self.timeout, self.prog = members, rank, timeout, prog
        self.entered, self.place, self.waiting, self.patient = 0, "starting", False, False
        self.store_lost = False  # whether the store cannot be reached
        self._store, self._tick = store.clone(), 0
        self._store.set_timeout(timedelta(seconds=_ANSWER))
        self._heard: dict[int, tuple[Heartbeat, float]] = {}  # each rank's last heartbeat, and when it arrived
        self._ended: tuple[float, str] | None = None  # when another rank exited, and why
        self._stop = threading.Event()
        self._clock = RunningClock()  # in a separate thread, because the watch's thread may wait for the store
        threading.Thread(target=self._clock.tick_until, args=[self._stop], name="clock", daemon=True).start()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def mark(self, place: str = "") -> None:
        """Record that this rank is working, and on what; the default is what it did before."""
        self.waiting, self.place = False, place or self.place

    def mark_waiting(self, place: str = "", patient: bool = False) -> None:
        """Record that this rank waits for the others in a collective. A `patient` wait has no time limit."""
        self.place, self.patient, self.waiting = place or self.place, patient, True
        self.entered += 1

    def end(self, text: str = "") -> None:
        """Stop watching; with a text, also inform the other ranks that this rank exits, and why."""
        self._stop.set()
        self._thread.join(2 * _ANSWER)
        if text and not self.store_lost and not self._thread.is_alive():
            with suppress(RuntimeError):
                self._store.set("ended", f"rank {self.rank} ended: {text}")
                if self.rank == 0:  # it may serve the store: give the others time to read it
                    time.sleep(1.5 * TICK)

    def announce_exit(self, text: str, code: int) -> bool:
        """Inform the other ranks, from another thread, that this rank exits; returns whether it is the first to exit.

        Returns after the others have had time to read it, because their connections break when this rank exits.
        """
        mine = f"{_STOPPED * (code == EXIT_RESUME)}rank {self.rank} ended: {text}"
        first = mine
        with suppress(RuntimeError):
            first = call_with_timeout(lambda: self._store.compare_set("ended", "", mine), _ANSWER).decode()
        time.sleep(4 * TICK)
        return first == mine

    def waiting_for(self, silence: float = _SILENT) -> str:
        """The ranks that keep this rank waiting, and what they are doing; empty if there are none.

        These are the ranks that have entered fewer collectives or have been silent for `silence` seconds.
        """
        mine, now, parts, heard = self.entered, self._clock(), [], dict(self._heard)
        for member in self.members:
            beat, since = heard.get(member.rank, (Heartbeat(mine, "", 0), now))
            silent = now - since > silence
            if member.rank != self.rank and (silent or beat.entered < mine):
                sign = f"silent for {now - since:.0f} s" if silent or not beat.place else ""
                place = beat.place and f"{', last ' * bool(sign)}at: {beat.place}"
                parts.append(f"rank {member.rank} ({member.host}, process {member.process}), {sign}{place}")
        return "; ".join(parts[:4]) + f"; and {len(parts) - 4} more" * (len(parts) > 4)

    def _run(self) -> None:
        entered, since, reported = -1, self._clock(), False
        patience = min(60.0, max(2.0, self.timeout / 10))
        while not self._stop.wait(TICK):
            now = self._clock()
            if self.entered != entered:
                entered, since, reported = self.entered, now, False
            waited = now - since
            with suppress(RuntimeError):  # listen only if necessary: N ranks each read N heartbeats from one store
                self._exchange(listen=self.waiting and waited > max(TICK, patience - 2 * _SILENT))
            late = self.waiting_for() if self.waiting and waited >= patience and self._ended is None else ""
            if not late:
                continue
            text = f"rank {self.rank} has waited {waited:.0f} s for {late}; rank {self.rank} is at: {self.place}"
            if self._is_first(entered) and not reported:
                reported = True
                print_error(self.prog, text)
            still_late = self.waiting_for(max(_SILENT, self.timeout / 2))
            if waited > self.timeout + _LATER and still_late and not self.patient:
                with suppress(RuntimeError):
                    self._store.set("ended", f"rank {self.rank} ended: {text}")
                self._exit(text)

    def _exchange(self, listen: bool) -> None:
        """Write this rank's heartbeat, and read those of the others if `listen`."""
        now = self._clock()
        self._tick += 1
        mine = json.dumps([self.entered, self.place, self._tick])
        if self._ended is not None:  # the store may have gone with that rank
            if self._ended[1].startswith(_STOPPED) and self.waiting:
                os._exit(EXIT_RESUME)  # that rank prints why
            if now - self._ended[0] > (_GRACE if self.waiting else self.timeout):  # this rank may be saving
                self._exit(self._ended[1])
            return
        if not listen:
            self._heard.clear()
        elif not self._heard:
            self._heard = {member.rank: (Heartbeat(0, "", 0), now) for member in self.members}
        if self.store_lost and not self._reconnect():
            return
        try:
            beats, ended = call_with_timeout(partial(self._write_and_read, self._store, mine, listen), _ANSWER)
        except RuntimeError:
            self.store_lost = True
            raise
        if ended:
            self._ended = now, ended
        for rank, raw in enumerate(beats):
            beat = Heartbeat(*json.loads(raw))
            if self._heard[rank][0].tick != beat.tick:
                self._heard[rank] = beat, now

    def _write_and_read(self, store: dist.Store, mine: str, listen: bool) -> tuple[list[bytes], str]:
        """The heartbeats of all ranks, and why a rank has exited. May return long after the caller has given up."""
        store.set(f"beat-{self.rank}", mine)
        keys = [f"beat-{member.rank}" for member in self.members]
        beats = store.multi_get(keys) if listen and store.check(keys) else []
        return beats, store.get("ended").decode() if store.check(["ended"]) else ""

    def _reconnect(self) -> bool:
        """Connect to the store again. Tries a plain socket first, because PyTorch logs each failure."""
        server = self._store
        while isinstance(server, dist.PrefixStore):
            server = server.underlying_store
        assert isinstance(server, dist.TCPStore)  # `meet` returns no other class
        try:
            socket.create_connection((server.host, server.port), timeout=1).close()
            self._store = call_with_timeout(self._store.clone, _ANSWER)
        except (OSError, RuntimeError):
            return False
        self.store_lost = False
        return True

    def _is_first(self, entered: int) -> bool:
        """Whether this rank is the lowest of those that wait."""
        now = self._clock()
        ahead = [
            rank for rank, (beat, since) in self._heard.items() if beat.entered >= entered and now - since < _SILENT
        ]
        return self.rank <= min(ahead, default=self.rank)

    def _exit(self, text: str) -> None:
        """Exit this process, because no exception can reach its waiting main thread."""
        print_error(self.prog, f"error: {text}", last=True)
        os._exit(2)


def print_error(prog: str, text: str, last: bool = False) -> None:
    """Print a line to stderr, below any remains of a progress bar. `last`: this rank then exits."""
    sys.stderr.write(f"\n{prog}: {text}\n")
    sys.stderr.flush()
    if last:
        inform_launcher(f"{prog}: {text}")
