"""Augmentations of colours and shapes for single images: automatic augmentation and colour
jitter.

Colours and shapes are computed by torchvision's functions. To add a policy, write a `Transform` and
add it to AUTO_AUGMENTS: its parameters with a default are what --auto_augment_args may set.
"""

import math
from collections.abc import Callable
from functools import partial
from itertools import permutations

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as F

from utils.config import Registry
from utils.data.draws import Transform
from utils.data.spec import InputSpec

_ORDERS = list(permutations(range(3)))
_MAGNITUDES = 31  # of each operation, as in torchvision


class ColorTransform(Transform):
    """Changes colours or shapes of planes [C, H, W]."""

    def planes(self, x: Tensor, random: list[float]) -> Tensor:
        """The changed planes."""
        raise NotImplementedError

    def image(self, pixels: Tensor, random: Tensor) -> Tensor:
        return self.planes(pixels.permute(2, 0, 1), random.tolist()).permute(1, 2, 0)


class ColorJitter(ColorTransform):
    """Multiply brightness, contrast and saturation by factors in [1 - X, 1 + X].

    The order of the three is random.
    """

    streams = ("jitter_order", "jitter_brightness", "jitter_contrast", "jitter_saturation")
    # the last one keeps grey images
    adjust = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation)

    def __init__(self, strength: float):
        self.low = max(0.0, 1 - strength)
        self.high = 1 + strength

    def planes(self, x: Tensor, random: list[float]) -> Tensor:
        for place in _ORDERS[int(random[0] * len(_ORDERS))]:
            x = self.adjust[place](x, self.low + (self.high - self.low) * random[1 + place])
        return x


class Policy(ColorTransform):
    """The operations of a policy of torchvision and their magnitudes; random numbers select one."""

    def __init__(self, spec: InputSpec, policy: Callable, interpolation: str):
        if interpolation not in ("nearest", "bilinear"):
            raise ValueError(f"interpolation must be nearest or bilinear, got {interpolation}")
        self.mode = InterpolationMode(interpolation)
        self.transform = policy(num_magnitude_bins=_MAGNITUDES, interpolation=self.mode)
        self.operations = [
            (name, magnitudes(_MAGNITUDES, *spec.size), is_signed)
            for name, (magnitudes, is_signed) in self.transform._AUGMENTATION_SPACE.items()
        ]

    def apply(self, x: Tensor, operation: float, place: int, sign: float) -> Tensor:
        """Apply the operation that a random number selects, with the magnitude at this place and a
        random sign.
        """
        name, magnitudes, is_signed = self.operations[int(operation * len(self.operations))]
        magnitude = 0.0 if magnitudes is None else float(magnitudes[place])
        return self.change(x, name, -magnitude if is_signed and sign < 0.5 else magnitude)

    def change(self, x: Tensor, name: str, magnitude: float) -> Tensor:
        """What torchvision's operation of this name returns for planes, faster."""
        if name == "Sharpness":
            return _sharpness(x, 1 + magnitude)
        if name == "Solarize":
            return _solarize(x, 255 * magnitude)
        if name in ("Color", "Contrast", "AutoContrast", "Equalize"):
            x = x.contiguous()  # faster than with the channels last
        change = partial(
            self.transform._apply_image_or_video_transform,
            transform_id=name,
            magnitude=magnitude,
            interpolation=self.mode,
            fill=self.transform._fill,
        )
        moves = name.startswith(("Shear", "Translate", "Rotate"))
        if not moves or self.mode != InterpolationMode.NEAREST or len(x) != 3:
            return change(x)
        # RGB is moved as one plane of 24-bit integers, exact in float32.
        red, green, blue = x.int()
        moved = change((red + (green << 8) + (blue << 16)).float()[None]).int()
        return torch.cat([moved, moved >> 8, moved >> 16]).byte()


class TrivialAugment(Policy):
    """TrivialAugment Wide: one random operation of random magnitude (Müller and Hutter, 2021)."""

    streams = ("auto_operation", "auto_magnitude", "auto_sign")

    def __init__(self, spec: InputSpec, interpolation: str = "nearest"):
        super().__init__(spec, v2.TrivialAugmentWide, interpolation)

    def planes(self, x: Tensor, random: list[float]) -> Tensor:
        operation, place, sign = random
        return self.apply(x, operation, int(place * _MAGNITUDES), sign)


class RandAugment(Policy):
    """RandAugment: several random operations of the same magnitude (Cubuk et al., 2019)."""

    def __init__(
        self, spec: InputSpec, num_ops: int = 2, magnitude: int = 9, interpolation: str = "nearest"
    ):
        most = _MAGNITUDES - 1
        are_integers = isinstance(magnitude, int) and isinstance(num_ops, int)
        if not are_integers or not 0 <= magnitude <= most or not 1 <= num_ops <= 16:
            limits = f"magnitude must be between 0 and {most}, and num_ops between 1 and 16"
            raise ValueError(f"{limits}, both integers, got {magnitude} and {num_ops}")
        super().__init__(spec, v2.RandAugment, interpolation)
        self.magnitude = magnitude
        self.streams = tuple(
            f"auto_{what}_{number}" for number in range(num_ops) for what in ("operation", "sign")
        )

    def planes(self, x: Tensor, random: list[float]) -> Tensor:
        for operation, sign in zip(random[::2], random[1::2], strict=True):
            x = self.apply(x, operation, self.magnitude, sign)
        return x


class ThreeAugment(ColorTransform):
    """3-Augment of DeiT III: grey, solarized or blurred (Touvron et al., 2022)."""

    streams = ("auto_operation", "auto_sigma")

    def __init__(self, spec: InputSpec):
        pass

    def planes(self, x: Tensor, random: list[float]) -> Tensor:
        operation = int(random[0] * 3)
        sigma = 0.1 + 1.9 * random[1]
        if operation == 0:
            return F.rgb_to_grayscale(x, len(x)) if len(x) > 1 else x
        if operation == 1:
            return _solarize(x, 128)
        radius = math.ceil(3 * sigma)
        size = [2 * min(radius, side - 1) + 1 for side in (x.shape[2], x.shape[1])]
        return F.gaussian_blur(x, size, [sigma, sigma])


AUTO_AUGMENTS: Registry = Registry(
    "auto_augment",
    {"trivialaugment": TrivialAugment, "randaugment": RandAugment, "3augment": ThreeAugment},
)


def _sharpness(x: Tensor, factor: float) -> Tensor:
    """The result of `F.adjust_sharpness`, several times as fast: with sums of 3x3 pixels instead of
    a convolution.
    """
    if min(x.shape[1:]) <= 2:
        return x
    floats = x.float()
    inner = floats[:, 1:-1, 1:-1]
    # Sums of integers are exact, and the quotients are never halfway between two integers.
    columns = floats[:, :-2] + floats[:, 1:-1] + floats[:, 2:]
    blurred = columns[..., :-2] + columns[..., 1:-1] + columns[..., 2:]
    blurred.add_(inner, alpha=4).div_(13).round_()
    inner.add_(blurred.sub_(inner), alpha=1 - factor)
    return floats.clamp_(0, 255).to(torch.uint8)


def _solarize(x: Tensor, threshold: float) -> Tensor:
    """The result of `F.solarize`, many times as fast: with bitwise operations on bytes instead of
    float32.
    """
    return x ^ -(x >= math.ceil(np.float32(threshold))).byte()
