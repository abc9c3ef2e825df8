"""The settings of train.py that make up a recipe: input, augmentation, model, batch, optimizer and
loss.

A setting is one field with its help text below it; see `settings.py`, which has the others.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from utils.config.bounds import (
    Arguments,
    Bound,
    Chosen,
    Fixed,
    Fraction,
    FractionBelow1,
    NonNegativeFloat,
    NonNegativeInt,
    Number,
    OneStart,
    PositiveFloat,
    PositiveInt,
    Probability,
    ProbabilityBelow1,
    at_most,
)

FROM_DATA: Any = (
    None  # the default of settings that training/defaults.py fills when the data is known
)

BACKBONE = "backbone"
"""The pattern of --freeze that stands for all parameters but those of the head."""

Pixels = Annotated[PositiveInt, at_most(2**16 - 1)]
_TWO_SIDES = Bound(
    "one number, or height and width, such as 160 224", lambda sides: len(sides) == 2
)
Size = Pixels | Annotated[list[Pixels], _TWO_SIDES] | None
_CHANNELS = Bound("1 or 3", (1, 3).__contains__)
_PER_CHANNEL = Bound("one value, or one for each channel", len)
BatchSize = Annotated[PositiveInt, at_most(2**24)]  # a resumed run tries all smaller sizes
_WHOLE = Bound(
    "an integer, or below 1 for a fraction of the run",
    lambda steps: steps < 1 or steps.is_integer(),
)
Steps = NonNegativeInt | Annotated[NonNegativeFloat, _WHOLE]
_POWER_OF_2 = Bound("a power of two", lambda number: number.bit_count() == 1)


@dataclass
class InputSettings:
    """Model input."""

    eval_size: Size = None
    """--image_size of evaluation; a larger size than in training is often more accurate (default:
    as in training)."""
    eval_crop: Fraction | None = None
    """Fraction of a photograph's shorter side that evaluation uses (default: that of the pretrained
    weights, else 0.875); images up to 96 pixels are used whole."""
    interpolation: Literal["bilinear", "bicubic"] | None = None
    """Interpolation of photographs (default: that of the pretrained weights, else bilinear)."""
    squash: bool | None = None
    """In evaluation, resize a photograph to the shape of the input, which changes its aspect ratio
    (default: as for the pretrained weights, else false)."""
    channels: Annotated[int, _CHANNELS] | None = None
    """Input channels, 1 for grey or 3 for colour (default: those of the pretrained weights, else of
    the data)."""
    mean: Annotated[list[Number], _PER_CHANNEL] | None = None
    """Mean per channel to subtract from pixels in 0 to 1 (default: that of the pretrained weights,
    else 0.5)."""
    std: Annotated[list[PositiveFloat], _PER_CHANNEL] | None = None
    """Standard deviation per channel to divide by (default: that of the pretrained weights, else
    0.5)."""


@dataclass
class AugmentationSettings:
    """Augmentation of training images."""

    crop_padding: Annotated[NonNegativeInt, at_most(1024)] = 0
    """Shift training images at random by up to this many pixels, and fill the border with black."""
    flip: Chosen[bool | Literal["alternate"]] = FROM_DATA
    """Mirror training images left to right: true mirrors a random half, alternate each image in
    every other epoch (default: true for photographs)."""
    min_scale: Fraction | None = None
    """Smallest area of a random training crop, as a fraction of the image. With 1 there are no random
    crops, and photographs are cropped to their centre (default: 1 for images up to 96 pixels, 0.35
    to fine-tune more than the head, else 0.08)."""
    auto_augment: str | None = None
    """Change colours and shapes of training images by a policy."""
    auto_augment_args: Arguments = field(default_factory=dict)
    """Keyword arguments of the policy, such as '{magnitude: 7}'."""
    color_jitter: Annotated[NonNegativeFloat, at_most(100)] = 0.0
    """Multiply brightness, contrast and saturation of training images by random factors within this
    number of 1."""
    random_erasing: Probability = 0.0
    """Probability of filling a random box, 2 to 33 percent of a training image, with the mean
    colour."""
    cutout: Annotated[NonNegativeInt, at_most(2**16 - 1)] = 0
    """Side in pixels of a square to fill with the mean colour, at a random place of each training
    image."""
    mixup: Annotated[NonNegativeFloat, at_most(1000)] = 0.0
    """Average the images of each pair of neighbouring training samples, and their targets, with a
    weight drawn from Beta(A, A), where A is this number, usually 0.1 to 1; 0 turns it off."""
    cutmix: Annotated[NonNegativeFloat, at_most(1000)] = 0.0
    """Swap a random box between the images of each pair, and mix their targets by its share of the
    area, drawn from Beta(A, A), where A is this number, usually 1; 0 turns it off. With --mixup,
    each pair gets one of the two."""
    mix_prob: Probability = 1.0
    """Fraction of the pairs that --mixup and --cutmix mix."""
    mix_off_epoch: NonNegativeInt | None = None
    """First epoch, counted from 0, in which nothing is mixed (default: none)."""


@dataclass
class ModelSettings:
    """Model."""

    model_args: Arguments = field(default_factory=dict)
    """Keyword arguments of the model, such as '{dropout: 0.2}'."""
    init_from: str | None = None
    """Start from other weights: a run (its best checkpoint), a checkpoint, a file (safetensors, or
    a state dict that torch.save wrote), or hf://OWNER/NAME on the Hugging Face Hub. Rows of the
    head are kept for classes of the same name, other tensors if their shape fits. Model and input
    are those of the weights unless they are given."""
    init_match: Literal["name", "order"] = "name"
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


@dataclass
class BatchSettings:
    """Length and batch size."""

    max_steps: PositiveInt | None = None
    """Updates of the whole run; overrides --epochs."""
    max_seconds: PositiveFloat | None = None
    """End the run after this many seconds of training, added up over all resumes; evaluations and
    saves do not count. The run then evaluates and saves. A schedule that depends on the number of
    updates does not reach its end."""
    early_stopping: PositiveInt | None = None
    """End the run after this many evaluations in a row without a new best value of the metric of
    --best_metric."""
    batch_size: BatchSize | None = None
    """Samples per process and accumulation step; give this or --global_batch_size."""
    grad_accum: Annotated[PositiveInt, at_most(2**16)] | None = None
    """Accumulation steps: forward and backward passes per update (default: 1, or as the batch sizes
    imply)."""
    microbatches: Fixed[Annotated[PositiveInt, at_most(2**16), _POWER_OF_2] | None] = None
    """Cut each global batch into this many parts, a power of two, and add up their gradients in one
    fixed order. The weights are then the same, bit for bit, on any number of processes up to this
    number. This is slower, and on CPUs each process then has one thread by default."""
    shares: OneStart[list[PositiveInt] | None] = None
    """With --microbatches: the number of microbatches that each rank computes, such as 11,5 if rank
    0 has the faster device (default: equal numbers). The trained weights are the same, bit for
    bit."""
    drop_last: Chosen[Fixed[bool]] = FROM_DATA
    """Leave out the last samples of an epoch if they do not fill a global batch (default: true if
    the global batch is the default, below 128, and the last one less than half full)."""


@dataclass
class OptimizerSettings:
    """Optimizer, schedule and regularisation."""

    optimizer: Fixed[str] = FROM_DATA
    """Optimizer (default: adamw to fine-tune more than the head of a model, else sgd)."""
    weight_decay: Chosen[NonNegativeFloat] = FROM_DATA
    """Weight decay of matrices and kernels; biases, normalisation layers, position embeddings and
    class tokens have none (default: 5e-4 for sgd and asgd, 0.05 for adamw and muon, else 0)."""
    lr_schedule: str = "onecycle"
    """Learning rate schedule."""
    optimizer_args: Arguments = field(default_factory=dict)
    """Keyword arguments of the optimizer, such as '{betas: [0.9, 0.95]}'."""
    momentum: ProbabilityBelow1 = 0.9
    """Momentum of sgd, rmsprop and muon."""
    layer_decay: Fraction | None = None
    """For fine-tuning: each layer has this factor, usually 0.65 to 0.9, times the learning rate of
    the next layer (default: all layers have the same learning rate)."""
    head_scale: PositiveFloat | None = None
    """The learning rate of the head, as a multiple of --lr (default: 10 to fine-tune more than the
    head with adamw and without --layer_decay, else 1)."""
    keep_batch_stats: bool | None = None
    """In training, batch normalisation uses the running statistics of the pretrained weights
    without updating them (default: true to fine-tune more than the head with adamw, if
    --sync_batchnorm is off, else false)."""
    freeze: Fixed[list[str]] = field(default_factory=list)
    """Names or patterns of layers or parameters that are not trained, such as conv1 'layer[12]';
    backbone is everything except the head. Layers whose parameters are all frozen stay in
    evaluation mode. If only the last part is trained, the outputs of the frozen layers are computed
    once and cached, see --feature_views."""
    feature_views: Annotated[NonNegativeInt, at_most(1000)] | None = None
    """With --freeze: the number of random views of each training image for which features are
    cached; epochs use these views in turn. With 0, no features are cached, and each epoch computes
    the frozen layers again (default: one view, the centre of the image)."""
    drop_path: ProbabilityBelow1 | None = None
    """Probability of dropping the residual branch of the last block, per sample (stochastic depth);
    lower in earlier blocks (default: that of the model)."""
    lr_schedule_args: Arguments = field(default_factory=dict)
    """Keyword arguments of the schedule, such as '{end: 0.01}'."""
    warmup_steps: Steps | None = None
    """Updates over which the learning rate rises to --lr, or, if below 1, the fraction of the run's
    updates (default: 30 percent of the run for onecycle, else 0)."""
    cooldown_steps: Steps = 0
    """Updates at the end of the run over which the learning rate falls linearly to 0, or, if below
    1, the fraction of the run's updates; the schedule ends before them."""
    clip_norm: PositiveFloat | None = None
    """Largest norm of the gradient over all parameters; a larger gradient is scaled down to it."""
    clip_value: PositiveFloat | None = None
    """Largest absolute value of each element of the gradient; it is limited before --clip_norm."""
    ema_decay: FractionBelow1 | None = None
    """Keep an exponential moving average of the weights with this decay, such as 0.999, and
    evaluate it beside the weights; the average then decides which checkpoint is the best, and
    eval.py evaluates it (default: none)."""


