"""Files and folders that are written completely or not at all, and a lock on a folder."""

import errno
import hashlib
import json
import os
import shutil
import socket
import time
import unicodedata
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO, TextIO

from utils.errors import InUse, UserError, one_line
from utils.output import refuse_windows

try:
    import fcntl
except ImportError:
    refuse_windows()

LOCK = ".lock"  # in a locked folder
# of a file system that lacks an operation
LACKS = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM)
_MAX_JSON = 2**23  # bytes; the names of a hundred thousand classes need four million


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file to read bytes.

    Raises UserError for a FIFO or a device, which could block all ranks.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise UserError(f"{path}: is not a regular file", "write its contents to a regular file")
    return path.open("rb")


def read_text(path: Path, max_bytes: int) -> str:
    """The text of a UTF-8 file of at most `max_bytes`, because a large one could fill the memory.

    Raises UserError for any other file.
    """
    with open_regular(path) as file, naming_file(path):
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise UserError(f"{path}: is larger than {max_bytes >> 10} KiB", "use a smaller file")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not valid UTF-8 ({one_line(error)})") from None


def read_json(path: Path, most: int = _MAX_JSON):
    """The value in a JSON file.

    Raises UserError, which names the file, if it is not valid JSON or is too large.
    """
    text = read_text(path, most)
    try:
        return json.loads(text)
    # not JSON, a number that is too long, or nested too deeply
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON ({one_line(error)})") from None


@contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """Add `path` to an OSError raised inside.

    The system names the file if opening fails, but not if writing fails.
    """
    try:
        yield
    except OSError as error:
        if error.filename or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which becomes `path`, flushed, at the end of the block.

    After an error it is deleted. Several processes may write the same file.
    """
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        with naming_file(path), partial.open("xb") as file:
            yield file
            file.flush()
            # before the file gets its name, so that a file of this name is whole
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_file(path: Path, contents: str | bytes) -> None:
    """Write a small file, text as UTF-8, completely or not at all. Follows a link.

    Raises OSError if `path` exists and is not a regular file.
    """
    path = path.resolve() if path.is_symlink() else path
    if path.exists() and not path.is_file():  # replacing /dev/null would break the machine
        raise OSError(errno.EEXIST, "exists and is not a regular file", str(path))
    with whole_file(path) as file:
        file.write(contents.encode() if isinstance(contents, str) else contents)
    sync(path.parent)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder that becomes `path`, with its files flushed, at the end of the block.

    After an error it is deleted. Raises OSError if `path` exists.
    """
    path = path.absolute()
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    partial.mkdir(parents=True)
    try:
        yield partial
        if path.exists():  # since the caller checked it
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        put_in_place(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def put_in_place(partial: Path, final: Path) -> None:
    """Flush a finished folder to the disk and rename it to `final`, which may exist.

    Files that only the owner may read, as safetensors writes them, get the rights of the folder. A
    kill between the two renames leaves the older folder as .NAME.old. Raises OSError if the file
    system cannot rename folders.
    """
    rights = partial.stat().st_mode & 0o666
    for path in [*partial.rglob("*"), partial]:
        if path.stat().st_mode & 0o777 == 0o600:
            path.chmod(rights)
        sync(path)
    old = final.with_name(f".{final.name}.old")
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    try:
        partial.rename(final)
        sync(final.parent)
    except OSError as error:
        if error.errno not in LACKS:
            raise
        problem = f"this file system cannot rename folders ({error.strerror})"
        fix = "choose another file system"
        raise OSError(error.errno, f"{problem}; {fix}", str(partial)) from error
    finally:
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
        elif old.exists():
            old.rename(final)


def in_form_of_files(path: str) -> str:
    """The absolute path in the Unicode forms, NFC or NFD, of the folders and files that exist."""
    found = "/"
    for part in os.path.abspath(path).split("/"):
        # each part, because the folders and the file may have come from different systems
        forms = [part, *(unicodedata.normalize(form, part) for form in ("NFC", "NFD"))]
        paths = [os.path.join(found, form) for form in dict.fromkeys(forms)]
        found = next(filter(os.path.exists, paths), paths[0])
    return found


def link_or_copy(path: Path, target: Path) -> None:
    """Give a file that is never changed another name, or copy it where there are no hard links."""
    try:
        os.link(path.resolve(), target)  # not a link of the Hub's cache
    except OSError:
        with path.open("rb") as source, whole_file(target) as file:
            shutil.copyfileobj(source, file)


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def size_of(folder: Path) -> int:
    """The bytes of all files below a folder, where others may create and delete some meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def sync(path: Path) -> None:
    """Flush a file, or the list of names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming_file(path):
            os.fsync(descriptor)
    except OSError as error:
        if error.errno not in LACKS or not path.is_dir():
            raise
        _warn_about_flushing(error.strerror)
    finally:
        os.close(descriptor)


@cache  # prints once
def _warn_about_flushing(reason: str) -> None:
    what = "cannot flush folders: if the machine fails, the newest files may be lost"
    print(f"this file system {what} ({reason})")


def try_lock(file: TextIO) -> bool:
    """Lock a file until it is closed, unless another process has locked it; returns whether it did.

    Raises OSError on a file system without locks.
    """
    try:
        # Unlike an flock lock, a POSIX lock is not inherited by loader workers, which may outlive a
        # killed rank.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise
    return True


def lock(folder: Path, patience: float) -> TextIO:
    """Lock `folder` until the returned file is closed or this process exits, even if it is killed.

    Waits up to `patience` seconds if another process holds it, then raises UserError with its host
    and process ID.
    """
    file = (folder / LOCK).open("a+")
    deadline = time.monotonic() + patience
    printed = False
    while True:
        try:
            if try_lock(file):
                break
        except OSError as error:
            what = f"this file system has no locks ({error.strerror})"
            print(f"{folder}: {what}; do not let another run write there")
            break
        file.seek(0)
        holder = file.read().strip() or "another process"
        in_use = f"{folder} is in use by {holder}"
        if time.monotonic() > deadline:
            raise InUse(in_use, "stop it, or choose another --run_name")
        if not printed:
            print(f"{in_use}; waiting up to {patience:.0f} s for it to exit")
            printed = True
        time.sleep(0.1)
    with naming_file(folder / LOCK):
        file.truncate(0)
        file.write(holder_text())
        file.flush()
        # ranks on other machines read it to check that they share the folder
        os.fsync(file.fileno())
    return file


def holder_text() -> str:
    """The contents of a lock file that this process holds."""
    return f"process {os.getpid()} on {socket.gethostname()}\n"


def expand(path: str) -> Path:
    """The path with ~ and environment variables expanded."""
    return Path(os.path.expandvars(path)).expanduser()


def check_output_folder(flag: str, folder: Path) -> Path:
    """The innermost part of `folder` that exists. Raises UserError, which names the flag, if the
    folder cannot be created or written.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        problem = f"{flag} {folder}: {existing} is not a writable folder"
        raise UserError(problem, f"set {flag} to one")
    return existing
