"""The watchdog: report waits for other ranks and for data that last long, and end those that last
too long.
"""

import json
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from torch.distributed import Store

from utils.launch import attempts_left, exit_now, how_to_resume, print_last_line, print_line
from utils.ranks.stopping import EXIT_RESUME, Stopping
from utils.waiting import DataWait, call_with_timeout

if TYPE_CHECKING:
    from utils.launch.rendezvous import Member

PATIENCE = 10.0  # seconds in which data must arrive after a request to stop
_TICK = 0.5  # seconds between checks
_LATE = 1.0  # seconds that a check may be late; if later, the process was paused
_ANSWER = 3.0  # seconds that the store may take to answer
_SILENT = 5.0  # seconds without a heartbeat after which a rank is reported as silent
# seconds of silence after which a rank counts as lost, if the launcher can restart the run
_LOST = 30.0
# seconds after the timeout, because at the timeout gloo raises an error in the main thread
_LATER = 3.0
_GRACE = 5.0  # seconds that the main thread has to notice that another rank has ended
# the start of the message of a rank that was asked to stop and exited without the others
_STOPPED = "stopped: "


class Watch:
    """A thread that watches what the main thread waits for.

    It reports a wait after a tenth of the timeout, and exits this process after the whole timeout,
    because the main thread may be blocked where no exception can reach it. There are two kinds of
    wait:

    * For other ranks, in a collective. Late ranks have entered fewer collectives. Each rank writes heartbeats with what
      it does to the store. One of the waiting ranks reports the late ones. If a machine loses its
      power, its connections stay open. So the wait also ends when a rank has been silent for
      `_LOST` seconds and the launcher can restart the run.
    * For data (`DataWait`), as from a dead disk. After a request to stop, or if the launcher has exited, the process
      exits within `PATIENCE` with code 75, since nothing can be saved; after the timeout it exits
      with code 2.

    A rank that exits with an error writes this to the store, so that the others exit even if no
    launcher stops them.
    """

    def __init__(self, rank: int, timeout: float, prog: str, is_orphan: Callable[[], bool]):
        self.rank = rank
        self.timeout = timeout
        self.prog = prog
        self._is_orphan = is_orphan
        self.entered = 0
        self.place = ""
        self.waiting = False
        self.no_timeout = False
        self._patience = min(10.0 if attempts_left() else 60.0, max(2.0, timeout / 10))
        self._store: Store | None = None
        self._members: list[Member] = []
        self._answered = math.inf  # when the store last answered
        # Each rank's last heartbeat, and when it arrived: the collectives it has entered, its
        # place, its seconds. Empty unless this rank needs them: otherwise N ranks would each read N
        # heartbeats from one store.
        self._heard: dict[int, tuple[list, float]] = {}
        self._ended: tuple[float, str] | None = None  # when another rank exited, and why
        self._now = 0.0  # the seconds that this process has run, without pauses
        # when this rank has entered the last collective; see `_look_at_ranks`
        self._began = 0.0
        self._reported = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Start watching."""
        self._thread.start()

    def connect(self, store: Store, members: list["Member"]) -> None:
        """From now on, exchange heartbeats with the other ranks."""
        self._members, self._store, self._answered = members, store.clone(), self._now
        self._store.set_timeout(timedelta(seconds=_ANSWER))
        threading.Thread(target=self._run_exchange, args=[self._store], daemon=True).start()

    @property
    def store_lost(self) -> bool:
        """Whether the store cannot be reached."""
        return self._now - self._answered > _ANSWER + _TICK

    def enter(self, place: str = "") -> None:
        """Record that this rank is working, and on what; the default is what it did before."""
        self.waiting, self.place = False, place or self.place

    def enter_collective(self, place: str = "", no_timeout: bool = False) -> None:
        """Record that this rank waits for the others in a collective.

        With `no_timeout`, the wait may take any time.
        """
        self.place = place or self.place
        self.no_timeout = no_timeout
        self.waiting = True
        self._began = self._now
        self._reported = False
        self.entered += 1

    def end(self, text: str = "") -> None:
        """Stop watching; with a text, also inform the other ranks that this rank exits, and why."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(2 * _ANSWER)
        if text and self._store and not self.store_lost:
            self._inform_others(text)

    def wait_for_readers(self) -> None:
        """Before rank 0, which may serve the store, exits: the others read why it does."""
        if self.rank == 0 and self._store and not self.store_lost:
            time.sleep(1.5 * _TICK)

    def _inform_others(self, text: str, stopped: bool = False) -> bool:
        """Write to the store that this rank exits, and why; returns whether it is the first that
        exits.
        """
        mine = f"{_STOPPED * stopped}rank {self.rank} ended: {text}"
        if self._store:
            with suppress(RuntimeError):
                compare_set = partial(self._store.compare_set, "ended", "", mine)
                return call_with_timeout(compare_set, _ANSWER).decode() == mine
        return True

    def _exit(self, text: str, code: int = 2) -> None:
        """Exit this process; the first rank that exits prints the text."""
        if self._inform_others(text, stopped=code == EXIT_RESUME):
            print_last_line(self.prog, text)
        # connections break when this rank exits: let the others read it first
        if self._store:
            time.sleep(4 * _TICK)
        exit_now(code, text)

    def _run(self) -> None:
        last = time.monotonic()
        while not self._stop.wait(_TICK):
            # If all ranks are paused (SIGSTOP, a suspended job), this does not count as waiting for
            # each other.
            elapsed = min(time.monotonic() - last, _TICK + _LATE)
            last = time.monotonic()
            self._now += elapsed
            self._look_at_data(elapsed)
            self._look_at_ranks()

    def _look_at_data(self, elapsed: float) -> None:
        """End a wait for data that does not arrive."""
        wait = DataWait.current
        if wait is None:
            return
        orphaned = "the launcher has exited" if self._is_orphan() else ""
        reason = Stopping.current.request if Stopping.current else orphaned
        wait.seconds += elapsed
        wait.asked += elapsed * bool(reason)
        text = f"{wait.what} has not arrived for {wait.seconds:.0f} s"
        if wait.asked > PATIENCE:
            self._exit(f"stopped ({reason}): {text}{how_to_resume(self.prog)}", EXIT_RESUME)
        if wait.seconds > self.timeout:
            self._exit(
                f"error: {text}; check that the disk with the data responds, or raise --timeout"
            )
        if wait.seconds >= self._patience and not wait.reported:
            wait.reported = True
            if self.rank == 0:
                print_line(self.prog, f"has waited {wait.seconds:.0f} s for {wait.what}")

    def _look_at_ranks(self) -> None:
        """End a wait for ranks that are late."""
        waited = self._now - self._began
        if self._ended:  # the store may have gone with that rank
            self._follow(*self._ended)
            return
        if not self.waiting or waited <= max(_TICK, self._patience - 2 * _SILENT):
            self._heard = {}
        elif not self._heard:
            self._heard = {member.rank: ([0, "", 0], self._now) for member in self._members}
        late = self.describe_late() if waited >= self._patience else ""
        if not late:
            return
        text = f"rank {self.rank} has waited {waited:.0f} s for {late}; rank {self.rank} is at: {self.place}"
        if not self._reported and self._is_first():
            self._reported = True
            print_line(self.prog, text)
        silent = [
            self._now - since for rank, (_, since) in self._heard.items() if rank != self.rank
        ]
        # without the store, all ranks seem silent
        if max(silent) > _LOST and attempts_left() and not self.store_lost:
            self._exit(f"error: {text}; gave up on the silent rank; the launcher restarts the run")
        still_late = self.describe_late(max(_SILENT, self.timeout / 2))
        if waited > self.timeout + _LATER and still_late and not self.no_timeout:
            self._exit(f"error: {text}; read the output of the late ranks, or raise --timeout")

    def _follow(self, ended: float, text: str) -> None:
        """Exit because another rank did; later if the main thread is not waiting, because it may be
        saving.
        """
        if text.startswith(_STOPPED) and self.waiting:
            exit_now(EXIT_RESUME, text)  # that rank prints why
        if self._now - ended > (_GRACE if self.waiting else self.timeout):
            print_line(self.prog, f"error: {text}")
            exit_now(2, text)

    def _run_exchange(self, store: Store) -> None:
        """Exchange heartbeats, in a thread of its own, because the store may never answer."""
        try:
            while not self._stop.wait(_TICK):
                self._exchange(store)
                self._answered = self._now
        except RuntimeError:  # not tried again, because PyTorch logs each failure
            self._answered = -math.inf

    def _exchange(self, store: Store) -> None:
        """Write this rank's heartbeat, and read why a rank has exited, if any, and the heartbeats
        that are needed.
        """
        store.set(f"beat-{self.rank}", json.dumps([self.entered, self.place, self._now]))
        if self._ended is None and store.check(["ended"]):
            self._ended = self._now, store.get("ended").decode()
        heard = self._heard
        keys = [f"beat-{rank}" for rank in heard]
        if keys and store.check(keys):
            for rank, beat in zip(heard, map(json.loads, store.multi_get(keys)), strict=True):
                if heard[rank][0] != beat:
                    heard[rank] = beat, self._now

    def describe_late(self, silence: float = _SILENT) -> str:
        """The ranks that keep this rank waiting, and what they are doing; empty if there are none.

        These are the ranks that have entered fewer collectives or have been silent for `silence`
        seconds.
        """
        parts = []
        heard = self._heard
        for member in self._members if heard else ():
            (entered, place, _), since = heard[member.rank]
            seconds = self._now - since
            if member.rank != self.rank and (seconds > silence or entered < self.entered):
                signs = [f"silent for {seconds:.0f} s"] if seconds > silence or not place else []
                signs += [f"{'last ' * bool(signs)}at: {place}"] if place else []
                parts.append(
                    f"rank {member.rank} ({member.host}, process {member.process}), {', '.join(signs)}"
                )
        more = [f"and {len(parts) - 4} more"] if len(parts) > 4 else []
        return "; ".join([*parts[:4], *more])

    def _is_first(self) -> bool:
        """Whether this rank is the lowest of those that wait."""
        lower = [heard for rank, heard in self._heard.items() if rank < self.rank]
        return not any(
            entered >= self.entered and self._now - since < _SILENT
            for (entered, *_), since in lower
        )
