"""Small files that appear whole or not at all, and a lock on a folder."""

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from utils.errors import one_line


def read_json(path: Path):
    """Parse a JSON file; ValueError names it when it is none."""
    try:
        return json.loads(path.read_text())
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, a number too long, nested too deep
        raise ValueError(f"{path}: not valid JSON ({one_line(error)})") from None


@contextmanager
def named(path: Path) -> Iterator[None]:
    """An OSError inside says `path`: the system names the file when it is opened, not when it is written to."""
    try:
        yield
    except OSError as error:
        if error.filename or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_file(path: Path, text: str) -> None:
    """Write a small file whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    with named(path), partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with named(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock(folder: Path, patience: float) -> TextIO:
    """Hold `folder` against other runs until the returned file is closed or this process ends, however it ends.

    Waits up to `patience` seconds for another holder to leave; then raises ValueError with its host and process.
    """
    file = (folder / ".lock").open("a+")
    deadline, told = time.monotonic() + patience, False
    while True:
        try:
            # A POSIX lock: unlike flock's it is not inherited by loader workers, which may outlive a killed rank.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                print(f"{folder}: this file system has no locks ({error.strerror}); see that no other run writes there")
                break
        file.seek(0)
        holder = file.read().strip() or "another process"
        if time.monotonic() > deadline:
            raise ValueError(f"{folder} is in use by {holder}; stop it, or choose another --run_name")
        if not told:
            print(f"{folder} is in use by {holder}; waiting up to {patience:.0f} s for it to leave")
            told = True
        time.sleep(0.1)
    with named(folder / ".lock"):
        file.truncate(0)
        file.write(holder_text())
        file.flush()
        os.fsync(file.fileno())  # the other machines look for it, see utils/runs.py
    return file


def holder_text() -> str:
    """Who holds a lock of this process."""
    return f"process {os.getpid()} on {socket.gethostname()}\n"


def is_taken_over(folder: Path, held: TextIO) -> bool:
    """Whether the folder of a lock that is held was deleted and another run has made it anew."""
    try:
        return (folder / ".lock").stat().st_ino != os.fstat(held.fileno()).st_ino
    except (FileNotFoundError, NotADirectoryError):
        return False
