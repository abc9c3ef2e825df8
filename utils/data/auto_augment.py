"""Augmentations of colours and shapes for single images: automatic augmentation and colour jitter.

The pixels are computed by torchvision's functions. To add a policy, write an `Operation` and add it to AUTO_AUGMENTS:
its parameters with a default are what --auto_augment_args may set.
"""

import math
from collections.abc import Callable
from functools import partial
from itertools import permutations
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as F

from utils.config.settings import TrainConfig
from utils.config.table import Table
from utils.data.operation import Operation
from utils.data.spec import InputSpec

_ORDERS = list(permutations(range(3)))


class ColorOperation(Operation):
    """Changes colours or shapes of planes [C, H, W]."""

    def planes(self, x: Tensor, random: list[float]) -> Tensor:
        """The changed planes."""
        raise NotImplementedError

    def image(self, pixels: Tensor, random: Tensor) -> Tensor:
        return self.planes(pixels.permute(2, 0, 1), random.tolist()).permute(1, 2, 0)


class ColorJitter(ColorOperation):
    """Multiply brightness, contrast and saturation by factors in [1 - X, 1 + X], in random order."""

    streams = ("jitter_order", "jitter_brightness", "jitter_contrast", "jitter_saturation")
    adjust = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation)  # the last one keeps grey images

    def __init__(self, strength: float):
        self.low, self.high = max(0.0, 1 - strength), 1 + strength

    def planes(self, x: Tensor, random: list[float]) -> Tensor:
        for place in _ORDERS[int(random[0] * len(_ORDERS))]:
            x = self.adjust[place](x, self.low + (self.high - self.low) * random[1 + place])
        return x


class TrivialAugment(ColorOperation):
    """TrivialAugment Wide: one random operation of random strength (Müller and Hutter, 2021)."""

    streams = ("auto_operation", "auto_magnitude", "auto_sign")

    def __init__(self, spec: InputSpec, num_magnitude_bins: int = 31, interpolation: str = "nearest"):
        self.strengths = _strengths(num_magnitude_bins, 0.99, (32.0, 32.0), 135.0, 0.99, 6)
        self.bins, self.interpolation = num_magnitude_bins, _mode(interpolation)

    def planes(self, x: Tensor, random: list[float]) -> Tensor:
        operation, place, sign = random
        return _apply(x, self.strengths, operation, int(place * self.bins), sign, self.interpolation)


class RandAugment(ColorOperation):
    """RandAugment: several random operations of the same strength (Cubuk et al., 2019)."""

    def __init__(
        self,
        spec: InputSpec,
        num_ops: int = 2,
        magnitude: int = 9,
        num_magnitude_bins: int = 31,
        interpolation: str = "nearest",
    ):
        if not 0 <= magnitude < num_magnitude_bins:
            raise ValueError(f"magnitude must be between 0 and {num_magnitude_bins - 1}, got {magnitude}")
        if not 1 <= num_ops <= 16:
            raise ValueError(f"num_ops must be between 1 and 16, got {num_ops}")
        shifts = 150 / 331 * spec.width, 150 / 331 * spec.height
        self.strengths = _strengths(num_magnitude_bins, 0.3, shifts, 30.0, 0.9, 4)
        self.magnitude, self.interpolation = magnitude, _mode(interpolation)
        self.streams = tuple(f"auto_{what}_{number}" for number in range(num_ops) for what in ("operation", "sign"))

    def planes(self, x: Tensor, random: list[float]) -> Tensor:
        for operation, sign in zip(random[::2], random[1::2], strict=True):
            x = _apply(x, self.strengths, operation, self.magnitude, sign, self.interpolation)
        return x


class ThreeAugment(ColorOperation):
    """3-Augment of DeiT III: grey, solarized or blurred (Touvron et al., 2022)."""

    streams = ("auto_operation", "auto_sigma")

    def __init__(self, spec: InputSpec):
        pass

    def planes(self, x: Tensor, random: list[float]) -> Tensor:
        operation, sigma = int(random[0] * 3), 0.1 + 1.9 * random[1]
        if operation == 0:
            return F.rgb_to_grayscale(x, len(x)) if len(x) > 1 else x
        if operation == 1:
            return _solarize(x, 128)
        radius = math.ceil(3 * sigma)
        size = [2 * min(radius, side - 1) + 1 for side in (x.shape[2], x.shape[1])]
        return F.gaussian_blur(x, size, [sigma, sigma])


AUTO_AUGMENTS = Table(
    "auto_augment",
    {"trivialaugment": TrivialAugment, "randaugment": RandAugment, "3augment": ThreeAugment},
    trial=lambda config: _try_arguments(config),
)


def _try_arguments(config: TrainConfig) -> None:
    """Raise ValueError if the policy does not accept --auto_augment_args."""
    AUTO_AUGMENTS.call(config, InputSpec(32, 32, 3, [0.5] * 3, [0.5] * 3))


