"""The watchdog: report waits for other ranks and for data that last long, and end those that last
too long.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.distributed import Store

from utils.launch import attempts_left, exit_now, how_to_resume, print_last_line, print_line
from utils.ranks.heartbeats import ANSWER, SILENT, TICK, Beat, Ended, Heartbeats
from utils.ranks.stopping import EXIT_RESUME, Stopping
from utils.waiting import DataWait

if TYPE_CHECKING:
    from utils.launch.rendezvous import Member

PATIENCE = 10.0  # seconds in which data must arrive after a request to stop
_LATE = 1.0  # seconds that a check may be late; if later, the process was paused
# seconds of silence after which a rank counts as lost, if the launcher can restart the run
_LOST = 30.0
# seconds after the timeout, because at the timeout gloo raises an error in the main thread
_LATER = 3.0
_GRACE = 5.0  # seconds that the main thread has to notice that another rank has ended
# the start of the message of a rank that was asked to stop and exited without the others
_STOPPED = "stopped: "


@dataclass
class Wait:
    """A wait of the main thread for the other ranks, in a collective."""

    since: float
    no_timeout: bool
    reported: bool = False


class Watch:
    """A thread that watches what the main thread waits for.

    It reports a wait after a tenth of the timeout, and exits this process after the whole timeout,
    because the main thread may be blocked where no exception can reach it. There are two kinds of
    wait:

    * For other ranks, in a collective (`Wait`). Late ranks have entered fewer collectives. Each
      rank writes to the store what it is doing (heartbeats). One of the waiting ranks reports the
      late ones. If a machine loses its power, its connections stay open. So the wait also ends when
      a rank has been silent for `_LOST` seconds and the launcher can restart the run.
    * For data (`DataWait`), as from a dead disk. After a request to stop, or if the launcher has
      exited, the process exits within `PATIENCE` with code 75, since nothing can be saved; after
      the timeout it exits with code 2.

    A rank that exits with an error writes this to the store, so that the others exit even if no
    launcher stops them.
    """

    def __init__(self, rank: int, timeout: float, prog: str, is_orphan: Callable[[], bool]):
        self.rank = rank
        self.timeout = timeout
        self.prog = prog
        self.entered = 0  # collectives so far
        self.place = ""  # what this rank is doing
        self._wait: Wait | None = None  # None while this rank works
        self._is_orphan = is_orphan
        self._patience = min(10.0 if attempts_left() else 60.0, max(2.0, timeout / 10))
        self._heartbeats: Heartbeats | None = None  # once the ranks find each other
        self._now = 0.0  # the seconds that this process has run, without pauses
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Start watching."""
        self._thread.start()

    def connect(self, store: Store, members: list["Member"]) -> None:
        """From now on, exchange heartbeats with the other ranks."""
        self._heartbeats = Heartbeats(self.rank, store, members, self._beat)
        run = self._heartbeats.run
        threading.Thread(target=run, args=[self._stop], daemon=True).start()

    def _beat(self) -> Beat:
        return Beat(self.entered, self.place, self._now)

    @property
    def store_lost(self) -> bool:
        """Whether the store cannot be reached."""
        return self._heartbeats is not None and self._heartbeats.store_lost

    def describe_late(self) -> str:
        """The ranks that keep this rank waiting, and what they are doing; empty if none."""
        return self._heartbeats.describe_late() if self._heartbeats else ""

    def enter(self, place: str = "") -> None:
        """Record that this rank is working, and on what; the default is what it did before."""
        self._wait = None
        self.place = place or self.place

    def enter_collective(self, place: str = "", no_timeout: bool = False) -> None:
        """Record that this rank waits for the others in a collective.

        With `no_timeout`, the wait may take any time.
        """
        self.place = place or self.place
        self._wait = Wait(self._now, no_timeout)
        self.entered += 1

    def end(self, text: str = "") -> None:
        """Stop watching; with a text, also inform the other ranks that this rank exits, and why."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(2 * ANSWER)
        if text and self._heartbeats and not self.store_lost:
            self._heartbeats.write_end(f"rank {self.rank} ended: {text}")

    def wait_for_readers(self) -> None:
        """Before rank 0, which may serve the store, exits: the others read why it does."""
        if self.rank == 0 and self._heartbeats and not self.store_lost:
            time.sleep(1.5 * TICK)

    def _exit(self, text: str, code: int = 2) -> None:
        """Exit this process; the first rank that exits prints the text."""
        mine = f"rank {self.rank} ended: {text}"
        if code == EXIT_RESUME:
            mine = _STOPPED + mine
        if self._heartbeats is None or self._heartbeats.write_end(mine):
            print_last_line(self.prog, text)
        # connections break when this rank exits: let the others read it first
        if self._heartbeats:
            time.sleep(4 * TICK)
        exit_now(code, text)

    def _run(self) -> None:
        last = time.monotonic()
        while not self._stop.wait(TICK):
            # If all ranks are paused (SIGSTOP, a suspended job), this does not count as waiting for
            # each other.
            elapsed = min(time.monotonic() - last, TICK + _LATE)
            last = time.monotonic()
            self._now += elapsed
            self._look_at_data(elapsed)
            if self._heartbeats:
                self._look_at_ranks(self._heartbeats)

    def _look_at_data(self, elapsed: float) -> None:
        """End a wait for data that does not arrive."""
        wait = DataWait.current
        if wait is None:
            return
        wait.seconds += elapsed
        text = f"{wait.what} has not arrived for {wait.seconds:.0f} s"
        if reason := self._reason_to_stop():
            wait.asked += elapsed
            if wait.asked > PATIENCE:
                self._exit(f"stopped ({reason}): {text}{how_to_resume(self.prog)}", EXIT_RESUME)
        if wait.seconds > self.timeout:
            fix = "check that the disk with the data responds, or raise --timeout"
            self._exit(f"error: {text}; {fix}")
        if wait.seconds >= self._patience and not wait.reported:
            wait.reported = True
            if self.rank == 0:
                print_line(self.prog, f"has waited {wait.seconds:.0f} s for {wait.what}")

    def _reason_to_stop(self) -> str:
        """What has asked this rank to stop; empty if nothing has."""
        if Stopping.current:
            return Stopping.current.request
        return "the launcher has exited" if self._is_orphan() else ""

    def _look_at_ranks(self, heartbeats: Heartbeats) -> None:
        """End a wait for ranks that are late."""
        if heartbeats.ended:  # the store may have gone with that rank
            self._follow(heartbeats.ended)
            return
        wait = self._wait
        waited = self._now - wait.since if wait else 0.0
        heartbeats.listen(to_others=waited > max(TICK, self._patience - 2 * SILENT))
        if wait is None or waited < self._patience:
            return
        late = heartbeats.describe_late()
        if not late:
            return
        me = f"rank {self.rank}"
        text = f"{me} has waited {waited:.0f} s for {late}; {me} is at: {self.place}"
        if not wait.reported and heartbeats.is_first():
            wait.reported = True
            print_line(self.prog, text)
        # without the store, all ranks seem silent
        if heartbeats.longest_silence() > _LOST and attempts_left() and not self.store_lost:
            end = "gave up on the silent rank; the launcher restarts the run"
            self._exit(f"error: {text}; {end}")
        still_late = heartbeats.describe_late(max(SILENT, self.timeout / 2))
        if waited > self.timeout + _LATER and still_late and not wait.no_timeout:
            fix = "read the output of the late ranks, or raise --timeout"
            self._exit(f"error: {text}; {fix}")

    def _follow(self, ended: Ended) -> None:
        """Exit because another rank did; later if the main thread is not waiting, because it may be
        saving.
        """
        waiting = self._wait is not None
        if ended.text.startswith(_STOPPED) and waiting:
            exit_now(EXIT_RESUME, ended.text)  # that rank prints why
        if self._now - ended.since > (_GRACE if waiting else self.timeout):
            print_line(self.prog, f"error: {ended.text}")
            exit_now(2, ended.text)
