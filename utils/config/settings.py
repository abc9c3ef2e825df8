"""The settings of train.py, and those that all scripts have.

A setting is one field with its help text below it. Its type says what values it takes and, if it is special, how it is
saved and resumed (`bounds.py`); its class is its group in --help.
"""

import os
import re
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, Literal

from utils.config.bounds import (
    Arguments,
    Bound,
    Chosen,
    Fixed,
    Fraction,
    FractionBelow1,
    Input,
    Kept,
    Machine,
    NonNegativeFloat,
    NonNegativeInt,
    NotEmpty,
    Number,
    OneStart,
    PositiveFloat,
    PositiveInt,
    Probability,
    ProbabilityBelow1,
    at_least,
    at_most,
    check_fields,
    exclude,
    find_marked,
    require,
)
from utils.config.yaml_text import dump_yaml

FROM_DATA: Any = None  # the default of settings that defaults.py fills when the data is known

Pixels = Annotated[PositiveInt, at_most(2**16 - 1)]
_TWO_SIDES = Bound("one number, or height and width, such as 160 224", lambda sides: len(sides) == 2)
Size = Pixels | Annotated[list[Pixels], _TWO_SIDES] | None
Seconds = Annotated[PositiveFloat, at_most(7 * 24 * 3600)]  # gloo and the store count milliseconds
BatchSize = Annotated[PositiveInt, at_most(2**24)]  # a resumed run tries all smaller sizes
_WHOLE = Bound("an integer, or below 1 for a fraction of the run", lambda steps: steps < 1 or steps.is_integer())
Steps = NonNegativeInt | Annotated[NonNegativeFloat, _WHOLE]
_CHANNELS = Bound("1 or 3", (1, 3).__contains__)
_PER_CHANNEL = Bound("one value, or one for each channel", len)
_POWER_OF_2 = Bound("a power of two", lambda number: number.bit_count() == 1)


def _can_name_a_folder(name: str) -> bool:
    # The limit is 255 bytes; longer names are derived from it.
    return bool(re.match(r"[^./-][^/]*$", name)) and name.isprintable() and len(os.fsencode(name)) <= 200


_RUN_NAME = Bound("a plain name of at most 200 bytes, such as mnist-1", _can_name_a_folder)


_PLACE = Bound(
    "env://, tcp://HOST:PORT or file:///PATH",
    re.compile(r"env://$|tcp://([^/:]+|\[[^/\]]+\]):[1-9]\d{0,4}$|file:///+[^/]").match,
)


@dataclass(kw_only=True)
class LaunchConfig:
    """Processes and devices."""

    cpu: bool = False
    """Run on the CPU even if there are GPUs."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """Communication backend of the process group; auto is nccl on GPUs and gloo on CPUs."""
    init_method: Annotated[str, _PLACE] = "env://"
    """Where the processes connect: env:// uses the launcher's MASTER_ADDR and MASTER_PORT, tcp://HOST:PORT is a port on
    the machine of rank 0, file:///PATH is a file on a disk that all machines share."""
    interface: str | None = None
    """Network interface between the machines, such as eth0 (default: the one that reaches rank 0's machine)."""
    threads: PositiveInt | None = None
    """CPU threads per process (default: an equal share of the cores)."""
    timeout: Seconds = 600.0
    """Seconds that a rank waits for another before the run fails; a download on the main process may take longer."""
    traceback: bool = False
    """Print the Python traceback of an error as well."""

    def __post_init__(self):
        check_fields(self)


