"""Random changes to training images: shifts, flips and crops.

The random numbers of an image depend only on (seed, epoch, sample index). So an image is changed in the same way on
every worker and rank, and in a resumed run.

To add an augmentation, draw its random numbers with `uniform`. Change single photographs in `EncodedImages._image`
(data/datasets.py), and batches in `Batches` (data/batches.py). Mixup also needs soft labels, and partners that follow
from the order of the update: see docs/architecture.md.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from utils.data.order import fold_in

# SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = ((30, np.uint64(0xBF58476D1CE4E5B9)), (27, np.uint64(0x94D049BB133111EB)))


def uniform(seed: int, epoch: int, indices: np.ndarray, draws: int) -> np.ndarray:
    """Random numbers in [0, 1) for each sample: float32 [n, draws] from int64 `indices` [n]."""
    key = np.uint64(fold_in(seed, "augment", epoch) ^ 1 << 63)
    states = _scramble(indices.astype(np.uint64) ^ key)[:, None]
    counters = np.arange(1, draws + 1, dtype=np.uint64) * _GAMMA
    return (_scramble(states + counters) >> 40).astype(np.float32) / 2**24


def _scramble(x: np.ndarray) -> np.ndarray:
    for shift, multiplier in _MULTIPLIERS:
        x = (x ^ x >> shift) * multiplier
    return x ^ x >> 31


def row_starts(random: np.ndarray, height: int, width: int, padding: int, flip: bool) -> tuple[Tensor, Tensor]:
    """Arguments of `shift_and_flip`: (the samples to flip, int64 [m]; where each row of the result starts, [n * H]).

    `random` is [n, 3] in [0, 1): vertical shift, horizontal shift, flip. This runs on the CPU, so that the host knows
    the number of flipped images without waiting for a GPU.
    """
    n, padded_height, padded_width = len(random), height + 2 * padding, width + 2 * padding
    top, left = (random[:, :2] * (2 * padding + 1)).astype(np.int64).T
    flipped = np.flatnonzero(random[:, 2] < (0.5 if flip else 0))
    image, step = np.arange(n), np.full(n, padded_width)
    # Flipped images come after the others, with all pixels in reverse order, so rows are read from last to first.
    image[flipped], step[flipped] = n + np.arange(len(flipped)), -padded_width
    top[flipped], left[flipped] = padded_height - 1 - top[flipped], 2 * padding - left[flipped]
    first = (image * padded_height + top) * padded_width + left
    starts = first[:, None] + step[:, None] * np.arange(height)
    return torch.from_numpy(flipped), torch.from_numpy(starts.ravel())


def shift_and_flip(images: Tensor, flipped: Tensor, starts: Tensor, padding: int) -> Tensor:
    """Shift images by up to `padding` pixels, filled with black, and flip some; [n, H, W, C] of the same dtype.

    `flipped` and `starts` come from `row_starts`.
    """
    n, height, width, channels = images.shape
    sources = images.new_zeros(n + len(flipped), height + 2 * padding, width + 2 * padding, channels)
    inner = sources[:, padding : padding + height, padding : padding + width]
    inner[:n] = images
    inner[n:] = images.index_select(0, flipped).flip(1, 2)
    # Each row of the result is contiguous in `sources`, so one indexed copy of all rows gives the result.
    runs = sources.as_strided((max(0, sources.numel() // channels - width + 1), width * channels), (channels, 1))
    return runs.index_select(0, starts).view(n, height, width, channels)


def crop_box(height: int, width: int, random: Sequence[float], min_scale: float) -> tuple[int, int, int, int]:
    """A random crop, (top, left, height, width), with `min_scale` to 1 of an image's area and an aspect of 3:4 to 4:3.

    This is the crop of Inception training (Szegedy et al., 2014). Unlike torchvision's RandomResizedCrop, it draws only
    once, and shrinks a box that does not fit. `random`: area, aspect, top, left, each in [0, 1).
    """
    scale, shape, top, left = random
    area = height * width * (min_scale + (1 - min_scale) * scale)
    aspect = math.exp(math.log(3 / 4) + math.log(16 / 9) * shape)
    crop_height = max(1, min(height, round(math.sqrt(area / aspect))))
    crop_width = max(1, min(width, round(math.sqrt(area * aspect))))
    return int(top * (height - crop_height + 1)), int(left * (width - crop_width + 1)), crop_height, crop_width
