"""Check every encoded image before training, so that unreadable images are reported before the
first update.
"""

import io
import json
import os
import zlib
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
from torch.utils.data import DataLoader, Dataset

from utils.console import progress
from utils.data.decode import why_unreadable
from utils.data.decoders import DECODERS
from utils.data.order import BlockSampler, Microbatch
from utils.data.splits import Files, Split, fingerprint_of, stamp_of
from utils.data.workers import worker_processes
from utils.errors import one_line
from utils.files import expand, write_file
from utils.memory import usable_cores
from utils.waiting import wait_for_items

# of the cached results; increase it when their meaning changes, so that old ones are not used
_VERSION = 2
_CHUNK, _LEAST, _MOST = 256, 4000, 32  # images per chunk, fewest images per worker, most workers
_ENDS = {b"\xff\xd8": b"\xff\xd9", b"\x89PNG\r\n\x1a\n": b"IEND\xaeB`\x82"}
_HEAD, _TAIL = 1024, 4096  # bytes that are read at each end


def check_images(split: Split, full: bool, cache_dir: str) -> Split:
    """The split with the errors of its unreadable images (`errors`) and a checksum of both ends of
    each image (`checksums`).

    An image passes if it begins and ends as its format requires. Any other image, or every image if
    `full`, is decoded. The result is cached until a decoder, or the size or a time of a file changes. Arrays, and
    images that a torchvision data set decodes itself, are not checked.
    """
    if not isinstance(split.images, Files) and not hasattr(split.images, "many"):
        return split
    stamps, errors = _stamps(split)
    rows = np.setdiff1d(split.image_index, list(errors))
    name = fingerprint_of(_VERSION, full, *DECODERS.values(), split.fingerprint, *stamps)
    path = expand(cache_dir) / "checked" / f"{name}.json"
    found = _cached_result(path, len(rows))
    if found is None:
        found = _check_all(split, rows, full)
        # without the cached result, the next check takes as long as this one
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, json.dumps(found))
    checksums = np.zeros(len(split.images), np.int64)
    for row, (checksum, reason) in zip(rows.tolist(), found, strict=True):
        checksums[row] = checksum
        if reason:
            errors[row] = reason
    return replace(split, checksums=checksums, errors=errors)


def _stamps(split: Split) -> tuple[list, dict[int, str]]:
    """Return values to hash, which change when an image changes, and {row: error} for missing and
    special files.

    Special files must not be opened: reading a pipe would block forever.
    """
    if not isinstance(split.images, Files):
        return [split.cache_key], {}
    stamps = []
    errors = {}
    for row, file in enumerate(split.images.paths):
        try:
            stamps.append((file, *stamp_of(file)))
        except OSError as error:
            errors[row] = error.strerror or str(error)
    return [stamps], errors


def _cached_result(path: Path, count: int) -> list | None:
    """The result of an earlier check of the same files; None if it does not exist or its file is
    damaged.
    """
    with suppress(Exception):  # any exception type
        found = json.loads(path.read_text())
        if len([int(checksum) for checksum, _ in found]) == count:
            return found
    return None


def _check_all(split: Split, rows: np.ndarray, full: bool) -> list:
    """Check these images on all cores. Returns the checksum and the error, or "", of each."""
    workers = min(usable_cores(), _MOST, len(rows) * (10 if full else 1) // _LEAST)
    loader = DataLoader(
        _Checks(split, rows, full),
        batch_sampler=BlockSampler(len(rows), _CHUNK),
        collate_fn=list,
        **worker_processes(workers if workers > 1 else 0),
    )
    chunks = wait_for_items(progress("checking images")(loader), "the result of an image check")
    return [check for chunk in chunks for check in chunk]


@dataclass
class _Checks(Dataset):
    """The checksum and the error, or "", of the images in these rows.

    They are not tensors, because those would need space in /dev/shm.
    """

    split: Split
    rows: np.ndarray
    full: bool

    def __getitems__(self, block: Microbatch) -> list[tuple[int, str]]:
        rows = self.rows[block.indices].tolist()
        return [self._check(*pair) for pair in zip(rows, self.split.read_ahead(rows), strict=True)]

    def _check(self, row: int, raw: bytes | None) -> tuple[int, str]:
        try:
            with self._open(row, raw) as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - _TAIL))
                tail = file.read(_TAIL)
                file.seek(0)
                head = file.read(_HEAD)
                is_sound = not self.full and _looks_whole(file, size, head, tail)
        except (OSError, ValueError) as error:
            return 0, getattr(error, "strerror", None) or one_line(error)
        checksum = (size & 0x7FFFFFFF) << 32 | zlib.crc32(tail, zlib.crc32(head))
        return checksum, "" if is_sound else why_unreadable(self.split, row) or ""

    def _open(self, row: int, raw: bytes | None) -> BinaryIO:
        """An encoded image. Raises OSError or ValueError if there is none."""
        if isinstance(self.split.images, Files):
            return open(self.split.images.paths[row], "rb", buffering=0)
        if raw is None:  # some tables have only the path of a file
            raw = self.split.images[row]
        if raw is None:
            raise ValueError("there is no image")
        return io.BytesIO(raw)


def _looks_whole(file: BinaryIO, size: int, head: bytes, tail: bytes) -> bool:
    """Whether an image begins and ends like a JPEG, PNG, WebP, HEIC or AVIF file; other formats
    must be decoded.

    Some cameras append a few bytes.
    """
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return int.from_bytes(head[4:8], "little") + 8 <= size
    if head[4:8] == b"ftyp":
        return _has_whole_boxes(file, size)
    return any(head.startswith(start) and end in tail for start, end in _ENDS.items())


def _has_whole_boxes(file: BinaryIO, size: int) -> bool:
    """Whether a HEIC or AVIF file ends with one of its boxes, each of which begins with its size.

    Decoding a photograph of 12 megapixels would take half a second.
    """
    end = 0
    while end < size:
        file.seek(end)
        length = int.from_bytes(file.read(4), "big")
        if length == 1:  # the size follows the type, in 64 bits
            length = int.from_bytes(file.read(12)[4:], "big")
        if length < 8:  # up to the end of the file
            return False
        end += length
    return end == size