@dataclass
class BasicSettings:
    """Most used."""

    data: NotEmpty = "digits"
    """Data set."""
    model: Chosen[Fixed[Input[str]]] = FROM_DATA
    """Model (default: mnist_cnn for images up to 96 pixels without --pretrained, else resnet18)."""
    pretrained: Input[bool] = False
    """Start from the published weights of the model; their head is kept if it has all classes of the data."""
    image_size: Input[Size] = None
    """Side of the square model input in pixels, or '[HEIGHT, WIDTH]' (default: that of the pretrained weights, else
    that of the images if it is at most 96 pixels, else 224)."""
    epochs: PositiveInt = 20
    """Passes over the training data."""
    global_batch_size: Chosen[BatchSize] = FROM_DATA
    """Samples per update over all processes and accumulation steps (default: 128, or less for up to 896 samples)."""
    lr: Chosen[PositiveFloat] = FROM_DATA
    """Peak learning rate (default: depends on optimizer, start and batch; 0.05 for sgd and 128 samples)."""
    run_name: OneStart[Annotated[str, _RUN_NAME] | None] = None
    """Name of the run folder (default: DATA-MODEL-TIME)."""
    output_dir: Machine[str] = "runs"
    """Folder that contains the run folders."""
    resume: OneStart[str | None] = None
    """auto resumes the run --run_name from its newest valid checkpoint, or starts it if there is none. The path of a
    checkpoint or run resumes from it in a new run folder, or in the same one if --run_name names it. Data and settings
    that are not given are those of the checkpoint."""
    optimizer: Fixed[str] = "sgd"
    """Optimizer."""
    weight_decay: Chosen[NonNegativeFloat] = FROM_DATA
    """Weight decay of matrices and kernels; biases, normalisation layers, position embeddings and class tokens have
    none (default: 5e-4 for sgd and asgd, 0.05 for adamw and muon, else 0)."""
    lr_schedule: str = "onecycle"
    """Learning rate schedule."""
    seed: Annotated[int, at_least(-(2**63) + 1), at_most(2**63 - 1)] = 0
    """Seed of the initial weights, sample order, augmentation, dropout and hold-out."""


@dataclass
class DataSettings:
    """Data."""

    data_subset: str | None = None
    """Configuration of a Hub data set that has several."""
    train_split: str | None = None
    """Split to train on (default: train, or the only one)."""
    eval_split: str | None = None
    """Split to evaluate on (default: validation, else test, else a hold-out of the training split)."""
    eval_fraction: FractionBelow1 | None = None
    """Evaluate on a hold-out of this fraction of the training split, stratified by class, instead of on a split."""
    image_column: str | None = None
    """Column with the images (default: found by its type, or named path in a CSV file)."""
    label_column: str | None = None
    """Column with the labels (default: found by its type, or named label in a CSV file)."""
    max_train_samples: PositiveInt | None = None
    """Train on a random subset of this many samples, for debugging."""
    max_eval_samples: PositiveInt | None = None
    """Evaluate on a random subset of this many samples, for debugging."""
    bad_images: Literal["error", "skip"] = "error"
    """What to do about unreadable images: error lists them and ends the run, skip continues without them."""
    check_images: Literal["quick", "full"] = "quick"
    """How to check images before training: quick reads both ends of each image, full decodes it."""
    data_dir: Machine[str | None] = None
    """Folder of torchvision data sets, where missing ones are downloaded (default: CACHE_DIR/torchvision)."""
    cache_dir: Machine[str] = "~/.cache/lockstep"
    """Folder for decoded small images and the results of image checks."""
    num_workers: Machine[NonNegativeInt | None] = None
    """Loader processes per rank that decode photographs (default: the threads per process, at most 8, or
    up to 16 if there are that many physical cores)."""
    data_on_device: Machine[Literal["auto", "yes", "no"]] = "auto"
    """Keep decoded small images in the memory of the device, and draw batches there; auto does so on a GPU if they take
    at most a quarter of its free memory. The images are the same either way."""


@dataclass
class InputSettings:
    """Model input."""

    eval_size: Input[Size] = None
    """--image_size of evaluation; a larger size than in training is often more accurate (default: as in training)."""
    eval_crop: Input[Fraction | None] = None
    """Fraction of a photograph's shorter side that evaluation uses (default: that of the pretrained weights, else
    0.875); images up to 96 pixels are used whole."""
    channels: Input[Annotated[int, _CHANNELS] | None] = None
    """Input channels, 1 for grey or 3 for colour (default: those of the pretrained weights, else of the data)."""
    mean: Input[Annotated[list[Number], _PER_CHANNEL] | None] = None
    """Mean per channel to subtract from pixels in 0 to 1 (default: that of the pretrained weights, else 0.5)."""
    std: Input[Annotated[list[PositiveFloat], _PER_CHANNEL] | None] = None
    """Standard deviation per channel to divide by (default: that of the pretrained weights, else 0.5)."""


