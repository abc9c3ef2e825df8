"""A whole small data set decoded once, into one memory map in the cache that all ranks of a machine share."""

import fcntl
import math
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from utils.config import expand
from utils.data.decode import SMALL, VERSION, center, decode, shrink_to_center
from utils.data.splits import Split, whole_split
from utils.errors import one_line
from utils.files import named
from utils.host import worker_processes

_CHUNK, _CHUNK_BYTES = 256, 2**19  # images decoded at once; some wait in /dev/shm, which may be as small as 64 MB
_LEAST, _MOST = 2000, 32  # images for which a worker process pays, and the most of these


class Shared:
    """Few images that many samples share, fetched by the samples' positions as from an array."""

    def __init__(self, images: np.ndarray, rows: np.ndarray):
        self.images, self.rows = images, rows

    def __getitem__(self, positions: np.ndarray) -> np.ndarray:
        return self.images[self.rows[positions]]


class _Chunks(Dataset):
    """Runs of consecutive samples: decoded, uint8 [n, H, W, C], or the error that one of them raised."""

    def __init__(self, split: Split, shape: tuple[int, int, int]):
        self.split, self.shape, self.size = split, shape, max(1, min(_CHUNK, _CHUNK_BYTES // math.prod(shape)))

    def __len__(self) -> int:
        return -(-len(self.split) // self.size)

    def __getitem__(self, number: int) -> Tensor | Exception:
        height, width, channels = self.shape
        positions = range(number * self.size, min((number + 1) * self.size, len(self.split)))
        pixels, shrink = np.empty((len(positions), *self.shape), np.uint8), shrink_to_center(height, width)
        try:
            encoded = self.split.read_ahead(positions)
            for row, position in enumerate(positions):
                if not self.split.readable[position]:
                    pixels[row] = 0  # never used
                    continue
                image = decode(self.split, position, channels, encoded[row], shrink)
                pixels[row] = center(image, height, width).numpy()
        except (ValueError, OSError) as error:  # as a value: a worker's exception would arrive wrapped in its traceback
            return error
        return torch.from_numpy(pixels)


def decode_all(
    split: Split, height: int, width: int, channels: int, cache_dir: str, progress: Callable
) -> np.ndarray | Shared:
    """All samples as uint8 [N, H, W, C]: the split's own array where it is one, else a memory map kept in the cache.

    The file is named by the data's fingerprint and appears whole or not at all. `progress` wraps an iterable (tqdm).
    Raises ValueError for an unreadable image, OSError where the cache has no room.
    """
    shape = (height, width, channels)
    if len(split) > len(split.images):  # samples share images
        whole = whole_split(split.name, split.images, np.zeros(len(split.images)), split.fingerprint)
        return Shared(decode_all(whole, *shape, cache_dir, progress), split.rows)
    if isinstance(split.images, np.ndarray) and _shape(split.images) == shape:
        is_whole = np.array_equal(split.rows, np.arange(len(split.images)))
        images = split.images if is_whole else split.images[split.rows]
        return images[..., None] if images.ndim == 3 else images.transpose(0, 2, 3, 1)
    path = expand(cache_dir) / "decoded" / f"v{VERSION}-{split.cache_key}-{height}x{width}x{channels}.npy"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(path.parent)
        _check_room(path.parent, len(split) * height * width * channels)
        _decode_into(path, split, shape, progress)
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path}: damaged ({one_line(error)}); delete it, and it will be made anew") from error


def _check_room(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if size > free:  # to be told now, not when the disk is full after long work
        raise OSError(
            f"{folder}: the decoded images take {size / 1e9:.1f} GB and only {free / 1e9:.1f} GB are free; choose "
            f"another --cache_dir, or an --image_size above {SMALL} to decode images when their turn comes"
        )


def _decode_into(path: Path, split: Split, shape: tuple[int, int, int], progress: Callable) -> None:
    """Decode on all processor cores, as the other ranks of this machine wait; write from this process, in order."""
    # Processes, as threads wait for each other's Python here; forked like any loader's workers, as starting new ones
    # takes longer than MNIST. They give tensors: arrays would come through a pipe, where an orphan would wait for ever.
    workers = min(len(os.sched_getaffinity(0)), _MOST, len(split) // _LEAST)
    chunks = DataLoader(
        _Chunks(split, shape),
        batch_size=None,
        **worker_processes(workers if workers > 1 else 0),
    )
    with _whole_or_not_at_all(path) as file:
        header = {"descr": "|u1", "fortran_order": False, "shape": (len(split), *shape)}
        np.lib.format.write_array_header_1_0(file, header)
        file.flush()  # a file of no bytes is one that is not locked yet, see `_remove_leftovers`
        for pixels in progress(chunks):
            if isinstance(pixels, Exception):
                raise pixels
            file.write(pixels.numpy())  # not through a memory map, where a full disk would be a bus error


@contextmanager
def _whole_or_not_at_all(path: Path) -> Iterator[BinaryIO]:
    """A file to write that becomes `path` at the end of the block, and goes when there is an error in it."""
    partial = path.with_suffix(f".{uuid.uuid4().hex}.partial")
    try:
        with named(path), partial.open("xb") as file:
            with suppress(OSError):  # some network file systems have no locks
                fcntl.lockf(file, fcntl.LOCK_EX)  # until it is closed, see below
            yield file
            file.flush()
            os.fsync(file.fileno())
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _remove_leftovers(folder: Path) -> None:
    """Delete what processes were writing when they were killed: with them went their locks.

    A live one, on whatever machine, holds its lock before it writes the first byte.
    """
    for partial in folder.glob("*.partial"):
        with suppress(OSError), partial.open("r+b") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_size:
                partial.unlink()


def _shape(images: np.ndarray) -> tuple[int, int, int]:
    """(H, W, C) of an array [N, H, W] or [N, C, H, W]."""
    return (*images.shape[1:], 1) if images.ndim == 3 else (*images.shape[2:], images.shape[1])
