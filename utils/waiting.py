"""Wait for data and for connections that may never arrive."""

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar, TypeVar

from utils.errors import UserError, one_line

if TYPE_CHECKING:
    from torch.distributed import Store

Item = TypeVar("Item")
Result = TypeVar("Result")

_SECONDS_TO_END = 2.0  # after this time, a worker that lost its connection has exited


@dataclass(eq=False)
class DataWait:
    """A wait of the main thread for data: `what` names it, and `current` is the wait of this
    moment, if any.

    The watchdog sets the rest: the seconds so far, those after a request to stop, and whether it
    reported the wait.
    """

    what: str
    seconds: float = 0.0
    asked: float = 0.0
    reported: bool = False
    current: ClassVar["DataWait | None"] = None


def wait_for_items(items: Iterable[Item], what: str) -> Iterator[Item]:
    """Yield the items while the watchdog measures how long each takes to arrive. `what` names an
    item.

    The workers of a loader start with SIGTERM blocked, so that only their own rank can stop them: a
    worker already has threads when our code starts in it, and any of them could receive the signal.
    """
    iterator = None
    while True:
        DataWait.current = DataWait(what)
        blocked = {signal.SIGTERM} if iterator is None else set()  # while workers start
        before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        try:
            if iterator is None:
                iterator = iter(items)
            item = next(iterator)  # a prepared loader starts its workers here, others in `iter`
        except StopIteration:
            return
        except (ConnectionError, EOFError) as error:  # a worker exited while it was sending an item
            # if PyTorch's SIGCHLD handler knows the reason, it raises it here
            time.sleep(_SECONDS_TO_END)
            problem = f"a loader process exited while it was sending {what} ({one_line(error)})"
            raise UserError(problem, "if memory is short, lower --num_workers") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            DataWait.current = None
        yield item


def call_with_timeout(action: Callable[[], Result], seconds: float) -> Result:
    """Return the result of `action`, or raise RuntimeError after `seconds`.

    It runs in a thread that does not keep the process alive: a store may let it wait forever.
    """
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(action())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return future.result(seconds)
    except TimeoutError:
        raise RuntimeError(f"no answer within {seconds:.0f} s") from None


def wait_for_keys(store: "Store", keys: list[str], seconds: float) -> bool:
    """Wait until the store has the keys; False if it does not within `seconds`, or cannot be
    reached.
    """
    try:
        call_with_timeout(lambda: store.wait(keys, timedelta(seconds=seconds)), seconds + 1)
        return True
    except RuntimeError:
        return False