@dataclass
class AugmentationSettings:
    """Augmentation of training images."""

    crop_padding: Annotated[NonNegativeInt, at_most(1024)] = 0
    """Shift training images at random by up to this many pixels, and fill the border with black."""
    flip: Chosen[bool | Literal["alternate"]] = FROM_DATA
    """Mirror training images left to right: true mirrors a random half, alternate each image in every other epoch
    (default: true for photographs)."""
    min_scale: Fraction | None = None
    """Smallest area of a random training crop, as a fraction of the image; with 1, images are not cropped at random,
    and photographs are cropped to their centre as in evaluation (default: 1 for images up to 96 pixels, else 0.08)."""
    auto_augment: str | None = None
    """Change colours and shapes of training images by a policy."""
    auto_augment_args: Arguments = field(default_factory=dict)
    """Keyword arguments of the policy, such as '{magnitude: 7}'."""
    color_jitter: Annotated[NonNegativeFloat, at_most(100)] = 0.0
    """Multiply brightness, contrast and saturation of training images by random factors within this number of 1."""
    random_erasing: Probability = 0.0
    """Probability of filling a random box, 2 to 33 percent of a training image, with the mean colour."""
    cutout: Annotated[NonNegativeInt, at_most(2**16 - 1)] = 0
    """Side in pixels of a square to fill with the mean colour, at a random place of each training image."""
    mixup: Annotated[NonNegativeFloat, at_most(1000)] = 0.0
    """Average the images of each pair of neighbouring training samples, and their targets, with a weight drawn from
    Beta(A, A), where A is this number, usually 0.1 to 1; 0 turns it off."""
    cutmix: Annotated[NonNegativeFloat, at_most(1000)] = 0.0
    """Swap a random box between the images of each pair, and mix their targets in proportion to its area. This is drawn
    from Beta(A, A), where A is this number, usually 1; 0 turns it off. With --mixup, each pair gets one of the two."""
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
    """Start from other weights: a run (its best checkpoint), a checkpoint, a safetensors file, or hf://OWNER/NAME on
    the Hugging Face Hub. Rows of the head are kept for classes of the same name, other tensors if their shape fits.
    Model, input size, mean and std are those of the weights unless they are given."""
    grad_checkpointing: bool = False
    """Compute the activations inside blocks again in the backward pass instead of keeping them. This saves memory, is
    slower, and gives the same results."""
    stem: Fixed[Literal["auto", "small", "standard"]] = "auto"
    """First layers of a torchvision model: standard keeps them; small replaces them with a 3x3 convolution of stride
    1, which is slower but more accurate on small images and does not fit torchvision's weights; auto is small for
    inputs up to 96 pixels without --pretrained, else standard."""


@dataclass
class BatchSettings:
    """Length and batch size."""

    max_steps: PositiveInt | None = None
    """Updates of the whole run; overrides --epochs."""
    max_seconds: PositiveFloat | None = None
    """End the run after this many seconds of training, added up over all resumes; evaluations and saves do not count.
    The run then evaluates and saves. A schedule that depends on the number of updates does not reach its end."""
    early_stopping: PositiveInt | None = None
    """End the run after this many evaluations in a row without a new best value of the metric of --best_metric."""
    batch_size: BatchSize | None = None
    """Samples per process and accumulation step; give this or --global_batch_size."""
    grad_accum: Annotated[PositiveInt, at_most(2**16)] | None = None
    """Accumulation steps: forward and backward passes per update (default: 1, or as the batch sizes imply)."""
    microbatches: Fixed[Annotated[PositiveInt, at_most(2**16), _POWER_OF_2] | None] = None
    """Cut each global batch into this many parts, a power of two, and add up their gradients in one fixed order. The
    weights are then the same, bit for bit, on any number of processes up to this number. This is slower, and on CPUs
    each process then has one thread by default."""
    drop_last: Chosen[bool] = FROM_DATA
    """Leave out the last samples of an epoch if they do not fill a global batch (default: true if a global batch
    below 128 was chosen and they would fill less than half of it)."""


