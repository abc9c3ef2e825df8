"""A whole small data set decoded once, into one memory map in the cache that all ranks of a machine share."""

import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np

from utils.config import expand
from utils.data.decode import SMALL, VERSION, center, decode
from utils.data.splits import Split, whole_split

_CHUNK = 256  # images read at once


class Shared:
    """Few images that many samples share, fetched by the samples' positions as from an array."""

    def __init__(self, images: np.ndarray, rows: np.ndarray):
        self.images, self.rows = images, rows

    def __getitem__(self, positions: np.ndarray) -> np.ndarray:
        return self.images[self.rows[positions]]


def decode_all(
    split: Split, height: int, width: int, channels: int, cache_dir: str, progress: Callable
) -> np.ndarray | Shared:
    """All samples as uint8 [N, H, W, C]: the split's own array where it is one, else a memory map kept in the cache.

    The file is named by the data's fingerprint and appears whole or not at all. `progress` wraps an iterable (tqdm).
    Raises ValueError for an unreadable image, OSError where the cache has no room.
    """
    if len(split) > len(split.images):  # samples share images
        whole = whole_split(split.name, split.images, np.zeros(len(split.images)), split.fingerprint)
        return Shared(decode_all(whole, height, width, channels, cache_dir, progress), split.rows)
    if isinstance(split.images, np.ndarray) and _shape(split.images) == (height, width, channels):
        is_whole = np.array_equal(split.rows, np.arange(len(split.images)))
        images = split.images if is_whole else split.images[split.rows]
        return images[..., None] if images.ndim == 3 else images.transpose(0, 2, 3, 1)
    path = expand(cache_dir) / "decoded" / f"v{VERSION}-{split.cache_key}-{height}x{width}x{channels}.npy"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        _check_room(path.parent, len(split) * height * width * channels)
        partial = path.with_suffix(f".{uuid.uuid4().hex}.partial")
        try:
            _decode_into(partial, split, (height, width, channels), progress)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    return np.load(path, mmap_mode="r")


def _check_room(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if size > free:  # found out half-way, it would be a bus error: the file is written through a memory map
        raise OSError(
            f"{folder}: the decoded images take {size / 1e9:.1f} GB and only {free / 1e9:.1f} GB are free; choose "
            f"another --cache_dir, or an --image_size above {SMALL} to decode images when their turn comes"
        )


def _decode_into(path: Path, split: Split, shape: tuple[int, int, int], progress: Callable) -> None:
    height, width, channels = shape
    pixels = np.lib.format.open_memmap(path, "w+", np.uint8, (len(split), *shape))
    for start in progress(range(0, len(split), _CHUNK)):
        positions = range(start, min(start + _CHUNK, len(split)))
        for position, raw in zip(positions, split.read_ahead(positions), strict=True):
            pixels[position] = center(decode(split, position, channels, raw), height, width).numpy()
    pixels.flush()


def _shape(images: np.ndarray) -> tuple[int, int, int]:
    """(H, W, C) of an array [N, H, W] or [N, C, H, W]."""
    return (*images.shape[1:], 1) if images.ndim == 3 else (*images.shape[2:], images.shape[1])
