"""Wait for data and for connections that may never answer."""

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from utils.errors import one_line

Item = TypeVar("Item")


_DYING = 2.0  # seconds that a process may take to end


class CurrentWait:
    """What the main thread is waiting for, empty if nothing, and the number of that wait."""

    what, number = "", 0


def awaited(items: Iterable[Item], what: str) -> Iterator[Item]:
    """Yield the items; `DataWatch` watches how long each takes to arrive. `what` names one of them."""
    iterator = None
    while True:
        CurrentWait.number += 1
        CurrentWait.what = what
        try:
            iterator = _started(items) if iterator is None else iterator
            item = next(iterator)
        except StopIteration:
            return
        except (ConnectionError, EOFError) as error:  # a worker ended while it handed over an item
            time.sleep(_DYING)  # here PyTorch's SIGCHLD handler raises the reason, if it knows it
            text = f"a loader process ended while it handed over {what} ({one_line(error)})"
            raise ValueError(f"{text}; lower --num_workers if memory was short") from error
        finally:
            CurrentWait.what = ""
        yield item


def _started(items: Iterable[Item]) -> Iterator[Item]:
    """The iterator of the items, which starts their workers with SIGTERM blocked: only the rank itself may end them.

    A worker has threads before any code of ours runs in it, and each of them would take the signal.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        return iter(items)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


Result = TypeVar("Result")


def call_with_timeout(action: Callable[[], Result], seconds: float) -> Result:
    """What `action` returns, or RuntimeError when that takes longer: a store waits for ever on a dead connection."""
    done: list[tuple[Result | None, Exception | None]] = []

    def run() -> None:
        try:
            done.append((action(), None))
        except Exception as error:
            done.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    result, error = done[0] if done else (None, RuntimeError(f"no answer within {seconds:.0f} s"))
    if error is not None:
        raise error
    return result