@dataclass
class OptimizerSettings:
    """Optimizer, schedule and regularisation."""

    optimizer_args: Arguments = field(default_factory=dict)
    """Keyword arguments of the optimizer, such as '{betas: [0.9, 0.95]}'."""
    momentum: ProbabilityBelow1 = 0.9
    """Momentum of sgd, rmsprop and muon."""
    layer_decay: Fraction | None = None
    """For fine-tuning: each layer has this factor, usually 0.65 to 0.9, times the learning rate of the next layer
    (default: all layers have the same learning rate)."""
    freeze: Fixed[list[str]] = field(default_factory=list)
    """Names or patterns of layers or parameters that are not trained, such as conv1 'layer[12]'; backbone is everything
    except the head. Batch normalisation without trained parameters keeps its statistics."""
    drop_path: ProbabilityBelow1 | None = None
    """Probability of dropping the residual branch of the last block, per sample (stochastic depth); lower in earlier
    blocks (default: that of the model)."""
    lr_schedule_args: Arguments = field(default_factory=dict)
    """Keyword arguments of the schedule, such as '{end: 0.01}'."""
    warmup_steps: Steps | None = None
    """Updates over which the learning rate rises to --lr, or, if below 1, the fraction of the run's updates (default:
    30 percent of the run for onecycle, else 0)."""
    cooldown_steps: Steps = 0
    """Updates at the end of the run over which the learning rate falls linearly to 0, or, if below 1, the fraction of
    the run's updates; the schedule ends before them."""
    clip_norm: PositiveFloat | None = None
    """Largest norm of the gradient over all parameters; a larger gradient is scaled down to it."""
    clip_value: PositiveFloat | None = None
    """Largest absolute value of each element of the gradient; it is limited before --clip_norm."""
    ema_decay: FractionBelow1 | None = None
    """Keep an exponential moving average of the weights with this decay, such as 0.999, and evaluate it beside the
    weights; the average then decides which checkpoint is the best, and eval.py evaluates it (default: none)."""


@dataclass
class LossSettings:
    """Samples, targets and loss."""

    sampler: Literal["shuffle", "balanced"] = "shuffle"
    """How the samples of an epoch are drawn: shuffle draws each one once; balanced draws with replacement, all classes
    equally often. An epoch always has as many draws as samples."""
    repeats: PositiveInt = 1
    """Copies of each sample in an update, each augmented differently (repeated augmentation); an epoch is still as many
    draws as samples."""
    class_weights: Literal["balanced"] | None = None
    """Weights of the classes in the training loss: balanced is inversely proportional to the number of samples of each
    class. The mean over the training samples is 1."""
    task: Kept[Fixed[str]] = "auto"
    """Task."""
    loss: str = "cross_entropy"
    """Loss."""
    loss_args: Arguments = field(default_factory=dict)
    """Keyword arguments of the loss, such as '{gamma: 1.5}'."""
    label_smoothing: ProbabilityBelow1 = 0.0
    """Fraction of the training target to spread evenly over all classes; in multilabel and binary, over positive and
    negative."""
    pos_weight: PositiveFloat | Literal["balanced"] | list[PositiveFloat] | None = None
    """Weight of positive targets in the training loss of multilabel and binary: a number, a list with one number for
    each class, or balanced (negatives / positives of the training split)."""
    threshold: FractionBelow1 = 0.5
    """Probability above which multilabel and binary predict a class."""


@dataclass
class SpeedSettings:
    """Precision, speed and randomness."""

    mixed_precision: Literal["no", "bf16", "fp16", "auto"] | None = None
    """Precision of the model: no is float32, auto is bf16 if all devices support it natively (default: as in the
    accelerate config, else auto on GPUs and no on CPUs)."""
    tf32: bool | None = None
    """Use TF32 for float32 on GPUs: matrix products and convolutions round their inputs to a 10-bit mantissa, which is
    faster (default: true, but false with --deterministic)."""
    channels_last: bool = True
    """Store images and kernels in memory with the channels last, usually the fastest layout for convolutions."""
    comm_hook: Literal["no", "fp16", "bf16"] = "no"
    """Convert gradients to this type for the exchange between processes (no: float32). fp16 and bf16 halve the traffic,
    but runs on different numbers of processes then differ by more than float32 rounding."""
    sync_batchnorm: bool = False
    """Compute batch statistics over all processes, which helps if each process has few samples; slower."""
    find_unused_parameters: bool = False
    """Allow a model that does not use all of its parameters in each forward pass; slower."""
    deterministic: bool = False
    """Use deterministic GPU kernels; slower. An operation without such a kernel is an error."""


