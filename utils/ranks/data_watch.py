"""A process whose data does not arrive reports it, exits when it is told to stop, and exits after --timeout."""

import multiprocessing
import os
import sys
import threading
import time
from contextlib import suppress

import psutil

from utils.ranks.ranks import Ranks
from utils.ranks.stopping import EXIT_RESUME, Stopping
from utils.waiting import CurrentWait, call_with_timeout

_TICK = 0.5  # seconds between two looks
PATIENCE = 10.0  # seconds in which data must arrive after a request to stop


class DataWatch:
    """A thread that ends this process when its main thread waits for data that does not arrive.

    The main thread may be blocked where no exception reaches it, as in a read from a dead disk, and nothing can be
    saved. The process exits with the code for a resume if it was told to stop or its launcher is gone, and with code 2
    after --timeout. Other ranks exit with the same code.
    """

    def __init__(self, ranks: Ranks):
        self._ranks, self._stop = ranks, threading.Event()
        self._thread = threading.Thread(target=self._run, name="data watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop watching."""
        self._stop.set()
        # The thread must not be the last owner of the process groups: as Python ends, that would end in a crash.
        self._thread.join(4 * _TICK)

    def _run(self) -> None:
        timeout = self._ranks.launch.timeout
        number, waited, wished, said, last = 0, 0.0, 0.0, False, time.monotonic()
        while not self._stop.wait(_TICK):
            now = time.monotonic()
            passed, last = min(now - last, 2 * _TICK), now  # a pause of the process is not waiting
            what = CurrentWait.what
            if not what or CurrentWait.number != number:
                number, waited, wished, said = CurrentWait.number, 0.0, 0.0, False
                continue
            waited += passed
            reason = self._told_to_stop()
            wished = wished + passed if reason else 0.0
            if wished >= PATIENCE:
                text = f"stopped ({reason}): {what} has not arrived for {waited:.0f} s{_workers()}"
                more = "; go on from the last checkpoint with --run_name NAME --resume auto"
                self._leave(text + more * (self._ranks.prog == "train.py"), EXIT_RESUME)
            if waited > timeout:
                fix = "check that the disk with the data responds, or raise --timeout"
                self._leave(f"error: {what} has not arrived for {waited:.0f} s{_workers()}; {fix}", 2)
            if waited >= min(60.0, max(2.0, timeout / 10)) and not said:
                said = True
                if self._ranks.is_main:
                    self._say(f"has waited {waited:.0f} s for {what}{_workers()}")

    def _told_to_stop(self) -> str:
        """Why this process should stop; empty if it should not."""
        if Stopping.current is not None:
            return Stopping.current.reason if Stopping.current.requested else ""
        return "the launcher is gone" if self._ranks.orphaned else ""

    def _say(self, text: str) -> None:
        sys.stderr.write(f"\n{self._ranks.prog}: {text}\n")
        sys.stderr.flush()

    def _leave(self, text: str, code: int) -> None:
        """End this process and its workers, which may be blocked as well."""
        if self._ranks.announce_exit(text, code):
            self._say(text)
        with suppress(RuntimeError):  # the reader of the output may be stopped
            call_with_timeout(sys.stdout.flush, 1.0)
        for worker in multiprocessing.active_children():
            worker.kill()
        os._exit(code)


def _workers() -> str:
    """The state of this process's loader processes, for a message."""
    told = []
    for worker in multiprocessing.active_children():
        with suppress(psutil.Error):
            told.append(f"{worker.pid} ({psutil.Process(worker.pid).status()})")
    more = f", and {len(told) - 4} more" * (len(told) > 4)
    return f", from loader process{'es' * (len(told) > 1)} {', '.join(told[:4])}{more}" if told else ""
