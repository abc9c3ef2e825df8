"""Requests to stop, by a signal or by the death of the launcher, after which the run saves and can be resumed."""

import signal
import threading
from collections.abc import Callable
from types import FrameType

EXIT_RESUME = 75  # EX_TEMPFAIL of sysexits.h: nothing is wrong, start the run again
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class Stopping:
    """Whether this rank was told to stop (`requested`), and whether all ranks have agreed to stop (`agreed`).

    As a context it handles SIGTERM, SIGINT, SIGUSR1 and SIGHUP. Before `training_begins` there is nothing to save, so
    they raise KeyboardInterrupt. After it the first signal is a request, on which the ranks agree when they next
    exchange their losses, and a second SIGINT ends the process at once.
    """

    current: "Stopping | None" = None  # the one that handles signals now, for other threads to read

    def __init__(self, is_orphan: Callable[[], bool]):
        self.agreed = False
        self._is_orphan = is_orphan
        self._signal: signal.Signals | None = None
        self._training = False
        self._before: dict = {}

    def __enter__(self) -> "Stopping":
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            for number in _SIGNALS:
                # nohup ignores SIGHUP on purpose; a shell ignores SIGINT for all jobs that it starts in the background.
                if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._on_signal)
        Stopping.current = self
        return self

    def __exit__(self, *exception: object) -> None:
        Stopping.current = None
        for number, handler in self._before.items():
            # SLURM and a launcher may both send a signal: a second one is ignored, also while the last ranks exit.
            signal.signal(number, signal.SIG_IGN if self.agreed and number != signal.SIGINT else handler)

    def training_begins(self) -> None:
        """From now on finish the update and save before exiting."""
        self._training = True

    @property
    def requested(self) -> bool:
        """Whether this rank was told to stop; the others may not know yet."""
        return self._signal is not None or self._is_orphan()

    @property
    def reason(self) -> str:
        """Why the run stops, as far as this rank knows."""
        if self._signal is not None:
            return self._signal.name
        return "the launcher is gone" if self._is_orphan() else "another rank was told to stop"

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signal = signal.Signals(number)
        if not self._training:
            raise Interrupted(self._signal)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


class Interrupted(KeyboardInterrupt):
    """A signal before training began."""

    def __init__(self, number: signal.Signals):
        super().__init__(f"stopped by {number.name} before training began")
        self.code = 130 if number == signal.SIGINT else EXIT_RESUME