@dataclass
class CheckpointSettings:
    """Checkpoints."""

    save_every: PositiveInt | None = None
    """Updates between checkpoints (default: one epoch, unless --save_seconds is given); the last update and a new
    best are always saved."""
    save_seconds: PositiveFloat | None = None
    """Seconds between checkpoints, checked about once a second; with --save_every, whichever is due first."""
    keep: PositiveInt = 2
    """Number of newest checkpoints to keep, besides the best one."""


@dataclass
class LogSettings:
    """Evaluation and log."""

    eval_every: PositiveInt | None = None
    """Updates between evaluations (default: one epoch); the last update is always evaluated."""
    log_every: Chosen[PositiveInt] = FROM_DATA
    """Updates between training records in the log (default: 50, or a quarter of the run's updates if that is less)."""
    report_to: Machine[str | None] = None
    """Trackers, separated by commas, that also get the records of the log."""
    eval_batch_size: PositiveInt = 256
    """Samples per process in an evaluation batch; the batches are the same on any topology."""
    metrics: bool = False
    """Compute macro F1, precision, recall and per-class accuracy in each evaluation (eval.py always does)."""
    best_metric: Kept[str | None] = None
    """Metric of the evaluation that decides which checkpoint is the best, such as loss (default: mAP for multilabel,
    else accuracy); of equal values, the earliest is the best."""
    report: bool = True
    """Write report.html to the run folder at the end: a page of curves, metrics, confusions, calibration and errors,
    with images of the data."""
    dry_run: OneStart[bool] = False
    """Compute one update and one evaluation batch, print their time and memory and the operations of the model, and
    save nothing."""
    profile: OneStart[bool] = False
    """Profile ten early updates, and evaluations and saves between them: write a trace to the run folder and print the
    slowest operations."""


@dataclass
class TrainConfig(
    LogSettings,
    CheckpointSettings,
    SpeedSettings,
    LossSettings,
    OptimizerSettings,
    BatchSettings,
    ModelSettings,
    AugmentationSettings,
    InputSettings,
    DataSettings,
    BasicSettings,
    LaunchConfig,
):
    """Train an image classifier; the same run on one process or on many."""

    def __post_init__(self):
        super().__post_init__()
        exclude(self, "eval_split", "eval_fraction")
        exclude(self, "pretrained", "init_from")
        exclude(self, "sync_batchnorm", "grad_checkpointing")
        # These change the bits of the microbatches.
        exclude(self, "microbatches", "batch_size", "grad_accum", "sync_batchnorm", "comm_hook")
        self.optimizer = self.optimizer.lower()  # upper and lower case are the same
        named = self.resume != "auto" or self.run_name is not None
        require(named, "--resume auto needs --run_name", "give the name of the run to resume")

    @property
    def mixes(self) -> bool:
        """Whether training images are mixed."""
        return self.mixup > 0 or self.cutmix > 0


FIXED = find_marked(TrainConfig, Fixed)
"""Settings of a resumed run that must equal those of its checkpoint."""

CHOSEN = find_marked(TrainConfig, Chosen)
"""Settings that defaults.py chooses from the data unless they are given."""

KEPT = CHOSEN + find_marked(TrainConfig, Kept)
"""Settings whose default is never used in a resumed run, even if it is given: they are those of the checkpoint."""

OF_INPUT = find_marked(TrainConfig, Input)
"""Settings that the model's input depends on."""

OF_ONE_START = tuple(f.name for f in fields(LaunchConfig)) + find_marked(TrainConfig, OneStart)
"""Settings that belong to one start and are not saved with the run."""

OF_THIS_MACHINE = OF_ONE_START + find_marked(TrainConfig, Machine)
"""Settings that affect this machine: they come from flags and defaults only, because a checkpoint may come from someone
else."""


def to_yaml(config: TrainConfig) -> str:
    """The settings as a YAML file that --config reads."""
    return dump_yaml({"format": 1} | asdict(config))
