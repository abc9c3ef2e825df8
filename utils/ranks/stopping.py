"""Requests to stop, from a signal or the death of the launcher.

The run then saves and can be resumed.
"""

import signal
import threading
from types import FrameType
from typing import Any

EXIT_RESUME = 75  # EX_TEMPFAIL of sysexits.h: not an error, start the run again
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


def signals_to_handle() -> list[signal.Signals]:
    """The signals that ask to stop, without SIGHUP if nohup ignores it, on purpose."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in _SIGNALS if not (number == signal.SIGHUP and is_ignored)]


class Stopping:
    """Whether this rank was asked to stop (`request`), and whether all ranks have agreed to stop
    (`agreed`).

    As a context it handles SIGTERM, SIGINT, SIGUSR1 and SIGHUP. Before `defer_signals` they raise
    KeyboardInterrupt, because there is nothing to save. Afterwards the first signal is a request,
    on which the ranks agree when they next sum their losses, and a second SIGINT exits immediately.
    """

    current: "Stopping | None" = None  # the instance that handles signals now, for other threads

    def __init__(self, ranks: Any):
        self.agreed = False
        self._ranks = ranks  # `Ranks`, which imports this module
        self._signal: signal.Signals | None = None
        self._training = False
        self._before: dict = {}

    def __enter__(self) -> "Stopping":
        # other threads cannot set handlers
        if threading.current_thread() is threading.main_thread():
            for number in signals_to_handle():
                # also SIGINT, which a shell ignores for its background jobs
                self._before[number] = signal.signal(number, self._on_signal)
        Stopping.current = self
        return self

    def __exit__(self, *exception: object) -> None:
        Stopping.current = None
        for number, handler in self._before.items():
            # SLURM and a launcher may both send a signal: a second one is ignored, even while the
            # last ranks exit.
            if self.agreed and number != signal.SIGINT:
                handler = signal.SIG_IGN
            signal.signal(number, handler)

    def defer_signals(self) -> None:
        """From now on, a signal only sets `request`: what has begun is finished and saved."""
        self._training = True

    @property
    def request(self) -> str:
        """What has asked this rank to stop, which other ranks may not know yet; empty if nothing
        has.
        """
        if self._signal:
            return self._signal.name
        return "the launcher has exited" if self._ranks.orphaned else ""

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signal = signal.Signals(number)
        if not self._training:
            raise Interrupted(self._signal)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


class Interrupted(KeyboardInterrupt):
    """A signal before there is something to save."""

    def __init__(self, number: signal.Signals):
        super().__init__(f"stopped by {number.name} before results were written")
        self.code = 130 if number == signal.SIGINT else EXIT_RESUME
