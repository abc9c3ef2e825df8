"""Images in tar and zip archives, each read as a range of bytes."""

import errno
import io
import os
import zlib
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import BinaryIO

import numpy as np
from PIL.ContainerIO import ContainerIO

from utils.data.splits import Files, stamp_of

_MOST_OPEN = 64  # archives in a process


@dataclass(eq=False, kw_only=True)
class Members(Files):
    """Images in archives: row n of `places` has the number of its archive, its offset there, its
    size as stored, its size after it is inflated, and whether it is deflated.

    `listed` has the size and the times of each archive when it was listed; reading raises OSError
    if the size or the modification time is another one.
    """

    archives: list[str]
    listed: list[tuple[int, int, int]]
    places: np.ndarray  # int64 [N, 5]
    form: str = ""  # of the archives, for the start table

    def select(self, rows: np.ndarray) -> "Members":
        return replace(self, names=super().select(rows).names, places=self.places[rows])

    def stamp(self, row: int) -> tuple[int, int, int]:
        """Its size, and the times of its archive when it was listed."""
        number, _, _, size, _ = self.places[row].tolist()
        return size, *self.listed[number][1:]

    def open(self, row: int) -> BinaryIO:
        number, offset, _, size, is_deflated = self.places[row].tolist()
        if is_deflated:
            return io.BytesIO(self[row])
        archive = io.FileIO(self.archives[number])
        self._check_unchanged(archive, number)
        return ContainerIO(io.BufferedReader(archive), offset, size)  # type: ignore[return-value]

    def __getitem__(self, row: int) -> bytes:
        number, offset, stored, size, is_deflated = self.places[row].tolist()
        file = _opened(self.archives[number], *self.listed[number][:2])
        data = os.pread(file.fileno(), stored, offset)
        self._check_unchanged(file, number, is_whole=len(data) == stored)
        if is_deflated:
            inflate = zlib.decompressobj(-15)
            data = inflate.decompress(data, size + 1)
            if len(data) != size or not inflate.eof:
                raise ValueError("its compressed data are damaged")
        return data

    def _check_unchanged(self, file: io.FileIO, number: int, is_whole: bool = True) -> None:
        if not is_whole or stamp_of(file.fileno())[:2] != self.listed[number][:2]:
            path = self.archives[number]
            raise OSError(errno.ESTALE, f"{path} changed since it was listed")


# Forked processes share the descriptors, which is safe: `pread` does not move a position. A file
# that leaves the cache is closed. One with another size or time is opened again.
@lru_cache(_MOST_OPEN)
def _opened(path: str, _size: int, _modified: int) -> io.FileIO:
    return io.FileIO(path)
