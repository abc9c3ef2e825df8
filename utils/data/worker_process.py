"""/dev/shm, through which loader processes hand over their batches, and which is small in containers."""

import os
import signal
import sys
import threading
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from utils.memory import FIX, MB, PLACE, describe


class ShmFull(ValueError):
    """A loader process could not put a batch into /dev/shm."""


def share(tensors: Iterable[Tensor]) -> None:
    """Move tensors to shared memory if this is a loader process; ShmFull if that fails.

    Otherwise a thread of the worker would do it, which only prints the error: the rank would wait for that batch
    forever.
    """
    if get_worker_info() is None:
        return
    for tensor in tensors:
        if not tensor.numel():  # takes no shared memory
            continue
        try:
            tensor.share_memory_()
        except RuntimeError as error:
            reason, size = " ".join(str(error).split())[:160], tensor.nbytes / MB
            raise ShmFull(
                f"{PLACE}: a loader process could not hand over a batch of {size:.1f} MB ({describe()}; {reason}); "
                f"{FIX}, or use --num_workers 0"
            ) from error


# How loaders start their workers. What Python 3.14 does by itself would import PyTorch anew in each of them, and put a
# process between a worker and its rank, so that neither would notice the other's end.
_START_METHOD = "fork" if sys.platform == "linux" else None


def worker_processes(count: int, ahead: int = 2) -> dict:
    """Keyword arguments of a DataLoader for `count` workers, each `ahead` batches ahead."""
    return {
        "num_workers": count,
        "prefetch_factor": ahead if count else None,
        "multiprocessing_context": _START_METHOD if count else None,
        "worker_init_fn": _start_worker,
        "generator": torch.Generator(),  # of its own: starting workers must not draw from the global one
    }


def _start_worker(number: int) -> None:
    leave_signals_to_parent()


def leave_signals_to_parent() -> None:
    """Called in a loader's worker: only the rank itself may end it.

    Ctrl-C in a terminal and scancel reach workers too, and without them the rank could not finish its update.
    """
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_await_parents_sigterm, args=(os.getppid(),), daemon=True).start()


def _await_parents_sigterm(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)
