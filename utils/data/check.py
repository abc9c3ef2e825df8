"""Check every encoded image before training, so that unreadable images are reported before the
first update.
"""

import io
import json
import os
import zlib
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import numpy as np
from torch.utils.data import DataLoader, Dataset

from utils.console import join_names, progress
from utils.data.decode import Looks, examine, header, reason_of
from utils.data.decoders import DECODERS, is_heic
from utils.data.order import Microbatch
from utils.data.samplers import BlockSampler
from utils.data.splits import Files, Split, fingerprint_of
from utils.data.workers import worker_processes
from utils.files import expand, write_file
from utils.memory import usable_cores
from utils.waiting import wait_for_items

# of the cached results; increase it when their meaning changes, so that old ones are not used
_VERSION = 3
_CHUNK, _LEAST, _MOST = 256, 1000, 32  # images per chunk, fewest images per worker, most workers
_ENDS = {b"\xff\xd8": b"\xff\xd9", b"\x89PNG\r\n\x1a\n": b"IEND\xaeB`\x82", b"RIFF": b""}
_HEAD, _TAIL = 1024, 4096  # bytes that are read at each end
_SURE = 30  # surplus of images in colour after which RGB files are taken to be in colour
_LINES = (  # about images that are transparent, of one colour, or have several frames, as in Looks
    "are transparent: composed on white",
    "are blank when composed on white; compose them on another colour",
    "have several frames or pages: the first is read",
)


def check_images(split: Split, full: bool, cache_dir: str) -> Split:
    """The split with the errors of its unreadable images (`errors`), a checksum of both ends of
    each image (`checksums`), the stamps of files (`stamps`), what each image is like (`looks`), and
    lines about these (`notes`).

    An image passes if it begins and ends as its format requires, and its header says what it is
    like. Any other image, or every image if `full`, is decoded. The result is cached until a
    decoder, or the size or a time of a file changes.
    """
    looks = np.zeros((len(split.images), 8), np.int64)
    if isinstance(split.images, np.ndarray):
        looks[:, :2] = split.images.shape[-2:]
        if split.images.ndim > 3:
            looks[:, 3] = [(planes != planes[:1]).any() for planes in split.images]
        return replace(split, looks=looks)
    split, errors = _with_stamps(split)
    rows = np.setdiff1d(split.image_index, list(errors))
    key = split.fingerprint, split.bits, split.cache_key
    name = fingerprint_of(_VERSION, full, *DECODERS.values(), *key)
    path = expand(cache_dir) / "checked" / f"{name}.json"
    try:
        table, reasons = json.loads(path.read_text())
        looks = np.reshape(table, looks.shape)
        errors |= dict(reasons)
    except Exception:  # of any class, if there is no earlier result, or a damaged one
        for row, (own, reason) in zip(rows.tolist(), check_rows(split, rows, full), strict=True):
            looks[row] = own
            if reason:
                errors[row] = reason
        # without the cached result, the next check takes as long as this one
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, json.dumps([looks.tolist(), [*errors.items()]]))
    split = replace(split, checksums=looks[:, 7], looks=looks, errors=errors)
    return replace(split, notes=(*split.notes, *_notes(split)))


def _notes(split: Split) -> list[str]:
    """Lines about images that may not be what the user expects."""
    lines = []
    for what, marks in zip(_LINES, split.looks[split.image_index, 4:7].T, strict=True):
        if names := [*map(split.describe, np.flatnonzero(marks).tolist())]:
            lines.append(f"{len(names):,} of {len(split):,} images {what}: {join_names(names, 3)}")
    return lines


def _with_stamps(split: Split) -> tuple[Split, dict[int, str]]:
    """The split with the stamps of its files, and {row: error} for missing and special files.

    Special files must not be opened: reading a pipe would block forever.
    """
    images = split.images
    errors: dict[int, str] = {}
    if not isinstance(images, Files):
        return split, errors
    stamps = np.full((len(images), 3), -1)
    for row in range(len(images)):
        try:
            stamps[row] = images.stamp(row)
        except OSError as error:
            errors[row] = error.strerror or str(error)
    return replace(split, stamps=stamps), errors


def check_rows(split: Split, rows: np.ndarray, full: bool = False) -> list:
    """Check these images on all cores. Returns the looks with the checksum, and the error or "", of
    each.
    """
    each = 4 if full else 1  # how many times longer an image takes
    workers = min(usable_cores(), _MOST, each * len(rows) // _LEAST)
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
    """The looks with the checksum, and the error or "", of each image in these rows.

    They are not tensors, because those would need space in /dev/shm.
    """

    split: Split
    rows: np.ndarray
    full: bool
    surplus: int = 0  # how many more images in colour than grey ones this process has decoded

    def __getitems__(self, block: Microbatch) -> list[tuple[Looks, str]]:
        rows = self.rows[block.indices].tolist()
        return [self._check(*pair) for pair in zip(rows, self.split.read_ahead(rows), strict=True)]

    def _check(self, row: int, raw: Any) -> tuple[Looks, str]:
        looks = None
        try:
            with self._open(row, raw) as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - _TAIL))
                tail = file.read(_TAIL)
                file.seek(0)
                head = file.read(_HEAD)
                checksum = (size & 0x7FFFFFFF) << 32 | zlib.crc32(tail, zlib.crc32(head))
                # the orientation of a PNG image may follow its pixels
                to_decode = self.full or b"eXIf" in tail
                if not to_decode and _looks_whole(head, tail):
                    file.seek(0)
                    looks = header(file, self.surplus > _SURE)
            if looks is None:
                looks = examine(self.split.images[row], self.split.bits)
                self.surplus += 1 if looks[3] else -1
        except Exception as error:  # decoders raise any type of error for damaged bytes
            return (0,) * 8, getattr(error, "strerror", None) or reason_of(error)
        return (*looks, checksum), ""

    def _open(self, row: int, raw: Any) -> BinaryIO:
        """An encoded image, or the bytes of an array. Raises OSError or ValueError if it cannot."""
        if isinstance(self.split.images, Files):
            return self.split.images.open(row)
        if raw is None:  # some tables have only the path of a file
            raw = self.split.images[row]
        return io.BytesIO(raw if isinstance(raw, bytes) else np.asarray(raw).tobytes())


def _looks_whole(head: bytes, tail: bytes) -> bool:
    """Whether an image begins and ends like a JPEG or PNG file, or begins like a WebP or HEIC file,
    which cannot be opened without its end; other formats must be decoded.

    Some cameras append a few bytes.
    """
    if is_heic(head):
        return True
    return any(head.startswith(start) and end in tail for start, end in _ENDS.items())
