"""/dev/shm, through which loader processes hand over their batches, and which is small in containers."""

import os
import sys
from collections.abc import Iterable

from torch import Tensor
from torch.utils.data import get_worker_info

PLACE = "/dev/shm"
FIX = "docker run --shm-size=8g or --ipc=host makes it larger"
MB = 1e6


class NoRoom(ValueError):
    """A loader process could not put a batch into /dev/shm."""


def room() -> tuple[int, int] | None:
    """Free bytes and size of /dev/shm; (0, 0) where it cannot be used, None where the system has no limit there."""
    if sys.platform != "linux":
        return None
    if not os.access(PLACE, os.W_OK | os.X_OK):
        return 0, 0
    system = os.statvfs(PLACE)
    return (system.f_bavail * system.f_frsize, system.f_blocks * system.f_frsize) if system.f_blocks else None


def describe() -> str:
    """How large /dev/shm is, and how much of that is free."""
    found = room()
    if found is None:
        return "no limit"
    free, size = found
    return f"{free / MB:.0f} of {size / MB:.0f} MB free" if size else "it does not exist or is not writable"


def share(tensors: Iterable[Tensor]) -> None:
    """Move tensors to shared memory if this is a loader process; NoRoom if that fails.

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
            raise NoRoom(
                f"{PLACE}: a loader process could not hand over a batch of {size:.1f} MB ({describe()}; {reason}); "
                f"{FIX}, or use --num_workers 0"
            ) from error
