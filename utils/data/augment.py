"""Random changes to training images, each drawn from (seed, epoch, sample index) alone.

So an image is changed in the same way whatever worker, rank or history computes it. All functions are batched and run
on the device of their inputs.
"""

import math

import torch
from torch import Tensor

from utils.data.order import mix

# SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014. int64 wraps as uint64.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MULTIPLIERS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))


def uniform(seed: int, epoch: int, indices: Tensor, draws: int) -> Tensor:
    """Random numbers in [0, 1) of each sample: float32 [n, draws] from int64 `indices` [n]."""
    key = mix(seed, "augment", epoch) - 2**63
    states = _scramble(indices.long() ^ key).unsqueeze(1)
    counters = torch.arange(1, draws + 1, device=indices.device) * _GAMMA
    return (_scramble(states + counters) >> 40 & 0xFFFFFF).float() / 2**24


def _scramble(x: Tensor) -> Tensor:
    for shift, multiplier in _MULTIPLIERS:
        x = (x ^ _shift_right(x, shift)) * multiplier
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return x >> bits & ((1 << (64 - bits)) - 1)  # logical: an arithmetic shift would copy the sign


def shift_and_flip(images: Tensor, random: Tensor, padding: int, flip: bool) -> Tensor:
    """Move each image by up to `padding` pixels over black, then mirror half of them; [n, H, W, C] uint8 to the same.

    `random` [n, 3] in [0, 1): vertical shift, horizontal shift, mirroring.
    """
    if not padding and not flip:
        return images
    n, height, width, _ = images.shape
    rows = torch.arange(height, device=images.device).expand(n, -1)
    columns = torch.arange(width, device=images.device).expand(n, -1)
    if flip:
        columns = torch.where(random[:, 2:3] < 0.5, width - 1 - columns, columns)
    if padding:
        images = torch.nn.functional.pad(images, (0, 0, padding, padding, padding, padding))
        shifts = (random[:, :2] * (2 * padding + 1)).long()
        rows, columns = rows + shifts[:, :1], columns + shifts[:, 1:2]
    samples = torch.arange(n, device=images.device)[:, None, None]
    return images[samples, rows[:, :, None], columns[:, None, :]]


def crop_box(height: int, width: int, random: Tensor, min_scale: float) -> tuple[int, int, int, int]:
    """A random part of an image, (top, left, height, width), of `min_scale` to 1 of its area and 3:4 to 4:3 shape.

    The crop of Inception training (Szegedy et al., 2014), as torchvision's RandomResizedCrop draws it, but for trying
    once: a box that sticks out is shrunk to fit. `random` [4] in [0, 1): area, shape, top, left.
    """
    area, shape, top, left = random.tolist()
    area = height * width * (min_scale + (1 - min_scale) * area)
    aspect = math.exp(math.log(3 / 4) + math.log(16 / 9) * shape)
    crop_height = max(1, min(height, round(math.sqrt(area / aspect))))
    crop_width = max(1, min(width, round(math.sqrt(area * aspect))))
    return int(top * (height - crop_height + 1)), int(left * (width - crop_width + 1)), crop_height, crop_width
