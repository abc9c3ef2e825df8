"""The shape and normalisation of a model's input images, and how photographs are resized to it."""

import math
from dataclasses import dataclass, replace

SMALL = 96  # pixels; images with sides up to this are decoded once and cached


@dataclass(frozen=True)
class InputSpec:
    """The model's input: image shape in pixels, and the mean and standard deviation per channel of pixels in 0..1.

    Evaluation resizes the shorter side of a photograph to `resize` pixels, or with `squash` both sides, and crops the
    centre. If `resize` is None, the centre is 0.875 of the shorter side. Photographs are
    resized with `interpolation`, bilinear or bicubic. `evaluation` is the input in evaluation if its size differs.
    """

    height: int
    width: int
    channels: int
    mean: list[float]
    std: list[float]
    resize: int | None = None
    interpolation: str = "bilinear"
    squash: bool = False
    evaluation: "InputSpec | None" = None

    def check(self) -> None:
        """Raise ValueError for values that no run can have. `typed_json.parse` has checked their types."""
        other = self.for_evaluation()
        fits = all(0 < size < 2**16 for size in (*self.size, self.channels, 1 if self.resize is None else self.resize))
        fits = fits and self.interpolation in ("bilinear", "bicubic")
        fits = fits and len(self.mean) == len(self.std) == self.channels == other.channels and min(self.std) > 0
        if not fits or other.evaluation is not None:
            raise ValueError("'input' is missing or malformed")

    def for_evaluation(self) -> "InputSpec":
        """The input in evaluation."""
        return self.evaluation or self

    def cropped(self, share: float | None) -> "InputSpec":
        """The same input, except that evaluation uses this fraction of a photograph's shorter side.

        Unchanged if `share` is None and for small inputs. The size is rounded down, as in torchvision and timm.
        """
        if share is None or self.small:
            return self
        return replace(self, resize=math.floor(min(self.height, self.width) / share + 1e-6))

    def describe(self) -> str:
        colours, other = "grey" if self.channels == 1 else "colour", self.for_evaluation()
        evaluated = f", evaluated at {other.height}x{other.width}" if other.size != self.size else ""
        return f"{self.height}x{self.width} {colours} images{evaluated}"

    def describe_pixels(self) -> str:
        """How pixels are normalised, and how photographs are resized."""
        mean, std = (", ".join(f"{value:.4g}" for value in values) for values in (self.mean, self.std))
        text, other = f"mean {mean}, standard deviation {std} of pixels in 0 to 1", self.for_evaluation()
        if other.resize is None:
            return text
        return f"{text}; evaluation: sides resized to {other.resize} ({other.interpolation}), centre cropped"

    @property
    def size(self) -> tuple[int, int]:
        return self.height, self.width

    @property
    def small(self) -> bool:
        return max(self.height, self.width) <= SMALL


def sides(size: int | list[int]) -> tuple[int, int]:
    """The height and width that --image_size or --eval_size gives."""
    height, width = (size, size) if isinstance(size, int) else size
    return height, width
