"""Wait for data and for connections that may never arrive."""

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from utils.errors import UserError, one_line

Item = TypeVar("Item")
Result = TypeVar("Result")

_SECONDS_TO_END = 2.0  # after this time, a worker that lost its connection has exited


class CurrentWait:
    """What the main thread is waiting for (empty if nothing), and the number of waits so far."""

    what = ""
    number = 0


def awaited(items: Iterable[Item], what: str) -> Iterator[Item]:
    """Yield the items while `DataWatch` measures how long each takes to arrive. `what` names an item."""
    iterator = None
    while True:
        CurrentWait.number += 1
        CurrentWait.what = what
        try:
            iterator = _started(items) if iterator is None else iterator
            item = next(iterator)
        except StopIteration:
            return
        except (ConnectionError, EOFError) as error:  # a worker exited while it was sending an item
            time.sleep(_SECONDS_TO_END)  # if PyTorch's SIGCHLD handler knows the reason, it raises it here
            problem = f"a loader process exited while it was sending {what} ({one_line(error)})"
            raise UserError(problem, "if memory ran out, lower --num_workers") from error
        finally:
            CurrentWait.what = ""
        yield item


def _started(items: Iterable[Item]) -> Iterator[Item]:
    """The iterator of the items. Its workers start with SIGTERM blocked, so that only their own rank can stop them.

    A worker already has threads when our code starts in it, and any of them could receive the signal.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        return iter(items)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def call_with_timeout(action: Callable[[], Result], seconds: float) -> Result:
    """Return the result of `action`, or raise RuntimeError after `seconds`: a store may wait forever."""
    results: list[Result] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(action())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise RuntimeError(f"no answer within {seconds:.0f} s")
    return results[0]
