"""Check every encoded image before training, so that unreadable images are reported before the first update."""

import json
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch.utils.data import DataLoader, Dataset

from utils.data.decode import why_unreadable
from utils.data.splits import Files, Split, fingerprint_of
from utils.data.worker_process import worker_processes
from utils.errors import UserError, one_line
from utils.files import expand, write_file
from utils.memory import usable_cores
from utils.waiting import awaited

_VERSION = 1  # of the cached results; increase it when their meaning changes, so that old ones are not used
_CHUNK, _LEAST, _MOST = 256, 4000, 32  # images per chunk, fewest images per worker, most workers
_HEAD, _TAIL = 1024, 4096  # bytes that are read at each end
_SHOWN = 8  # images named in an error


def check_images(split: Split, full: bool, cache_dir: str, progress: Callable = iter) -> Split:
    """The split with the errors of its unreadable images (`bad`) and a checksum of both ends of each image (`ends`).

    An image passes if it begins and ends as its format requires. Any other image, or every image if `full`, is
    decoded. The result is cached until the size or a time of a file changes. Arrays, and images that a torchvision
    data set decodes itself, are not checked.
    """
    if not isinstance(split.images, Files) and not hasattr(split.images, "many"):
        return split
    stamps, bad = _stamps(split)
    present = replace(split, bad=bad)
    path = expand(cache_dir) / "checked" / f"{fingerprint_of(_VERSION, full, split.fingerprint, *stamps)}.json"
    rows = present.rows[present.readable]
    found = _cached_result(path, len(rows))
    if found is None:
        found = _check_all(present, full, progress)
        with suppress(OSError):  # without the cached result, the next check takes as long as this one
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, json.dumps(found))
    ends = np.zeros(len(split.images), np.int64)
    ends[rows] = found["ends"]
    return replace(split, ends=ends, bad=bad | {int(rows[int(n)]): reason for n, reason in found["bad"].items()})


def refuse_bad(split: Split) -> None:
    """Raise ValueError, with the number and the names of the unreadable images, if a split has any."""
    positions = np.flatnonzero(~split.readable)
    if not len(positions):
        return
    shown = [f"{split.describe(p)} ({split.bad[int(split.rows[p])]})" for p in positions[:_SHOWN].tolist()]
    more = f" and {len(positions) - _SHOWN} more" * (len(positions) > _SHOWN)
    count = f"{len(positions)} of {len(split)} images of split {split.name!r}"
    raise UserError(
        f"{count} cannot be read: {', '.join(shown)}{more}",
        "fix these files, or leave them out with --bad_images skip",
    )


def _stamps(split: Split) -> tuple[list, dict[int, str]]:
    """Return values to hash, which change when an image changes, and {row: error} for missing and special files.

    Special files must not be opened: reading a pipe would block forever.
    """
    if not isinstance(split.images, Files):
        return [split.cache_key], dict(split.bad)
    bad, rows = dict(split.bad), split.rows[split.readable].tolist()
    stamps = np.zeros((len(rows), 3), np.int64)
    for place, row in enumerate(rows):
        try:
            stamps[place] = split.images.stamp(row)
        except OSError as error:
            bad[row] = error.strerror or str(error)
    paths = "\0".join(split.images.paths[row] for row in rows)
    return [os.fsencode(paths), stamps.data, *sorted(bad)], bad


def _cached_result(path: Path, count: int) -> dict | None:
    """The result of an earlier check of the same files; None if it does not exist or its file is damaged."""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        found = json.loads(path.read_text())
        ends, bad = np.asarray(found["ends"], np.int64), found["bad"]
        if ends.shape == (count,) and all(0 <= int(n) < count and isinstance(why, str) for n, why in bad.items()):
            return found
    return None


def _check_all(split: Split, full: bool, progress: Callable) -> dict:
    """Check the readable images on all cores.

    Returns {"ends": a checksum of each readable image, "bad": {its index among them, as text: error}}.
    """
    positions = np.flatnonzero(split.readable)
    workers = min(len(usable_cores()), _MOST, len(positions) * (10 if full else 1) // _LEAST)
    chunks = _Chunks(split, positions, full)
    loader = DataLoader(chunks, batch_size=None, **worker_processes(workers if workers > 1 else 0))
    ends: list[int] = []
    bad: dict[str, str] = {}
    for sums, errors in awaited(progress(loader), "the result of an image check"):
        bad |= {str(len(ends) + number): reason for number, reason in errors.items()}
        ends += sums
    return {"ends": ends, "bad": bad}


class _Chunks(Dataset):
    """Chunks of images: (a checksum of each image, {index in the chunk: error}).

    These are lists and not tensors, because tensors would need space in /dev/shm.
    """

    def __init__(self, split: Split, positions: np.ndarray, full: bool):
        self.split, self.positions, self.full = split, positions, full

    def __len__(self) -> int:
        return -(-len(self.positions) // _CHUNK)

    def __getitem__(self, number: int) -> tuple[list[int], dict[int, str]]:
        positions = self.positions[number * _CHUNK : (number + 1) * _CHUNK]
        sums, bad = [0] * len(positions), {}
        for place, (position, ends) in enumerate(zip(positions, self._ends(positions), strict=True)):
            if isinstance(ends, str):
                bad[place] = ends
                continue
            size, head, tail = ends
            sums[place] = (size & 0x7FFFFFFF) << 32 | zlib.crc32(tail, zlib.crc32(head))
            if self.full or not _looks_whole(size, head, tail):
                reason = why_unreadable(self.split, int(position))
                if reason is not None:
                    bad[place] = reason
        return sums, bad

    def _ends(self, positions: np.ndarray) -> Iterator[tuple[int, bytes, bytes] | str]:
        """The size, the first bytes and the last bytes of each image, or the reason why it cannot be read."""
        if isinstance(self.split.images, Files):
            for row in self.split.rows[positions]:
                yield _ends_of_file(self.split.images.paths[row])
            return
        for position, raw in zip(positions, self.split.read_ahead(positions.tolist()), strict=True):
            try:
                if raw is None:  # some tables have only the path of a file
                    raw = self.split.images[int(self.split.rows[position])]
                yield "there is no image" if raw is None else (len(raw), raw[:_HEAD], raw[-_TAIL:])
            except (OSError, ValueError) as error:
                yield one_line(error)


def _ends_of_file(path: str) -> tuple[int, bytes, bytes] | str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            size = os.fstat(descriptor).st_size
            return size, os.pread(descriptor, _HEAD, 0), os.pread(descriptor, _TAIL, max(0, size - _TAIL))
        finally:
            os.close(descriptor)
    except OSError as error:
        return error.strerror or str(error)


def _looks_whole(size: int, head: bytes, tail: bytes) -> bool:
    """Whether an image begins and ends like a JPEG, PNG, GIF or WebP file; other formats must be decoded."""
    if head.startswith(b"\xff\xd8"):
        return b"\xff\xd9" in tail  # some cameras append a few bytes
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return tail.endswith(b"IEND\xaeB`\x82")
    if head.startswith((b"GIF87a", b"GIF89a")):
        return tail.endswith(b";")
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return int.from_bytes(head[4:8], "little") + 8 <= size
    return False
