"""Images in tar and zip archives, each read as a range of bytes."""

import errno
import io
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, BinaryIO

import numpy as np

from utils.data.splits import Files, stamp_of

_MOST_OPEN = 64  # archives in a process
COLUMNS = {
    "archive": np.int32,
    "offset": np.int64,
    "stored": np.int64,
    "size": np.int64,
    "deflated": np.bool_,
}


@dataclass(eq=False, kw_only=True)
class Members(Files):
    """Images in archives: row n is `stored[n]` bytes from `offset[n]` on of
    `archives[archive[n]]`, and `size[n]` bytes after it is inflated if it is `deflated[n]`.

    A row whose archive is -1 is a file. `listed` has the size and the times of each archive when it
    was listed; reading raises OSError if the size or the modification time is another one.
    """

    archives: list[str]
    listed: list[tuple[int, int, int]]
    archive: np.ndarray  # int32 [N]
    offset: np.ndarray  # int64 [N]
    stored: np.ndarray
    size: np.ndarray
    deflated: np.ndarray  # bool [N]
    form: str = ""  # of the archives, for the start table

    def select(self, rows: np.ndarray) -> "Members":
        names = [self.names[row] for row in rows.tolist()]
        return replace(self, names=names, **{key: getattr(self, key)[rows] for key in COLUMNS})

    def stamp(self, row: int) -> tuple[int, int, int]:
        """Its size, and the times of its archive."""
        number = self.archive[row]
        if number < 0:
            return super().stamp(row)
        return int(self.size[row]), *stamp_of(self.archives[number])[1:]

    def open(self, row: int) -> BinaryIO:
        if self.archive[row] < 0:
            return super().open(row)
        if self.deflated[row]:
            return io.BytesIO(self[row])
        return io.BufferedReader(_Range(partial(self._read, row), int(self.size[row])))

    def __getitem__(self, row: int) -> bytes:
        if self.archive[row] < 0:
            return super().__getitem__(row)
        data = self._read(row, 0, int(self.stored[row]))
        if self.deflated[row]:
            size = int(self.size[row])
            inflate = zlib.decompressobj(-15)
            data = inflate.decompress(data, size + 1)
            if len(data) != size or not inflate.eof:
                raise ValueError("its compressed data are damaged")
        return data

    def _read(self, row: int, start: int, count: int) -> bytes:
        number = self.archive[row]
        path = self.archives[number]
        file = _opened(path, *self.listed[number][:2])
        data = os.pread(file.fileno(), count, int(self.offset[row]) + start)
        if len(data) < count:
            raise _changed(path)
        return data


def joined(parts: Sequence[Files]) -> Members:
    """The images of all parts, by their paths."""
    archives: list[str] = []
    listed: list = []
    columns = []
    for part in parts:
        archive, *others = (getattr(part, key, np.full(len(part), -1)) for key in COLUMNS)
        columns.append([np.where(archive < 0, archive, archive + len(archives)), *others])
        archives += getattr(part, "archives", [])
        listed += getattr(part, "listed", [])
    joint: Any = zip(COLUMNS, map(np.concatenate, zip(*columns, strict=True)), strict=True)
    names = [path for part in parts for path in part.paths]
    return Members(names=names, archives=archives, listed=listed, **dict(joint))


class _Range(io.RawIOBase):
    """A range of an archive as a file."""

    def __init__(self, read: Callable[[int, int], bytes], size: int):
        self._read = read
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = self._read(self._at, max(0, min(len(buffer), self._size - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


class _Archive(io.FileIO):
    """An open archive. It is closed when it is no longer used."""

    def __del__(self):
        self.close()


# Descriptors are shared by forked processes: `pread` has no position.
@lru_cache(_MOST_OPEN)
def _opened(path: str, size: int, modified: int) -> _Archive:
    file = _Archive(path)
    if stamp_of(file.fileno())[:2] != (size, modified):
        raise _changed(path)
    return file


def _changed(path: str) -> OSError:
    return OSError(errno.ESTALE, f"{path} changed since it was listed")
