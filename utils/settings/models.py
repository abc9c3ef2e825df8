"""Settings of the model, its input and the weights that it starts from."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from utils.config import Arguments, Bound, Fixed, Fraction, Number, PositiveFloat, ProbabilityBelow1
from utils.settings.shared import SharedSettings, Size

_CHANNELS = Bound("1 or 3", (1, 3).__contains__)
_PER_CHANNEL = Bound("one value, or one for each channel", len)
Interpolation = Literal["bilinear", "bicubic"]
Mean = Annotated[list[Number], _PER_CHANNEL]
Std = Annotated[list[PositiveFloat], _PER_CHANNEL]
InitMatch = Literal["name", "order"]


@dataclass(kw_only=True)
class InputSettings:
    """The input of the model."""

    eval_size: Size = None
    """--image_size of evaluation; a larger size than in training is often more accurate (default:
    as in training)."""
    eval_crop: Fraction | None = None
    """Fraction of a photograph's shorter side that evaluation uses (default: that of the pretrained
    weights, else 0.875); images up to 96 pixels are used whole."""
    interpolation: Interpolation | None = None
    """Interpolation of photographs (default: that of the pretrained weights, else bilinear)."""
    squash: bool | None = None
    """In evaluation, resize a photograph to the shape of the input, which changes its aspect ratio
    (default: as for the pretrained weights, else false)."""
    channels: Annotated[int, _CHANNELS] | None = None
    """Input channels, 1 for grey or 3 for colour (default: those of the pretrained weights, else of
    the data)."""
    mean: Mean | None = None
    """Mean per channel to subtract from pixels in 0 to 1 (default: that of the pretrained weights,
    else 0.5)."""
    std: Std | None = None
    """Standard deviation per channel to divide by (default: that of the pretrained weights, else
    0.5)."""


@dataclass(kw_only=True)
class ModelSettings(InputSettings, SharedSettings):
    """What `utils.models` reads."""

    pretrained: bool = False
    """Start from the published weights of the model; their head is kept if it has all classes of
    the data."""
    model_args: Arguments = field(default_factory=dict)
    """Keyword arguments of the model, such as '{dropout: 0.2}'."""
    init_from: str | None = None
    """Start from other weights: a run (its best checkpoint), a checkpoint, a file (safetensors, or
    a state dict that torch.save wrote), or hf://OWNER/NAME on the Hugging Face Hub. Rows of the
    head are kept for classes of the same name, other tensors if their shape fits. Model and input
    are those of the weights unless they are given."""
    init_match: InitMatch = "name"
    """How the tensors of --init_from are assigned to those of the model. order is for a file with
    other names but the same shapes in the same order."""
    grad_checkpointing: bool = False
    """Compute the activations inside blocks again in the backward pass instead of keeping them.
    This saves memory, is slower, and gives the same results."""
    stem: Fixed[Literal["auto", "small", "standard"]] = "auto"
    """First layers of a torchvision model: standard keeps them; small replaces them with a 3x3
    convolution of stride 1, which is slower but more accurate on small images and does not fit
    torchvision's weights; auto is small for inputs up to 96 pixels without --pretrained, else
    standard."""
    sync_batchnorm: bool = False
    """Compute batch statistics over all processes, which helps if each process has few samples;
    slower."""
    drop_path: ProbabilityBelow1 | None = None
    """Probability of dropping the residual branch of the last block, per sample (stochastic depth);
    lower in earlier blocks (default: that of the model)."""
