"""What a rank asks of its own process, so that the loop is not held up: memory that stays, garbage that waits."""

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_LARGEST = 2**30


def keep_freed_memory() -> None:
    """Let glibc's malloc keep what is freed, for the next update to use again; elsewhere this does nothing.

    By default large buffers go back to the system at once, and each update faults the pages of its activations in anew.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # The second call alone would make it worse, and before 2.36 or so glibc takes no more than 32 MiB in the first.
    if mallopt is not None and (mallopt(_M_MMAP_THRESHOLD, _LARGEST) or mallopt(_M_MMAP_THRESHOLD, 2**25)):
        mallopt(_M_TRIM_THRESHOLD, _LARGEST)


@contextmanager
def frozen_garbage() -> Iterator[None]:
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


SHM = "/dev/shm"


SHM_FIX = "docker run --shm-size=8g or --ipc=host makes it larger"


MB = 1e6


def shm_space() -> tuple[int, int] | None:
    """Free bytes and size of /dev/shm; (0, 0) where it cannot be used, None where the system has no limit there."""
    if sys.platform != "linux":
        return None
    if not os.access(SHM, os.W_OK | os.X_OK):
        return 0, 0
    system = os.statvfs(SHM)
    return (system.f_bavail * system.f_frsize, system.f_blocks * system.f_frsize) if system.f_blocks else None


def describe_shm() -> str:
    """How large /dev/shm is, and how much of that is free."""
    found = shm_space()
    if found is None:
        return "no limit"
    free, size = found
    return f"{free / MB:.0f} of {size / MB:.0f} MB free" if size else "it does not exist or is not writable"
