"""A file of decoded images: a uint8 array [N, H, W, C] in numpy's format, followed by a checksum of the pixels."""

import fcntl
import hashlib
import math
import os
import re
import uuid
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

from utils.errors import one_line
from utils.files import naming_file
from utils.memory import usable_cores

_BLOCK = 2**24  # bytes that one thread hashes at once


def open_pixels(path: Path) -> np.memmap:
    """Map the file into memory; `damage` checks it."""
    return np.lib.format.open_memmap(path, mode="r")


def damage(path: Path, shape: tuple[int, ...], thorough: bool) -> str:
    """Describe the damage of a file of images of this shape; "" if there is none. `thorough` also checks the pixels.

    Raises OSError if the file cannot be read.
    """
    try:
        mapped = open_pixels(path)
    except Exception as error:  # numpy raises errors of any class for a damaged header
        if isinstance(error, OSError):
            raise
        return f"not an array: {one_line(error)[:100]}"
    if mapped.shape != shape or mapped.dtype != np.uint8 or not mapped.flags.c_contiguous:
        return f"{mapped.dtype} {list(mapped.shape)} instead of uint8 {list(shape)}"
    start = mapped.offset
    with naming_file(path), path.open("rb", buffering=0) as file:
        footer = os.pread(file.fileno(), 1000, start + mapped.nbytes)
        if not re.fullmatch(rb"\ncontent [0-9a-f]{64}\n", footer):
            return "truncated, or written by an older version without a checksum"
        if thorough and footer != _footer(file, start, shape):  # not mapped: a bad disk would raise SIGBUS
            return "its pixels have changed since they were written"
    return ""


def write_pixels(path: Path, shape: tuple[int, ...], chunks: Iterable[np.ndarray]) -> None:
    """Write chunks of images to the file, in order, completely or not at all. An OSError names the file."""
    with _whole_or_not_at_all(path) as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
        file.flush()  # a file that is not empty has a lock, see `remove_leftovers`
        start = file.tell()
        for pixels in chunks:
            file.write(pixels.data)  # not to a memory map, because a full disk would raise SIGBUS
        file.flush()
        file.write(_footer(file, start, shape))


def remove_leftovers(folder: Path) -> None:
    """Delete the partial files of killed processes, which are no longer locked.

    A live process, on any machine, locks its file before it writes the first byte.
    """
    for partial in folder.glob("*.partial"):
        with suppress(OSError), partial.open("r+b") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_size:
                partial.unlink()


def _footer(file: BinaryIO, start: int, shape: Sequence[int]) -> bytes:
    """What follows the pixels: SHA-256 of the SHA-256s of blocks of images, computed on all cores."""
    image = math.prod(shape[1:])
    rows = max(1, _BLOCK // max(1, image))

    def digest(row: int) -> bytes:
        block = os.pread(file.fileno(), min(rows, shape[0] - row) * image, start + row * image)
        return hashlib.sha256(block).digest()

    with ThreadPoolExecutor(len(usable_cores())) as pool:
        blocks = b"".join(pool.map(digest, range(0, shape[0], rows)))
    return b"\ncontent %s\n" % hashlib.sha256(repr(tuple(shape)).encode() + blocks).hexdigest().encode()


@contextmanager
def _whole_or_not_at_all(path: Path) -> Iterator[BinaryIO]:
    """A file that becomes `path` at the end of the block, and is deleted if the block raises an error."""
    partial = path.with_suffix(f".{uuid.uuid4().hex}.partial")
    try:
        with naming_file(path), partial.open("x+b") as file:
            with suppress(OSError):  # some network file systems have no locks
                fcntl.lockf(file, fcntl.LOCK_EX)  # until the file is closed
            yield file
            file.flush()
            os.fsync(file.fileno())
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