def _sharpness(x: Tensor, factor: float) -> Tensor:
    """The result of `F.adjust_sharpness`, several times as fast: with sums of 3x3 pixels instead of a convolution."""
    if min(x.shape[1:]) <= 2:
        return x
    floats = x.float()
    inner = floats[:, 1:-1, 1:-1]
    # Sums of integers are exact, and the quotients are never halfway between two integers.
    columns = floats[:, :-2] + floats[:, 1:-1]
    columns += floats[:, 2:]
    blurred = columns[:, :, :-2] + columns[:, :, 1:-1]
    blurred += columns[:, :, 2:]
    blurred.add_(inner, alpha=4).div_(13).round_()
    inner.add_(blurred.sub_(inner), alpha=1 - factor)
    return floats.clamp_(0, 255).to(torch.uint8)


def _solarize(x: Tensor, threshold: float) -> Tensor:
    """The result of `F.solarize`, many times as fast: with bitwise operations on bytes instead of float32."""
    return x ^ -(x >= math.ceil(np.float32(threshold))).byte()


def _move(x: Tensor, mode: InterpolationMode, move: Callable[[Tensor], Tensor]) -> Tensor:
    """Move the pixels of planes. With `nearest`, RGB is one plane of 24-bit integers, exact in float32."""
    if mode != InterpolationMode.NEAREST or len(x) != 3:
        return move(x)
    red, green, blue = x.int()
    moved = move((red + (green << 8) + (blue << 16)).float()[None]).int()
    return torch.cat([moved, moved >> 8, moved >> 16]).byte()


def _affine(x: Tensor, mode: InterpolationMode, center: list[float] | None = None, **change: Any) -> Tensor:
    change = {"translate": [0, 0], "shear": [0.0, 0.0]} | change
    return _move(x, mode, partial(F.affine, angle=0.0, scale=1.0, interpolation=mode, center=center, **change))


def _degrees(slope: float) -> float:
    return math.degrees(math.atan(slope))


# The operations of TrivialAugment and RandAugment, as in torchvision: planes, strength and interpolation to planes.
_OPERATIONS: dict[str, Callable[[Tensor, float, InterpolationMode], Tensor]] = {
    "identity": lambda x, m, mode: x,
    "shear_x": lambda x, m, mode: _affine(x, mode, [0, 0], shear=[_degrees(m), 0.0]),
    "shear_y": lambda x, m, mode: _affine(x, mode, [0, 0], shear=[0.0, _degrees(m)]),
    "translate_x": lambda x, m, mode: _affine(x, mode, translate=[int(m), 0]),
    "translate_y": lambda x, m, mode: _affine(x, mode, translate=[0, int(m)]),
    "rotate": lambda x, m, mode: _move(x, mode, partial(F.rotate, angle=m, interpolation=mode)),
    "brightness": lambda x, m, mode: F.adjust_brightness(x, 1 + m),
    "color": lambda x, m, mode: F.adjust_saturation(x.contiguous(), 1 + m),
    "contrast": lambda x, m, mode: F.adjust_contrast(x.contiguous(), 1 + m),
    "sharpness": lambda x, m, mode: _sharpness(x, 1 + m),
    "posterize": lambda x, m, mode: F.posterize(x, int(m)),
    "solarize": lambda x, m, mode: _solarize(x, 255 * m),
    "autocontrast": lambda x, m, mode: F.autocontrast(x.contiguous()),  # faster than with the channels last
    "equalize": lambda x, m, mode: F.equalize(x.contiguous()),
}
_NAMES = list(_OPERATIONS)
_SIGNED = set(_NAMES[1:10])


def _strengths(
    bins: int, shear: float, shifts: tuple[float, float], angle: float, color: float, bits: int
) -> dict[str, list[float]]:
    """The strengths of each operation in `bins` equal steps from none to these limits.

    `shifts` are pixels in x and y. `bits` is the most that posterize removes. Computed in float32, as in torchvision.
    """
    if not 2 <= bins <= 1000:
        raise ValueError(f"num_magnitude_bins must be between 2 and 1000, got {bins}")
    limits = [shear, shear, *shifts, angle, *[color] * 4]
    strengths = {}
    for name, limit in zip(_NAMES[1:10], limits, strict=True):
        strengths[name] = torch.linspace(0, limit, bins).tolist()
    strengths["posterize"] = (8 - torch.arange(bins) / ((bins - 1) / bits)).round().tolist()
    strengths["solarize"] = torch.linspace(1, 0, bins).tolist()
    return {name: strengths.get(name, [0.0] * bins) for name in _NAMES}


def _apply(
    x: Tensor, strengths: dict[str, list[float]], operation: float, place: int, sign: float, mode: InterpolationMode
) -> Tensor:
    """Apply the operation that a random number selects, with the strength at this place and a random sign."""
    name = _NAMES[int(operation * len(_NAMES))]
    strength = strengths[name][place]
    return _OPERATIONS[name](x, -strength if name in _SIGNED and sign < 0.5 else strength, mode)


def _mode(interpolation: str) -> InterpolationMode:
    if interpolation not in ("nearest", "bilinear"):
        raise ValueError(f"interpolation must be nearest or bilinear, got {interpolation}")
    return InterpolationMode(interpolation)
