"""The shape and normalisation of a model's input images, and how photographs are resized to it."""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from utils.config import Number, PositiveFloat, read_fields, require
from utils.settings.shared import Pixels

# numbers of an image; a model for more would fill the memory, and end with an allocator's message
_LARGEST = 2**27
# fraction of a photograph's shorter side that evaluation uses, as is common since AlexNet
EVAL_CROP = 0.875
SMALL = 96  # pixels; images with sides up to this are decoded once and cached


@dataclass(frozen=True)
class InputSpec:
    """The model's input: image shape in pixels, and the mean and standard deviation per channel of
    pixels in 0..1.

    Evaluation resizes the shorter side of a photograph to `resize` pixels, or with `squash` both
    sides, and crops the centre. If `resize` is None, the centre is 0.875 of the shorter side.
    Photographs are resized with `interpolation`, bilinear or bicubic. `evaluation` is the input in
    evaluation if its size differs.
    """

    height: Pixels
    width: Pixels
    channels: Pixels
    mean: list[Number]
    std: list[PositiveFloat]
    resize: Pixels | None = None
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    squash: bool = False
    evaluation: "InputSpec | None" = None

    @classmethod
    def from_dict(cls, values: Any) -> "InputSpec":
        """Make a spec from the output of `asdict`. Raises ValueError if the values are invalid."""
        values = values if isinstance(values, dict) else {}
        other = values.get("evaluation")
        spec = read_fields(cls, values | {"evaluation": None})
        fits = len(spec.mean) == len(spec.std) == spec.channels
        fits = fits and math.prod(spec.size) * spec.channels <= _LARGEST
        require(fits, "'input' is missing or malformed")
        return spec if other is None else replace(spec, evaluation=cls.from_dict(other))

    def for_evaluation(self) -> "InputSpec":
        """The input in evaluation."""
        return self.evaluation or self

    def cropped(self, share: float | None) -> "InputSpec":
        """The same input, except that evaluation uses this fraction of a photograph's shorter side.

        Unchanged if `share` is None and for small inputs. The size is rounded down, as in
        torchvision and timm.
        """
        if share is None or self.small:
            return self
        return replace(self, resize=math.floor(min(self.height, self.width) / share + 1e-6))

    def visible_share(self, ratio: float) -> float:
        """The fraction of an image that evaluation uses, if this is the image's height / width."""
        change = 1.0 if self.squash else ratio * self.width / self.height
        return self.crop**2 * min(change, 1 / change)

    def describe(self) -> str:
        colours = "grey" if self.channels == 1 else "colour"
        other = self.for_evaluation()
        text = f"{self.height}x{self.width} {colours} images"
        if other.size == self.size:
            return text
        return f"{text}, evaluated at {other.height}x{other.width}"

    def describe_pixels(self) -> str:
        """How pixels are normalised, and how photographs are resized."""
        mean, std = (", ".join(f"{x:.4g}" for x in each) for each in (self.mean, self.std))
        text = f"mean {mean}, standard deviation {std} of pixels in 0 to 1"
        other = self.for_evaluation()
        if other.resize is None:
            return text
        what = "both sides" if other.squash else "shorter side"
        how = f"{what} resized to {other.resize} ({other.interpolation})"
        return f"{text}; evaluation: {how}, centre cropped"

    @property
    def size(self) -> tuple[int, int]:
        return self.height, self.width

    @property
    def crop(self) -> float:
        """The fraction of an image's shorter side that evaluation uses."""
        if self.small:
            return 1.0
        return min(self.size) / self.resize if self.resize else EVAL_CROP

    @property
    def small(self) -> bool:
        return max(self.height, self.width) <= SMALL


def sides(size: int | list[int]) -> tuple[int, int]:
    """The height and width that --image_size or --eval_size gives."""
    height, width = (size, size) if isinstance(size, int) else size
    return height, width
