"""Random changes to training images, each drawn from (seed, epoch, sample index) alone.

So an image is changed in the same way whatever worker, rank or history computes it.
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
    """Random numbers in [0, 1) of each sample: float32 [n, draws] from int64 `indices` [n]."""
    key = np.uint64(fold_in(seed, "augment", epoch) ^ 1 << 63)
    states = _scramble(indices.astype(np.uint64) ^ key)[:, None]
    counters = np.arange(1, draws + 1, dtype=np.uint64) * _GAMMA
    return (_scramble(states + counters) >> 40).astype(np.float32) / 2**24


def _scramble(x: np.ndarray) -> np.ndarray:
    for shift, multiplier in _MULTIPLIERS:
        x = (x ^ x >> shift) * multiplier
    return x ^ x >> 31


def row_starts(random: np.ndarray, height: int, width: int, padding: int, flip: bool) -> tuple[Tensor, Tensor]:
    """What `shift_and_flip` shall do: (the samples to mirror, int64 [m]; where each row of the result starts, [n * H]).

    `random` [n, 3] in [0, 1): vertical shift, horizontal shift, mirroring. Computed where the numbers are drawn, on the
    processor, so that a GPU does not have to be asked how many are mirrored.
    """
    n, padded_height, padded_width = len(random), height + 2 * padding, width + 2 * padding
    top, left = (random[:, :2] * (2 * padding + 1)).astype(np.int64).T
    mirrored = np.flatnonzero(random[:, 2] < (0.5 if flip else 0))
    image, step = np.arange(n), np.full(n, padded_width)
    # A mirrored image stands behind the others, its pixels in reverse order: it is read from its last row to its first.
    image[mirrored], step[mirrored] = n + np.arange(len(mirrored)), -padded_width
    top[mirrored], left[mirrored] = padded_height - 1 - top[mirrored], 2 * padding - left[mirrored]
    first = (image * padded_height + top) * padded_width + left
    starts = first[:, None] + step[:, None] * np.arange(height)
    return torch.from_numpy(mirrored), torch.from_numpy(starts.ravel())


def shift_and_flip(images: Tensor, mirrored: Tensor, starts: Tensor, padding: int) -> Tensor:
    """Move images by up to `padding` pixels over black and mirror some, as `row_starts` says; [n, H, W, C] as given."""
    n, height, width, channels = images.shape
    sources = images.new_zeros(n + len(mirrored), height + 2 * padding, width + 2 * padding, channels)
    inner = sources[:, padding : padding + height, padding : padding + width]
    inner[:n] = images
    inner[n:] = images.index_select(0, mirrored).flip(1, 2)
    # A row of the result is a run of bytes there, so that one copy of all such runs does it.
    runs = sources.as_strided((max(0, sources.numel() // channels - width + 1), width * channels), (channels, 1))
    return runs.index_select(0, starts).view(n, height, width, channels)


def crop_box(height: int, width: int, random: Sequence[float], min_scale: float) -> tuple[int, int, int, int]:
    """A random part of an image, (top, left, height, width), of `min_scale` to 1 of its area and 3:4 to 4:3 shape.

    The crop of Inception training (Szegedy et al., 2014), as torchvision's RandomResizedCrop draws it, but for trying
    once: a box that sticks out is shrunk to fit. `random`: area, shape, top, left, each in [0, 1).
    """
    area, shape, top, left = random
    area = height * width * (min_scale + (1 - min_scale) * area)
    aspect = math.exp(math.log(3 / 4) + math.log(16 / 9) * shape)
    crop_height = max(1, min(height, round(math.sqrt(area / aspect))))
    crop_width = max(1, min(width, round(math.sqrt(area * aspect))))
    return int(top * (height - crop_height + 1)), int(left * (width - crop_width + 1)), crop_height, crop_width
