"""The shape and normalisation of a model's input images."""

from dataclasses import dataclass

import numpy as np

SMALL = 96  # pixels; images with sides up to this are decoded once and cached


@dataclass(frozen=True)
class InputSpec:
    """The model's input: image shape in pixels, and the mean and standard deviation per channel of pixels in 0..1."""

    height: int
    width: int
    channels: int
    mean: list[float]
    std: list[float]

    @classmethod
    def from_dict(cls, values: dict) -> "InputSpec":
        """Make a spec from the output of `asdict`. Raises ValueError if the values are invalid."""
        try:
            spec = cls(**values)
            fits = all(type(n) is int and 0 < n < 2**16 for n in (spec.height, spec.width, spec.channels))
            fits = fits and len(spec.mean) == len(spec.std) == spec.channels and min(spec.std) > 0
            fits = fits and bool(np.isfinite([*spec.mean, *spec.std]).all())
        except TypeError:
            fits = False
        if not fits:
            raise ValueError("'input' is missing or malformed")
        return spec

    def describe(self) -> str:
        return f"{self.height}x{self.width} {'grey' if self.channels == 1 else 'colour'}"

    @property
    def small(self) -> bool:
        return max(self.height, self.width) <= SMALL
