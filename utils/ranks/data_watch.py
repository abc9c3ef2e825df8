"""Watch a process whose data does not arrive: report it, and exit after a request to stop or after --timeout."""

import multiprocessing
import os
import sys
import threading
from contextlib import suppress

import psutil

from utils.ranks.ranks import Ranks
from utils.ranks.stopping import EXIT_RESUME, Stopping
from utils.ranks.watch import TICK, RunningClock, print_error
from utils.waiting import CurrentWait, call_with_timeout

PATIENCE = 10.0  # seconds in which data must arrive after a request to stop


class DataWatch:
    """A thread that exits this process if its main thread waits for data that does not arrive.

    The main thread may be blocked where no exception can reach it, as in a read from a dead disk, so nothing can be
    saved. The process exits with code 75 if it was asked to stop or its launcher has exited, and with code 2 after
    --timeout. Other ranks exit with the same code.
    """

    def __init__(self, ranks: Ranks):
        self._ranks, self._stop = ranks, threading.Event()
        self._thread = threading.Thread(target=self._run, name="data watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop watching."""
        self._stop.set()
        # If this thread were the last owner of the process groups, Python would crash when it ends.
        self._thread.join(4 * TICK)

    def _run(self) -> None:
        clock, timeout = RunningClock(), self._ranks.launch.timeout
        number, began, asked, reported = 0, 0.0, 0.0, False
        while not self._stop.wait(TICK):
            clock.tick()
            now, what = clock(), CurrentWait.what
            if not what or CurrentWait.number != number:
                number, began, asked, reported = CurrentWait.number, now, 0.0, False
                continue
            waited, reason = now - began, self._reason_to_stop()
            asked = (asked or now) if reason else 0.0
            if reason and now - asked >= PATIENCE:
                fix = "; resume from the last checkpoint with --run_name NAME --resume auto"
                text = f"stopped ({reason}): {_late(what, waited)}"
                self._exit(text + fix * (self._ranks.prog == "train.py"), EXIT_RESUME)
            if waited > timeout:
                fix = "check that the disk with the data responds, or raise --timeout"
                self._exit(f"error: {_late(what, waited)}; {fix}", 2)
            if waited >= min(60.0, max(2.0, timeout / 10)) and not reported:
                reported = True
                if self._ranks.is_main:
                    print_error(self._ranks.prog, f"has waited {waited:.0f} s for {what}{_workers()}")

    def _reason_to_stop(self) -> str:
        """Why this process should stop; empty if it should continue."""
        if Stopping.current is not None:
            return Stopping.current.reason if Stopping.current.requested else ""
        return "the launcher is gone" if self._ranks.orphaned else ""

    def _exit(self, text: str, code: int) -> None:
        """Exit this process and kill its workers, which may be blocked as well."""
        if self._ranks.announce_exit(text, code):
            print_error(self._ranks.prog, text, last=True)
        with suppress(RuntimeError):  # the program that reads the output may be suspended
            call_with_timeout(sys.stdout.flush, 1.0)
        for worker in multiprocessing.active_children():
            worker.kill()
        os._exit(code)


def _late(what: str, waited: float) -> str:
    return f"{what} has not arrived for {waited:.0f} s{_workers()}"


def _workers() -> str:
    """The state of this process's loader processes, for a message."""
    states = []
    for worker in multiprocessing.active_children():
        with suppress(psutil.Error):
            states.append(f"{worker.pid} ({psutil.Process(worker.pid).status()})")
    more = f", and {len(states) - 4} more" * (len(states) > 4)
    return f", from loader process{'es' * (len(states) > 1)} {', '.join(states[:4])}{more}" if states else ""
