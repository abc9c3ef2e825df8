"""The shape and normalisation of a model's input images, and how photographs are resized to it."""

import math
from dataclasses import dataclass, replace

import numpy as np

SMALL = 96  # pixels; images with sides up to this are decoded once and cached


@dataclass(frozen=True)
class InputSpec:
    """The model's input: image shape in pixels, and the mean and standard deviation per channel of pixels in 0..1.

    Evaluation resizes the shorter side of a photograph to `resize` pixels, or with `squash` both sides, and crops the
    centre. If `resize` is None, as in older checkpoints, the centre is 0.875 of the shorter side. Photographs are
    resized with `interpolation`, bilinear or bicubic.
    """

    height: int
    width: int
    channels: int
    mean: list[float]
    std: list[float]
    resize: int | None = None
    interpolation: str = "bilinear"
    squash: bool = False

    @classmethod
    def from_dict(cls, values: dict) -> "InputSpec":
        """Make a spec from the output of `asdict`. Raises ValueError if the values are invalid."""
        try:
            spec = cls(**values)
            sizes = (spec.height, spec.width, spec.channels, 1 if spec.resize is None else spec.resize)
            fits = all(type(n) is int and 0 < n < 2**16 for n in sizes)
            fits = fits and spec.interpolation in ("bilinear", "bicubic") and type(spec.squash) is bool
            fits = fits and len(spec.mean) == len(spec.std) == spec.channels and min(spec.std) > 0
            fits = fits and bool(np.isfinite([*spec.mean, *spec.std]).all())
        except TypeError:
            fits = False
        if not fits:
            raise ValueError("'input' is missing or malformed")
        return spec

    def cropped(self, share: float | None) -> "InputSpec":
        """The same input, except that evaluation uses this fraction of a photograph's shorter side.

        Unchanged if `share` is None and for small inputs. The size is rounded down, as in torchvision and timm.
        """
        if share is None or self.small:
            return self
        return replace(self, resize=math.floor(min(self.height, self.width) / share + 1e-6))

    def describe(self) -> str:
        return f"{self.height}x{self.width} {'grey' if self.channels == 1 else 'colour'}"

    @property
    def small(self) -> bool:
        return max(self.height, self.width) <= SMALL
