"""Small files that appear whole or not at all, and a lock on a folder."""

import errno
import fcntl
import json
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from utils.errors import one_line

_MAX_JSON = 2**23  # bytes; the names of a hundred thousand classes need four million


def read_text(path: Path, max_bytes: int) -> str:
    """The text of a small UTF-8 file; ValueError if it is not one.

    A FIFO or a device could block all ranks forever, and a large file could fill the memory.
    """
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path}: is not a regular file; write its contents to a file and give that")
    with path.open("rb") as file, named(path):
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"{path}: is larger than {max_bytes >> 10} KiB, the limit for such a file; give another one")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not valid UTF-8 ({one_line(error)})") from None


def read_json(path: Path):
    """Parse a JSON file; ValueError names it if it is not JSON or too large."""
    text = read_text(path, _MAX_JSON)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # no JSON, a number too long, nested too deep
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
    """Write a small file whole or not at all, as UTF-8; OSError if `path` exists and is not a regular file."""
    if path.exists() and not path.is_file():  # to replace /dev/null would break the machine
        raise OSError(errno.EEXIST, "exists and is not a regular file", str(path))
    partial = path.with_name(f".{path.name}.partial")
    with named(path), partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync(path.parent)


def write_output(path: Path, text: str) -> None:
    """Like `write_file`, for a path that the user gave: a link is followed."""
    write_file(path.resolve() if path.is_symlink() else path, text)


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


def expand(path: str) -> Path:
    """The path with ~ and variables resolved."""
    return Path(os.path.expandvars(path)).expanduser()
