"""Memory and processor cores: how much is available, and how to avoid memory management in the
training loop.
"""

import ctypes
import gc
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

# of glibc's malloc.h
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST = 2**30

CONTAINER = Path("/sys/fs/cgroup")  # its limits, in version 2 of cgroups
SHM = "/dev/shm"
SHM_FIX = "docker run --shm-size=8g or --ipc=host makes it larger"


def keep_freed_memory() -> None:
    """Let glibc's malloc keep freed memory for the next update. Does nothing without glibc.

    By default glibc returns large buffers to the system at once, so each update has page faults for
    its activations.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)
    # The second setting alone is slower than none. Before about 2.36, glibc accepts at most 32 MiB
    # for the first.
    if mallopt(_M_MMAP_THRESHOLD, _LARGEST) or mallopt(_M_MMAP_THRESHOLD, 2**25):
        mallopt(_M_TRIM_THRESHOLD, _LARGEST)


@contextmanager
def gc_frozen() -> Iterator[None]:
    """Exclude all objects created so far from garbage collection, so that full collections stay
    short.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def free_memory() -> tuple[int, int]:
    """Free and total memory in bytes, of this machine or of this process's container."""
    system = psutil.virtual_memory()
    with suppress(OSError, ValueError, KeyError):  # no container, or no limit
        limit = int((CONTAINER / "memory.max").read_text())
        used = int((CONTAINER / "memory.current").read_text())
        kept = dict(line.split() for line in (CONTAINER / "memory.stat").read_text().splitlines())
        free = limit - used + int(kept["inactive_file"])
        return min(system.available, free), min(system.total, limit)
    return system.available, system.total


def usable_cores() -> int:
    """The number of processor cores that this process, or its container, may use."""
    cores = psutil.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # as for the memory
        quota, period = map(int, (CONTAINER / "cpu.max").read_text().split())
        return min(cores, max(1, quota // period))
    return cores


def usable_physical_cores() -> int:
    """The number of physical cores among them, if every core has the same number of hardware
    threads.
    """
    threads = psutil.cpu_count() or 1
    return max(1, usable_cores() * (psutil.cpu_count(logical=False) or threads) // threads)


def free_shm() -> float:
    """Free bytes of /dev/shm; 0 if it cannot be used, infinity if shared memory has no limit."""
    if sys.platform != "linux":
        return math.inf
    if not os.access(SHM, os.W_OK | os.X_OK):
        return 0
    system = os.statvfs(SHM)
    return system.f_bavail * system.f_frsize if system.f_blocks else math.inf


def bytes_text(count: int) -> str:
    """A number of bytes, for a message."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
