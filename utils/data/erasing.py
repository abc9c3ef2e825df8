"""Random boxes of training images that are filled with the mean colour: erasing and cutout."""

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from utils.config import require
from utils.data.draws import Transform
from utils.data.spec import InputSpec

_TRIES = 10  # boxes to draw until one is smaller than the image, as in torchvision and timm
_AREA = 0.02, 0.33  # of the image, as in torchvision
_ASPECT = math.log(0.3), math.log(3.3)  # of the box, as in torchvision


class FillBox(Transform):
    """Fill a box of each image with the mean colour, which the normalisation maps to 0 up to
    rounding.
    """

    batched = True

    def __init__(self, spec: InputSpec):
        self.height, self.width = spec.size
        self.fill = tuple(min(255, max(0, round(255 * mean))) for mean in spec.mean)

    def boxes(self, random: Tensor) -> Sequence[Tensor]:
        """The first row and column of each box, and the row and column after its end, integers of
        any dtype [n] each, from random numbers, float64, so that rounding is the same on any
        device.

        They may lie outside the image. A box without pixels changes nothing.
        """
        raise NotImplementedError

    def batch(self, images: Tensor, random: Tensor) -> Tensor:
        top, left, bottom, right = (edge[:, None] for edge in self.boxes(random.double()))
        row = torch.arange(self.height, device=images.device)
        column = torch.arange(self.width, device=images.device).repeat_interleave(len(self.fill))
        rows = (row >= top) & (row < bottom)
        columns = (column >= left) & (column < right)
        # Inside the box, `images ^ (images ^ fill)` is `fill`. On a CPU, bitwise operations on
        # whole rows take an eighth of the time of torch.where.
        pixels = images.flatten(2)
        changes = pixels ^ _fill_row(self.fill, self.width, images.device)
        changes &= -columns.byte()[:, None]  # 255 inside the box
        changes &= -rows.byte()[:, :, None]
        return changes.bitwise_xor_(pixels).view(images.shape)


class RandomErasing(FillBox):
    """Fill a random box of the image with this probability (Zhong et al., 2017)."""

    streams = (
        *("erasing", "erasing_top", "erasing_left"),
        *(f"erasing_{what}_{number}" for what in ("area", "aspect") for number in range(_TRIES)),
    )

    def __init__(self, spec: InputSpec, probability: float):
        super().__init__(spec)
        self.probability = probability

    def boxes(self, random: Tensor) -> Sequence[Tensor]:
        areas = random[:, 3 : 3 + _TRIES]
        aspects = random[:, 3 + _TRIES :]
        low, high = _AREA
        pixels = self.height * self.width
        side = (areas * ((high - low) * pixels) + low * pixels).sqrt_()
        low, high = (limit / 2 for limit in _ASPECT)
        shape = (aspects * (high - low) + low).exp_()
        heights = (side * shape).round_()
        widths = (side / shape).round_()
        fits = (heights < self.height) & (widths < self.width)
        first = fits.byte().argmax(1, keepdim=True)
        fits &= random[:, :1] < self.probability
        height, width = ((sizes * fits).gather(1, first)[:, 0] for sizes in (heights, widths))
        top = (random[:, 1] * (self.height + 1 - height)).floor_()
        left = (random[:, 2] * (self.width + 1 - width)).floor_()
        return top, left, top + height, left + width


class Cutout(FillBox):
    """Fill a square at a random place (DeVries and Taylor, 2017); the part of it outside the image
    is cut off.
    """

    streams = ("cutout_row", "cutout_column")

    def __init__(self, spec: InputSpec, side: int):
        problem = (
            f"--cutout {side}: the square can cover the whole {spec.height}x{spec.width} image"
        )
        require(side < max(spec.size), problem, "use a smaller one")
        super().__init__(spec)
        self.side = side

    def boxes(self, random: Tensor) -> Sequence[Tensor]:
        row, column = random.unbind(1)
        top = (row * self.height).long() - self.side // 2
        left = (column * self.width).long() - self.side // 2
        return top, left, top + self.side, left + self.side


@cache
def _fill_row(fill: tuple[int, ...], width: int, device: torch.device) -> Tensor:
    """A row of pixels of this colour, uint8 [W * C]. It is copied to the device once."""
    return torch.tensor(fill, dtype=torch.uint8).repeat(width).to(device)
