"""From encoded bytes to uint8 pixels [H, W, C], and a whole small data set to one memory map of them."""

import io
import os
import re
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torchvision
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from utils.config import expand
from utils.data.splits import Split, whole_split
from utils.errors import one_line

SMALL = 96  # pixels; data sets of images up to this side are decoded once and kept
EVAL_CROP = 0.875  # share of a photograph's shorter side that evaluation looks at, the field's custom since AlexNet
VERSION = 1  # of the pixels that this module makes; raised when they change, so that no cache keeps older ones
_CHUNK = 256  # images read at once


def decode(split: Split, position: int, channels: int, raw=None) -> Tensor:
    """Sample `position` as uint8 [H, W, C], from `raw` if it has been read; ValueError names it if it is unreadable.

    The orientation that EXIF data tell is applied. Transparency is dropped: the colours beneath it count.
    """
    try:
        return _pixels(split.images[int(split.rows[position])] if raw is None else raw, channels)
    except Exception as error:  # broken bytes make decoders raise anything
        raise ValueError(f"{split.describe(position)}: not a readable image ({_reason(error)})") from error


def _reason(error: Exception) -> str:
    return re.sub(r" <_io\.BytesIO[^>]*>", "", one_line(error))[:120]  # Pillow names the buffer, which tells nothing


def _pixels(raw, channels: int) -> Tensor:
    if isinstance(raw, bytes):
        raw = _jpeg(raw, channels) if raw.startswith(b"\xff\xd8") else Image.open(io.BytesIO(raw))
    if isinstance(raw, Tensor):
        return raw
    if isinstance(raw, Image.Image):
        raw = np.array(_eight_bit(ImageOps.exif_transpose(raw), raw.format).convert("L" if channels == 1 else "RGB"))
        return torch.from_numpy(raw.reshape(*raw.shape[:2], channels))
    if not isinstance(raw, np.ndarray):
        raise ValueError("there is no image")
    planes = torch.from_numpy(np.array(raw, dtype=np.uint8))
    planes = planes.unsqueeze(0) if planes.ndim == 2 else planes
    if channels == 1 and len(planes) == 3:
        planes = F.rgb_to_grayscale(planes)
    return planes.expand(channels, -1, -1).permute(1, 2, 0)


def _jpeg(raw: bytes, channels: int) -> Tensor | Image.Image:
    """By libjpeg-turbo, half the time of Pillow's way. For other formats its sister functions crash on broken files."""
    data = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    try:
        mode = "GRAY" if channels == 1 else "RGB"
        return torchvision.io.decode_jpeg(data, mode, apply_exif_orientation=True).permute(1, 2, 0)
    except RuntimeError:  # Pillow reads more, or says what is wrong
        return Image.open(io.BytesIO(raw))


def _eight_bit(image: Image.Image, file_format: str | None) -> Image.Image:
    """16-bit grey, which Pillow's own conversion would clip to white instead of scaling."""
    if image.mode.startswith("I;16") or (image.mode == "I" and file_format in ("PNG", "PPM")):
        return Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).clip(0, 255).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"32-bit pixels (mode {image.mode}) have no fixed range; save it with 8 or 16 bits")
    return image


def peek(split: Split, count: int = 64) -> tuple[int, tuple[int, int] | None]:
    """Look at some images: (1 if all are grey else 3, their common (height, width) or None)."""
    sizes, grey = set(), True
    for position in np.unique(np.linspace(0, len(split) - 1, count).astype(int)):
        pixels = decode(split, position, 3)
        sizes.add(tuple(pixels.shape[:2]))
        grey = grey and bool((pixels[..., :1] == pixels).all())
    return (1 if grey else 3), (sizes.pop() if len(sizes) == 1 else None)


def center(pixels: Tensor, height: int, width: int, share: float = 1.0) -> Tensor:
    """Scale an image so that its central `share` covers height x width, and cut that out; uint8 [H, W, C]."""
    if tuple(pixels.shape[:2]) == (height, width) and share == 1.0:
        return pixels
    scale = max(height / pixels.shape[0], width / pixels.shape[1]) / share
    size = [max(height, round(pixels.shape[0] * scale)), max(width, round(pixels.shape[1] * scale))]
    planes = F.resize(pixels.permute(2, 0, 1), size, antialias=True)
    return F.center_crop(planes, [height, width]).permute(1, 2, 0)


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
