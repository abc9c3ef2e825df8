"""What a rank asks of its own process, so that the loop is not held up: memory that stays, garbage that waits."""

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import torch

from utils.stopping import leave_signals_to_parent

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_LARGEST = 2**30

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


def keep_freed_memory() -> None:
    """Let glibc's malloc keep what is freed, for the next update to use again; elsewhere this does nothing.

    By default large buffers go back to the system at once, and each update faults the pages of its activations in anew.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # The second call alone would make it worse, and before 2.36 or so glibc takes no more than 32 MiB in the first.
    if mallopt is not None and (mallopt(_M_MMAP_THRESHOLD, _LARGEST) or mallopt(_M_MMAP_THRESHOLD, 2**25)):
        mallopt(_M_TRIM_THRESHOLD, _LARGEST)


@contextmanager
def settled_garbage() -> Iterator[None]:
    """Keep all that start-up made out of the garbage collector's sight, so that its full collections stay short."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def free_memory() -> tuple[int, int]:
    """Bytes of memory that are free and that there are, for this machine or the container that this process is in."""
    system = psutil.virtual_memory()
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError, KeyError):  # no container, no limit, or another version of cgroups
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        kept = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return min(system.available, limit - used + int(kept["inactive_file"])), min(system.total, limit)
    return system.available, system.total
