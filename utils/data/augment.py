"""Random changes of training images. The same operations change single images in loader processes
and small images in batches on the device.

To add an augmentation, write an `Operation` and add it to AUGMENTATIONS. Mixup and CutMix are in
mixing.py.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from utils.config.settings import TrainConfig
from utils.data.auto_augment import AUTO_AUGMENTS, ColorJitter
from utils.data.decode import Shrink, center, center_factor, center_of_photograph, resize
from utils.data.draws import ALTERNATING, Array, Draws, Operation, namespace
from utils.data.erasing import Cutout, RandomErasing
from utils.data.order import Microbatch
from utils.data.spec import InputSpec


class Center(Operation):
    """The centre of an image of any size, as in evaluation."""

    def __init__(self, spec: InputSpec):
        self.spec = spec

    def image(self, pixels: Tensor, random: np.ndarray) -> Tensor:
        return (
            center(pixels, *self.spec.size)
            if self.spec.small
            else center_of_photograph(pixels, self.spec)
        )

    def shrink(self, random: np.ndarray, height: int, width: int) -> float:
        return self.spec.crop * center_factor(height, width, *self.spec.size)


class Crop(Operation):
    """A random part of the image with at least `min_scale` of its area, resized to the model's
    input.
    """

    streams = ("crop_area", "crop_aspect", "crop_top", "crop_left")

    def __init__(self, spec: InputSpec, min_scale: float):
        self.size, self.min_scale, self.interpolation = (
            (spec.height, spec.width),
            min_scale,
            spec.interpolation,
        )

    def image(self, pixels: Tensor, random: np.ndarray) -> Tensor:
        height, width, _ = pixels.shape
        top, left, rows, columns = crop_box(height, width, random.tolist(), self.min_scale)
        return resize(
            pixels[top : top + rows, left : left + columns], *self.size, self.interpolation
        )

    def shrink(self, random: np.ndarray, height: int, width: int) -> float:
        _, _, rows, columns = crop_box(height, width, random.tolist(), self.min_scale)
        return min(rows / self.size[0], columns / self.size[1])


class ShiftAndFlip(Operation):
    """Shift images by up to `padding` pixels, filled with black, and with `flip` mirror half of
    them left to right.

    If `flip` is "alternate", each image is mirrored in every other epoch (Jordan, "94% on CIFAR-10
    in 3.29 Seconds on a Single GPU", 2024).
    """

    batched = True

    def __init__(self, spec: InputSpec, padding: int, flip: bool | str):
        self.height, self.width, self.padding, self.flip = (
            spec.height,
            spec.width,
            padding,
            bool(flip),
        )
        stream = ALTERNATING if flip == "alternate" else "flip"
        self.streams = ("shift_top", "shift_left") * (padding > 0) + (stream,) * self.flip

    def _choices(self, random: Array) -> tuple[Any, Any, Any]:
        """Where each result starts in its padded image, int64 [n] twice, and whether it is flipped,
        bool [n].
        """
        xp = namespace(random)
        starts = xp.asarray(random * (2 * self.padding + 1), dtype=xp.int64)  # without padding, 0
        return starts[:, 0], starts[:, 1 if self.padding else 0], random[:, -1] < 0.5 * self.flip

    def prepare(self, random: Array) -> dict[str, Tensor]:
        """The samples to flip, int64 [m], and where each row of the result starts, int64 [n * H].

        On the device, all images are flipped, because the host would have to wait for the number of
        those to flip.
        """
        n, padding, (padded_height, padded_width) = len(random), self.padding, self._padded()
        top, left, is_flipped = self._choices(random)
        xp = namespace(random)
        image, rows = (xp.arange(count, device=random.device) for count in (n, self.height))
        first, step, flipped = (
            (image * padded_height + top) * padded_width + left,
            padded_width,
            image[:0],
        )
        if self.flip:
            # Flipped images come after the others, with all pixels in reverse order, so rows are
            # read from last to first.
            flipped = image if xp is torch else image[is_flipped]
            # its place among the flipped images
            copy = image if xp is torch else is_flipped.cumsum() - 1
            reverse = ((n + copy + 1) * padded_height - 1 - top) * padded_width + 2 * padding - left
            first = xp.where(is_flipped, reverse, first)
            step = xp.where(is_flipped, -padded_width, padded_width)[:, None]
        starts = (first[:, None] + step * rows).reshape(-1)
        return {"flipped": torch.as_tensor(flipped), "starts": torch.as_tensor(starts)}

    def batch(self, images: Tensor, prepared: dict[str, Tensor]) -> Tensor:
        n, height, width, channels = images.shape
        flipped, padding = prepared["flipped"], self.padding
        sources = images.new_zeros(n + len(flipped), *self._padded(), channels)
        inner = sources[:, padding : padding + height, padding : padding + width]
        inner[:n] = images
        inner[n:] = images.index_select(0, flipped).flip(1, 2)
        # Each row of the result is contiguous in `sources`, so one indexed copy of all rows gives
        # the result.
        runs = sources.as_strided(
            (max(0, sources.numel() // channels - width + 1), width * channels), (channels, 1)
        )
        return runs.index_select(0, prepared["starts"]).view(n, height, width, channels)

    def _padded(self) -> tuple[int, int]:
        return self.height + 2 * self.padding, self.width + 2 * self.padding


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


def _crop(config: TrainConfig, spec: InputSpec) -> Operation | None:
    usual = 1.0 if spec.small else 0.08
    min_scale = usual if config.min_scale is None else config.min_scale
    return Crop(spec, min_scale) if min_scale < 1 else None


def _shift_and_flip(config: TrainConfig, spec: InputSpec) -> Operation | None:
    padding, flip = config.crop_padding, config.flip  # None before it is chosen from the data
    return ShiftAndFlip(spec, padding, flip) if padding or flip else None


# In the order in which they are applied. Each function returns the operation, or None if the
# settings do not use it.
AUGMENTATIONS = {
    "crop": _crop,
    "shift and flip": _shift_and_flip,
    "auto augment": lambda config, spec: (
        AUTO_AUGMENTS.call(config, spec) if config.auto_augment else None
    ),
    "color jitter": lambda config, spec: (
        ColorJitter(config.color_jitter) if config.color_jitter else None
    ),
    "random erasing": lambda config, spec: (
        RandomErasing(spec, p) if (p := config.random_erasing) else None
    ),
    "cutout": lambda config, spec: Cutout(spec, config.cutout) if config.cutout else None,
}


class Augmentation:
    """The operations of a run, in order."""

    def __init__(self, seed: int, operations: dict[str, Operation]):
        self.seed, self.operations = seed, operations

    @property
    def batched(self) -> bool:
        """Whether all operations can run on the device; else all of them run in loader processes."""
        return all(operation.batched for operation in self.operations.values())

    def draw(self, microbatch: Microbatch) -> dict[str, Any]:
        """The random numbers of its samples, float32 [n, len(streams)] for each operation."""
        draws = Draws(self.seed, microbatch.epoch, microbatch.indices, microbatch.occurrences)
        return {
            name: draws.uniform(*operation.streams) for name, operation in self.operations.items()
        }

    def crop(
        self, random: dict[str, np.ndarray], place: int
    ) -> tuple[Shrink, Callable[[Tensor], Tensor]]:
        """`shrink` and `image` of the first operation, for the photograph at this place of its
        microbatch.
        """
        name, first = next(iter(self.operations.items()))
        return partial(first.shrink, random[name][place]), partial(
            first.image, random=random[name][place]
        )

    def change(self, images: Tensor, random: dict[str, np.ndarray], first: int = 0) -> Tensor:
        """Change the images of a microbatch, [n, H, W, C], from this operation on, in a loader
        process.
        """
        for name, operation in list(self.operations.items())[first:]:
            images = operation.change(images, random[name])
        return images

    def prepare(self, microbatch: Microbatch) -> dict[str, Any]:
        """What `batch` needs for the samples of a microbatch; its tensors must be copied to the
        device.

        If the samples are tensors on the device, it is computed there.
        """
        return {
            name: self.operations[name].prepare(numbers)
            for name, numbers in self.draw(microbatch).items()
        }

    def batch(self, images: Tensor, prepared: dict[str, Any]) -> Tensor:
        """Change the images of a microbatch, [n, H, W, C]."""
        for name, operation in self.operations.items():
            images = operation.batch(images, prepared[name])
        return images


def make_augmentation(config: TrainConfig, spec: InputSpec, training: bool) -> Augmentation:
    """The operations of these settings.

    Photographs not cropped at random are first cropped to their centre.
    """
    made = {name: make(config, spec) for name, make in AUGMENTATIONS.items()} if training else {}
    operations = {name: operation for name, operation in made.items() if operation is not None}
    if not spec.small and "crop" not in operations:
        operations = {"center": Center(spec), **operations}
    return Augmentation(config.seed, operations)