@dataclass
class LossSettings:
    """Samples, targets and loss."""

    sampler: Literal["shuffle", "balanced"] = "shuffle"
    """How the samples of an epoch are drawn: shuffle draws each one once; balanced draws with
    replacement, all classes equally often. An epoch always has as many draws as samples."""
    repeats: PositiveInt = 1
    """Copies of each sample in an update, each augmented differently (repeated augmentation)."""
    class_weights: Literal["balanced"] | None = None
    """Weights of the classes in the training loss: balanced is inversely proportional to how often
    each class is drawn. The mean over the samples that are drawn is 1, so with --sampler balanced
    all weights are 1."""
    task: Chosen[Fixed[str]] = "auto"
    """Task."""
    loss: str = "cross_entropy"
    """Loss."""
    loss_args: Arguments = field(default_factory=dict)
    """Keyword arguments of the loss, such as '{gamma: 1.5}'."""
    label_smoothing: ProbabilityBelow1 = 0.0
    """Fraction of the training target to spread evenly over all classes; in multilabel and binary,
    over positive and negative."""
    pos_weight: PositiveFloat | Literal["balanced"] | list[PositiveFloat] | None = None
    """Weight of positive targets in the training loss of multilabel and binary: a number, a list
    with one number for each class, or balanced (negatives / positives of the samples that are
    drawn: 1 with --sampler balanced)."""
    threshold: FractionBelow1 = 0.5
    """Probability above which multilabel and binary predict a class."""
