"""What the threads that watch a rank share: a clock that stops while the process is paused, and a line on stderr."""

import sys
import threading
import time

TICK = 0.5  # seconds between two looks of a watching thread
_LATE = 1.0  # seconds that a tick may be late; if it is later, the process was paused


class RunningClock:
    """The seconds that this process has run, without pauses. `tick` must be called every TICK seconds.

    If all ranks are paused (SIGSTOP, a suspended job), none of them waits for another.
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


def print_error(prog: str, text: str) -> None:
    """Print a line on stderr, below what is left of a progress bar."""
    sys.stderr.write(f"\n{prog}: {text}\n")
    sys.stderr.flush()
