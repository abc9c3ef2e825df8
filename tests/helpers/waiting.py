"""Wait for what other processes do, and read what they are still writing.

A wait ends when its condition is true, however long that takes on a busy machine. Its limit only
ends a test that cannot succeed any more, so it is far longer than any test waits.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

PATIENCE = 300.0  # seconds
SOON = 60.0  # seconds in which processes end after a fault, far less than the 600 of --timeout


def until(condition: Callable[[], Any], seconds: float = PATIENCE, every: float = 0.01) -> Any:
    """Wait until `condition()` is true and return its value; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"the condition is not true after {seconds:.0f} s"
        time.sleep(every)
    return value


def records_so_far(log: Path) -> list[dict]:
    """The records of a log that may be growing: an incomplete last line is left out."""
    try:
        whole, _, _ = log.read_bytes().rpartition(b"\n")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in whole.splitlines()]


def has_logged(step: int, name: str = "run") -> Callable[[], bool]:
    """A condition: runs/NAME has logged this update or a later one."""
    log = Path("runs") / name / "log.jsonl"
    return lambda: any(record["step"] >= step for record in records_so_far(log))


def newest(name: str = "run") -> int:
    """The update of the newest checkpoint of runs/NAME."""
    return max(int(path.name[5:]) for path in Path(f"runs/{name}/checkpoints").glob("step-*"))


def has_ended(child: int) -> bool:
    """Whether a child process has ended; it is not reaped, so that its number is not reused."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def lives(pid: int) -> bool:
    """Whether a process is running. It need not be a child of this one."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def error_lines(written: str, prog: str = "train.py") -> list[str]:
    """Our own error lines in the output of a process, in which libraries may have others."""
    return [line for line in written.splitlines() if line.startswith(f"{prog}: error: ")]
