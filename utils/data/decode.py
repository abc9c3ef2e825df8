"""From encoded bytes to uint8 pixels [H, W, C], and a whole small data set to one memory map of them."""

import io
import os
import uuid
from pathlib import Path

import numpy as np
import torch
import torchvision
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from utils.config import expand
from utils.data.splits import Split
from utils.errors import one_line

SMALL = 96  # pixels; data sets of images up to this side are decoded once and kept
EVAL_CROP = 0.875  # share of a photograph's shorter side that evaluation looks at, the field's custom since AlexNet
_CHUNK = 1024


def decode(split: Split, position: int, channels: int, raw=None) -> Tensor:
    """Sample `position` as uint8 [H, W, C]; ValueError names the image when it cannot be decoded."""
    try:
        raw = split.images[int(split.rows[position])] if raw is None else raw
        return _pixels(raw, channels)
    except (ValueError, OSError, RuntimeError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"{split.describe(position)}: not a readable image ({one_line(error)[:120]})") from error


def _pixels(raw, channels: int) -> Tensor:
    if isinstance(raw, bytes):
        mode = "GRAY" if channels == 1 else "RGB"
        try:
            data = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
            return torchvision.io.decode_image(data, mode, apply_exif_orientation=True).permute(1, 2, 0)
        except (RuntimeError, ValueError):  # CMYK, 16 bit, exotic formats: Pillow reads more
            raw = Image.open(io.BytesIO(raw))
    if isinstance(raw, Image.Image):
        raw = np.asarray(_eight_bit(ImageOps.exif_transpose(raw)).convert("L" if channels == 1 else "RGB"))
    pixels = torch.from_numpy(np.array(raw, dtype=np.uint8))
    if pixels.ndim == 3 and pixels.shape[0] in (1, 3):
        pixels = pixels.permute(1, 2, 0)
    pixels = pixels.unsqueeze(-1) if pixels.ndim == 2 else pixels
    if channels == 3:
        return pixels.expand(-1, -1, 3)
    return pixels if pixels.shape[2] == 1 else F.rgb_to_grayscale(pixels.permute(2, 0, 1)).permute(1, 2, 0)


def _eight_bit(image: Image.Image) -> Image.Image:
    """16-bit grey, which Pillow's own conversion would clip to white instead of scaling."""
    if not image.mode.startswith("I"):
        return image
    return Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).clip(0, 255).astype(np.uint8))


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


def decode_all(split: Split, height: int, width: int, channels: int, cache_dir: str, progress) -> np.ndarray:
    """All samples as uint8 [N, H, W, C]: the split's own array where it is one, else a memory map kept in the cache.

    The file is named by the data's fingerprint and appears whole or not at all. `progress` wraps an iterable (tqdm).
    """
    if isinstance(split.images, np.ndarray) and _shape(split.images) == (height, width, channels):
        images = split.images if len(split.rows) == len(split.images) else split.images[split.rows]
        return images[..., None] if images.ndim == 3 else images.transpose(0, 2, 3, 1)
    path = expand(cache_dir) / "decoded" / f"{split.cache_key}-{height}x{width}x{channels}.npy"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{uuid.uuid4().hex}.partial")
        try:
            _decode_into(partial, split, (height, width, channels), progress)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    return np.load(path, mmap_mode="r")


def _decode_into(path: Path, split: Split, shape: tuple[int, int, int], progress) -> None:
    height, width, channels = shape
    pixels = np.lib.format.open_memmap(path, "w+", np.uint8, (len(split), *shape))
    for start in progress(range(0, len(split), _CHUNK)):
        positions = range(start, min(start + _CHUNK, len(split)))
        for position, raw in zip(positions, split.read(positions), strict=True):
            pixels[position] = center(decode(split, position, channels, raw), height, width).numpy()
    pixels.flush()


def _shape(images: np.ndarray) -> tuple[int, int, int]:
    """(H, W, C) of an array [N, H, W] or [N, C, H, W]."""
    return (*images.shape[1:], 1) if images.ndim == 3 else (*images.shape[2:], images.shape[1])
