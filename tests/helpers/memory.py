"""The memory of this process."""

from collections.abc import Callable
from pathlib import Path


def peak_of(action: Callable[[], object]) -> int:
    """How many bytes of memory this process holds during the action, at most, beyond those before
    it.
    """
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now the current size
    before = memory("VmHWM")
    action()
    return memory("VmHWM") - before


def memory(name: str) -> int:
    """A number of bytes of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
