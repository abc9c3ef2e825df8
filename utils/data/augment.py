"""Random changes of training images: of single images or batches in loader processes, and of
batches of small images on the device.

To add an augmentation, write a `Transform` and add it to AUGMENTATIONS. Mixup and CutMix are in
batches.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from utils.data.decode import center, center_factor, resize
from utils.data.draws import ALTERNATING, Draws, Transform
from utils.data.erasing import Cutout, RandomErasing
from utils.data.order import Microbatch
from utils.data.spec import InputSpec
from utils.data.transforms import AUTO_AUGMENTS, ColorJitter
from utils.settings.data import DataSettings


@dataclass
class Center(Transform):
    """The centre of an image of any size, as in evaluation."""

    spec: InputSpec

    def image(self, pixels: Tensor, random: Tensor) -> Tensor:
        return center(pixels, self.spec)

    def shrink(self, random: Tensor, height: int, width: int) -> float:
        return self.spec.crop * center_factor(height, width, *self.spec.size)


@dataclass
class Crop(Transform):
    """A random part of the image with at least `min_scale` of its area, resized to the model's
    input.
    """

    spec: InputSpec
    min_scale: float
    streams = ("crop_area", "crop_aspect", "crop_top", "crop_left")

    def image(self, pixels: Tensor, random: Tensor) -> Tensor:
        height, width, _ = pixels.shape
        top, left, rows, columns = crop_box(height, width, random.tolist(), self.min_scale)
        box = pixels[top : top + rows, left : left + columns]
        return resize(box, *self.spec.size, self.spec.interpolation)

    def shrink(self, random: Tensor, height: int, width: int) -> float:
        _, _, rows, columns = crop_box(height, width, random.tolist(), self.min_scale)
        return center_factor(rows, columns, *self.spec.size)


class ShiftAndFlip(Transform):
    """Shift images by up to `padding` pixels, filled with black, and with `flip` mirror half of
    them left to right.

    If `flip` is "alternate", each image is mirrored in every other epoch (Jordan, "94% on CIFAR-10
    in 3.29 Seconds on a Single GPU", 2024).
    """

    batched = True

    def __init__(self, padding: int, flip: bool | str):
        self.padding = padding
        self.flip = bool(flip)
        if padding:
            self.streams += "shift_top", "shift_left"
        if flip:
            self.streams += (ALTERNATING if flip == "alternate" else "flip",)

    def batch(self, images: Tensor, random: Tensor) -> Tensor:
        n, height, width, channels = images.shape
        padding = self.padding
        padded_height = height + 2 * padding
        padded_width = width + 2 * padding
        count = 2 * n if self.flip else n
        sources = images.new_zeros(count, padded_height, padded_width, channels)
        inner = sources[:, padding : padding + height, padding : padding + width]
        inner[:n] = images
        shifts = (random * (2 * padding + 1)).long()  # without padding, 0
        top = shifts[:, 0]
        left = shifts[:, 1 if padding else 0]
        image = torch.arange(n, device=images.device)
        rows = torch.arange(height, device=images.device)
        step: Any = padded_width
        first = (image * padded_height + top) * padded_width + left
        if self.flip:
            # All are flipped, because a host would have to wait for a GPU to know which. They come
            # after the others, with all pixels in reverse order, so rows are read from last to
            # first.
            inner[n:] = images.flip(1, 2)
            is_flipped = random[:, -1] < 0.5
            end = (n + image + 1) * padded_height - 1 - top
            reverse = end * padded_width + 2 * padding - left
            first = torch.where(is_flipped, reverse, first)
            step = torch.where(is_flipped, -padded_width, padded_width)[:, None]
        # Each row of the result is contiguous in `sources`, so one indexed copy of all rows gives
        # the result.
        starts = (first[:, None] + step * rows).reshape(-1)
        runs = sources.as_strided(
            (max(0, sources.numel() // channels - width + 1), width * channels), (channels, 1)
        )
        return runs.index_select(0, starts).view(n, height, width, channels)


def crop_box(
    height: int, width: int, random: Sequence[float], min_scale: float
) -> tuple[int, int, int, int]:
    """A random crop, (top, left, height, width), with `min_scale` to 1 of an image's area and an
    aspect of 3:4 to 4:3.

    This is the crop of Inception training (Szegedy et al., 2014). Unlike torchvision's
    RandomResizedCrop, it draws only once, and shrinks a box that does not fit. `random`: area,
    aspect, top, left, each in [0, 1).
    """
    scale, shape, top, left = random
    area = height * width * (min_scale + (1 - min_scale) * scale)
    aspect = math.exp(math.log(3 / 4) + math.log(16 / 9) * shape)
    crop_height = max(1, min(height, round(math.sqrt(area / aspect))))
    crop_width = max(1, min(width, round(math.sqrt(area * aspect))))
    return (
        int(top * (height - crop_height + 1)),
        int(left * (width - crop_width + 1)),
        crop_height,
        crop_width,
    )


def _center(config: DataSettings, spec: InputSpec) -> Transform | None:
    return None if spec.small else Center(spec)  # small images have the right size


def _crop(config: DataSettings, spec: InputSpec) -> Transform | None:
    usual = 1.0 if spec.small else 0.08
    min_scale = usual if config.min_scale is None else config.min_scale
    return Crop(spec, min_scale) if min_scale < 1 else _center(config, spec)


# In the order in which they are applied. Each function returns the transform, or something false if
# the settings do not use it.
AUGMENTATIONS = {
    "crop": _crop,
    "shift and flip": lambda config, spec: (
        (config.crop_padding or config.flip) and ShiftAndFlip(config.crop_padding, config.flip)
    ),
    "auto augment": lambda config, spec: config.auto_augment and AUTO_AUGMENTS.call(config, spec),
    "color jitter": lambda config, spec: config.color_jitter and ColorJitter(config.color_jitter),
    "random erasing": lambda config, spec: (
        config.random_erasing and RandomErasing(spec, config.random_erasing)
    ),
    "cutout": lambda config, spec: config.cutout and Cutout(spec, config.cutout),
}


@dataclass
class Augmentation:
    """The transforms of a run, in order."""

    seed: int = 0
    transforms: Sequence[Transform] = ()

    def draw(self, microbatch: Microbatch) -> list[Tensor]:
        """The random numbers of its samples, float32 [n, len(streams)] for each transform."""
        draws = Draws(self.seed, microbatch.epoch, microbatch.indices, microbatch.occurrences)
        return [draws.uniform(*transform.streams) for transform in self.transforms]

    def apply(self, images: Tensor, random: Sequence[Tensor], first: int = 0) -> Tensor:
        """Change the images of a microbatch, [n, H, W, C], from the `first` transform on."""
        for transform, numbers in list(zip(self.transforms, random, strict=True))[first:]:
            images = transform.batch(images, numbers)
        return images


def make_augmentation(config: DataSettings, spec: InputSpec, training: bool) -> Augmentation:
    """The transforms of these settings.

    Photographs not cropped at random are first cropped to their centre.
    """
    makers = [*AUGMENTATIONS.values()] if training else [_center]
    made = [make(config, spec) for make in makers]
    return Augmentation(config.seed, [transform for transform in made if transform])
