"""How loader processes start, which signals they handle, and how they send batches through /dev/shm.

/dev/shm is shared memory. In containers it is often small.
"""

import os
import signal
import sys
import threading
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from utils.errors import UserError, one_line
from utils.memory import MB, SHM, SHM_FIX, describe_shm


class ShmFull(UserError):
    """A loader process could not write a batch to /dev/shm."""


def move_to_shared_memory(batch: Any) -> dict:
    """A `collate_fn` that moves the tensors of a batch, a dict, to shared memory if this is a loader process.

    If there is no space, the tensors are returned empty, with a ShmFull under "error". PyTorch would move them later,
    in a thread that only prints the error, and the rank would wait for this batch forever.
    """
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    try:
        for tensor in tensors.values() if get_worker_info() is not None else ():
            if tensor.numel():  # an empty tensor takes no shared memory
                _share(tensor)
    except ShmFull as error:
        tensors, batch = {name: value[:0] for name, value in tensors.items()}, batch | {"error": error}
    # PyTorch would send the whole memory of an empty view; an empty copy has none.
    return batch | {name: value if value.numel() else value.clone() for name, value in tensors.items()}


def _share(tensor: Tensor) -> None:
    try:
        tensor.share_memory_()
    except RuntimeError as error:
        problem = f"a loader process could not write a batch of {tensor.nbytes / MB:.1f} MB"
        raise ShmFull(
            f"{SHM}: {problem} ({describe_shm()}; {one_line(error)[:160]})", f"{SHM_FIX}, or use --num_workers 0"
        ) from error


# How workers start. The default of Python 3.14 would import PyTorch again in each worker, and would start a process
# between the worker and its rank, so that neither would notice if the other one exits.
_START_METHOD = "fork" if sys.platform == "linux" else None


def worker_processes(count: int, ahead: int = 2) -> dict:
    """The keyword arguments of a DataLoader with `count` workers that each prepare `ahead` batches in advance."""
    return {
        "num_workers": count,
        "prefetch_factor": ahead if count else None,
        "multiprocessing_context": _START_METHOD if count else None,
        # The rank passes its own process id: if it were killed first, the worker would have another parent.
        "worker_init_fn": partial(_leave_signals_to_parent, os.getpid()),
        "generator": torch.Generator(),  # because starting workers must not draw from the global generator
    }


def _leave_signals_to_parent(parent: int, worker: int) -> None:
    """Called in each worker, so that only its own rank, the process `parent`, can stop it.

    Ctrl-C in a terminal and scancel signal the workers too, but the rank needs them to finish its update.
    """
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.excepthook = _print_unless_disconnected
    if hasattr(signal, "sigtimedwait"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_await_parents_sigterm, args=(parent,), daemon=True).start()


def _print_unless_disconnected(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error of a thread, except a lost connection: the rank was stopped while it was receiving a batch."""
    if not issubclass(kind, ConnectionError | EOFError):
        sys.__excepthook__(kind, error, trace)


def _await_parents_sigterm(parent: int) -> None:
    while os.getppid() == parent:  # a parent that is killed sends no signal
        received = signal.sigtimedwait({signal.SIGTERM}, 2)
        if received is not None and received.si_pid == parent:
            break
    os._exit(0)
