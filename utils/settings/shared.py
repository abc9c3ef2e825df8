"""Settings that several packages read."""

from dataclasses import dataclass
from typing import Annotated, Any

from utils.config import Bound, Chosen, Fixed, NotEmpty, PositiveInt, at_least, at_most

FROM_DATA: Any = None
"""The default of settings that follow from the data (training/defaults.py)."""

BACKBONE = "backbone"
"""The pattern of --freeze that stands for all parameters but those of the head."""

Pixels = Annotated[PositiveInt, at_most(2**16 - 1)]
_TWO_SIDES = Bound(
    "one number, or height and width, such as 160 224", lambda sides: len(sides) == 2
)
Size = Pixels | Annotated[list[Pixels], _TWO_SIDES] | None


@dataclass(kw_only=True)
class SharedSettings:
    """Settings that several packages read."""

    data: NotEmpty = "digits"
    """Data set."""
    model: Chosen[Fixed[str]] = FROM_DATA
    """Model (default: mnist_cnn for images up to 96 pixels without --pretrained, else resnet18)."""
    image_size: Size = None
    """Side of the square model input in pixels, or '[HEIGHT, WIDTH]' (default: that of the
    pretrained weights, else that of the images if it is at most 96 pixels, else 224)."""
    seed: Annotated[int, at_least(-(2**63) + 1), at_most(2**63 - 1)] = 0
    """Seed of the initial weights, sample order, augmentation, dropout and hold-out."""
    task: Chosen[Fixed[str]] = "auto"
    """Task."""
    channels_last: bool = True
    """Store images and kernels in memory with the channels last, usually the fastest layout for
    convolutions."""
