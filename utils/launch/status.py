"""status.json in a run folder: whether the run is running, and how it has ended.

It is for programs that start runs: a launcher prints its own lines below those of a run, and has an
exit code of its own. The main process replaces the file at the start, with each record of the log
and at the end. If it cannot be written, the run continues. After `kill -9` it still says "running",
but the lock of the folder is free.
"""

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from utils.waiting import call_with_timeout

_ENDS = {75: "stopped", 130: "stopped"}  # others are errors; for 0, the caller gives the state
_status: dict = {}  # the fields, while this process trains a run and is its main process
_folder = Path()


def begin_status(folder: Path, command: str) -> None:
    """Begin the status of the run in this folder, which `command` continues."""
    global _folder
    # The folder itself, and not its path: it may be deleted, and the path belong to another run.
    _folder = Path(f"/proc/self/fd/{os.open(folder, os.O_RDONLY)}")
    _status.update(state="running", command=command, host=socket.gethostname(), process=os.getpid())


def update_status(**values: object) -> None:
    """Change these fields, if this process has begun a status."""
    if _status:
        _status.update(values)
        partial = _folder / ".status.json.partial"
        with suppress(OSError):
            partial.write_text(json.dumps(_status, indent=1) + "\n")
            partial.replace(_folder / "status.json")  # a flush would take as long as some updates


def end_status(code: int, line: str, state: str | None = None) -> None:
    """Record that this process ends the run with this exit code, and why.

    `state` is complete, stopped or failed (default: from the exit code).
    """
    values = {"state": state or _ENDS.get(code, "failed"), "exit_code": code, "line": line}
    with suppress(RuntimeError):  # a disk that does not answer must not keep the process alive
        call_with_timeout(lambda: update_status(time=time.time(), **values), 3.0)
    _status.clear()
