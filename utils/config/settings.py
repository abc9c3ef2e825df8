"""The settings of train.py, and those that all scripts have.

A setting is one field with its help text below it. Its type says what values it takes and, if it is
special, how it is saved and resumed (`bounds.py`); its class is its group in --help. Those of the
recipe are in `recipe.py`.
"""

import os
import re
from dataclasses import asdict, dataclass, fields, replace
from typing import Annotated, Literal

from utils.config.bounds import (
    Bound,
    Chosen,
    Fixed,
    FractionBelow1,
    Machine,
    NonNegativeInt,
    NotEmpty,
    OneStart,
    PositiveFloat,
    PositiveInt,
    at_least,
    at_most,
    check_fields,
    exclude,
    find_marked,
    require,
)
from utils.config.recipe import (
    BACKBONE,
    FROM_DATA,
    AugmentationSettings,
    BatchSettings,
    BatchSize,
    InputSettings,
    LossSettings,
    ModelSettings,
    OptimizerSettings,
    Size,
)
from utils.config.yaml_text import dump_yaml

FORMAT = 5
"""The format of config.yaml and state.json. A new field that files may lack does not change it."""

OTHER_FORMAT = "use the version of Lockstep that wrote it"


Seconds = Annotated[PositiveFloat, at_most(7 * 24 * 3600)]  # gloo and the store count milliseconds


def _can_name_a_folder(name: str) -> bool:
    # The limit is 255 bytes; longer names are derived from it.
    return (
        bool(re.match(r"[^./-][^/]*$", name))
        and name.isprintable()
        and len(os.fsencode(name)) <= 200
    )


_RUN_NAME = Bound("a plain name of at most 200 bytes, such as mnist-1", _can_name_a_folder)


_SEVERAL = Bound("several seeds, each once", lambda seeds: 1 < len(seeds) == len(set(seeds)))
# more were probably meant for --seed
Seeds = Annotated[int, at_least(2), at_most(1000)] | Annotated[list[NonNegativeInt], _SEVERAL]


_PLACE = Bound(
    "env:// or tcp://HOST:PORT",
    re.compile(r"env://$|tcp://([^/:]+|\[[^/\]]+\]):[1-9]\d{0,4}$").match,
)


@dataclass(kw_only=True)
class LaunchConfig:
    """Processes and devices."""

    cpu: bool = False
    """Run on the CPU even if there are GPUs."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """Communication backend of the process group; auto is nccl on GPUs and gloo on CPUs."""
    init_method: Annotated[str, _PLACE] = "env://"
    """Where the processes connect: env:// uses the launcher's MASTER_ADDR and MASTER_PORT, and
    tcp://HOST:PORT a port on the machine of rank 0."""
    interface: str | None = None
    """Network interface between the machines, such as eth0 (default: the one that reaches rank 0's
    machine)."""
    threads: PositiveInt | None = None
    """CPU threads per process (default: an equal share of the cores)."""
    timeout: Seconds = 600.0
    """Seconds that a rank waits for another before the run fails; a download on the main process
    may take longer."""
    plugin: str | None = None
    """Python file to import, which adds your own models, losses, optimizers and other parts."""
    traceback: bool = False
    """Print the Python traceback of an error as well."""

    def __post_init__(self):
        check_fields(self)


@dataclass
class BasicSettings:
    """Most used."""

    data: NotEmpty = "digits"
    """Data set."""
    model: Chosen[Fixed[str]] = FROM_DATA
    """Model (default: mnist_cnn for images up to 96 pixels without --pretrained, else resnet18)."""
    pretrained: bool = False
    """Start from the published weights of the model; their head is kept if it has all classes of
    the data."""
    image_size: Size = None
    """Side of the square model input in pixels, or '[HEIGHT, WIDTH]' (default: that of the
    pretrained weights, else that of the images if it is at most 96 pixels, else 224)."""
    epochs: PositiveInt = FROM_DATA
    """Passes over the training data (default: 20, or 40 to train only the head)."""
    global_batch_size: Chosen[BatchSize] = FROM_DATA
    """Samples per update over all processes and accumulation steps (default: 128, or less for up to
    896 samples)."""
    lr: Chosen[PositiveFloat] = FROM_DATA
    """Peak learning rate (default: depends on optimizer, start and batch; 0.05 for sgd and 128
    samples)."""
    run_name: OneStart[Annotated[str, _RUN_NAME] | None] = None
    """Name of the run folder (default: DATA-MODEL-TIME)."""
    resume: OneStart[str | None] = None
    """auto resumes the run --run_name from its newest valid checkpoint, or starts it if there is
    none. The path of a checkpoint or run resumes from it in a new run folder, or in the same one if
    --run_name names it. Data and settings that are not given are those of the checkpoint."""
    seed: Annotated[int, at_least(-(2**63) + 1), at_most(2**63 - 1)] = 0
    """Seed of the initial weights, sample order, augmentation, dropout and hold-out."""


@dataclass
class DataSettings:
    """Data."""

    data_subset: str | None = None
    """Configuration of a Hub data set that has several."""
    train_split: Fixed[str | None] = None
    """Split to train on (default: train, or the only one)."""
    eval_split: Fixed[str | None] = None
    """Split to evaluate on (default: validation, else test, else a hold-out of the training
    split)."""
    eval_fraction: Fixed[FractionBelow1 | None] = None
    """Evaluate on a hold-out of this fraction of the training split, stratified by class, instead
    of on a split."""
    fold: Fixed[
        Annotated[str, Bound("K/N, such as 1/5", re.compile(r"[1-9]\d{0,3}/[1-9]\d{0,3}$").match)]
        | None
    ] = None
    """Evaluate on fold K of N of the training split, such as 1/5, stratified by class, instead of on
    a split."""
    group_by: Fixed[str | None] = None
    """Keep images of the same group together in a fold or hold-out. Their group is the value in this
    column, with folder the folder below that of their class, else what this regular expression finds
    in the names of their files."""
    image_column: str | None = None
    """Column with the images (default: found by its type, or named path in a CSV file)."""
    label_column: str | None = None
    """Column with the labels (default: found by its type, or named label in a CSV file)."""
    image_bits: Fixed[Annotated[int, at_least(8), at_most(16)]] = 16
    """Bits that grey images of 16 bits use: with 12, 4095 is white."""
    max_train_samples: PositiveInt | None = None
    """Train on a random subset of this many samples, for debugging."""
    max_eval_samples: PositiveInt | None = None
    """Evaluate on a random subset of this many samples, for debugging."""
    bad_images: Literal["error", "skip"] = "error"
    """What to do about unreadable images: error lists them and ends the run, skip continues without
    them."""
    check_images: Literal["quick", "full"] = "quick"
    """How to check images before training: quick reads both ends of each image, full decodes it."""
    shrink: Fixed[PositiveInt | None] = None
    """Shorter side in pixels to which photographs are reduced when they are first read. The reduced
    pixels are stored in --cache_dir, so that large photographs are read many times as fast from the
    second epoch on. Smaller photographs keep their size."""
    data_dir: Machine[str | None] = None
    """Folder of torchvision data sets, where missing ones are downloaded (default:
    CACHE_DIR/torchvision)."""
    cache_dir: Machine[str] = "~/.cache/lockstep"
    """Folder for decoded small images, shrunk photographs, cached features and the results of image
    checks."""
    num_workers: Machine[NonNegativeInt | None] = None
    """Loader processes per rank that decode photographs (default: the threads per process, at most
    8, or up to 16 if there are that many physical cores)."""
    data_on_device: Machine[Literal["auto", "yes", "no"]] = "auto"
    """Keep decoded small images and cached features in the memory of the device, and draw batches
    there; auto does so on a GPU if they take at most a quarter of its free memory. The images are
    the same either way."""


@dataclass
class SpeedSettings:
    """Precision, speed and randomness."""

    mixed_precision: Literal["no", "bf16", "fp16", "auto"] | None = None
    """Precision of the model: no is float32, auto is bf16 if all devices support it natively
    (default: as in the accelerate config, else auto on GPUs and no on CPUs)."""
    tf32: bool | None = None
    """Use TF32 for float32 on GPUs: matrix products and convolutions round their inputs to a 10-bit
    mantissa, which is faster (default: true, but false with --deterministic)."""
    channels_last: bool = True
    """Store images and kernels in memory with the channels last, usually the fastest layout for
    convolutions."""
    comm_hook: Literal["no", "fp16", "bf16"] = "no"
    """Convert gradients to this type for the exchange between processes (no: float32). fp16 and
    bf16 halve the traffic, but runs on different numbers of processes then differ by more than
    float32 rounding."""
    sync_batchnorm: bool = False
    """Compute batch statistics over all processes, which helps if each process has few samples;
    slower."""
    find_unused_parameters: bool = False
    """Allow a model that does not use all of its parameters in each forward pass; slower."""
    deterministic: bool = False
    """Use deterministic GPU kernels; slower. An operation without such a kernel is an error."""


@dataclass
class CheckpointSettings:
    """Runs and checkpoints."""

    output_dir: Machine[str] = "runs"
    """Folder that contains the run folders."""
    seeds: OneStart[Seeds | None] = None
    """Train one run for each seed, in turn: 5 for 0 to 4, or a list such as 3,7,11. The run folders
    are RUN_NAME-seed3 and so on."""
    save_every: PositiveInt | None = None
    """Updates between checkpoints (default: one epoch, unless --save_seconds is given); the last
    update and a new best are always saved."""
    save_seconds: PositiveFloat | None = None
    """Seconds of training between checkpoints, checked about once a second; with --save_every,
    whichever is due first."""
    keep: PositiveInt | Literal["all"] = 2
    """Number of newest checkpoints to keep, besides the best one; all keeps every checkpoint."""


@dataclass
class LogSettings:
    """Evaluation and log."""

    eval_every: PositiveInt | None = None
    """Updates between evaluations (default: one epoch); the last update is always evaluated."""
    log_every: Chosen[PositiveInt] = FROM_DATA
    """Updates between training records in the log (default: 50, or a quarter of the run's updates
    if that is less)."""
    report_to: Machine[str | None] = None
    """Trackers, separated by commas, that also get the records of the log."""
    eval_batch_size: PositiveInt = 256
    """Samples per process in an evaluation batch; the batches are the same on any topology."""
    metrics: bool = False
    """Compute macro F1, precision, recall and per-class accuracy in each evaluation (eval.py always
    does)."""
    best_metric: Chosen[str | None] = None
    """Metric of the evaluation that decides which checkpoint is the best, such as loss (default:
    mAP for multilabel, else accuracy); of equal values, the earliest is the best."""
    report: bool = True
    """Write report.html to the run folder at the end: a page of curves, metrics, confusions,
    calibration and errors, with images of the data."""
    dry_run: OneStart[bool] = False
    """Compute one update and one evaluation batch, print their time and memory, and save
    nothing."""
    profile: OneStart[bool] = False
    """Profile ten early updates, and evaluations and saves between them: write a trace to the run
    folder."""


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
    """Train an image classifier; the same run on one process or on many. Example: train.py --data
    photos --model resnet50 --pretrained --epochs 10 --run_name first"""

    def __post_init__(self):
        super().__post_init__()
        exclude(self, "eval_split", "eval_fraction", "fold", "group_by")
        exclude(self, "fold", "eval_fraction")
        exclude(self, "pretrained", "init_from")
        exclude(self, "seeds", "seed")
        exclude(self, "sync_batchnorm", "grad_checkpointing")
        # These change the bits of the microbatches.
        exclude(self, "microbatches", "batch_size", "grad_accum", "sync_batchnorm", "comm_hook")
        self.epochs = self.epochs or (40 if BACKBONE in self.freeze else 20)
        default = "adamw" if self.fine_tunes else "sgd"
        self.optimizer = (self.optimizer or default).lower()  # upper and lower case are the same
        named = self.resume != "auto" or self.run_name is not None
        require(named, "--resume auto needs --run_name", "give the name of the run to resume")
        if self.seeds:
            require(self.run_name, "--seeds needs --run_name", "give a name for all runs")
            problem = f"--seeds and --resume {self.resume} cannot be used together"
            require(self.resume in (None, "auto"), problem, "use --resume auto, or --seed")

    @property
    def runs(self) -> list["TrainConfig"]:
        """The settings of each run of this launch."""
        if self.seeds is None:
            return [self]
        seeds = range(self.seeds) if isinstance(self.seeds, int) else self.seeds
        return [
            replace(self, seeds=None, seed=seed, run_name=f"{self.run_name}-seed{seed}")
            for seed in seeds
        ]

    @property
    def fine_tunes(self) -> bool:
        """Whether more than the head of a model with given weights is trained."""
        return bool(self.pretrained or self.init_from) and BACKBONE not in self.freeze

    @property
    def mixes(self) -> bool:
        """Whether training images are mixed."""
        return self.mixup > 0 or self.cutmix > 0

    @property
    def trackers(self) -> list[str]:
        """The trackers that --report_to names."""
        return (self.report_to or "").replace(",", " ").split()


FIXED = find_marked(TrainConfig, Fixed)
"""Settings of a resumed run that must equal those of its checkpoint."""

CHOSEN = find_marked(TrainConfig, Chosen)
"""Settings that follow from the data if they have their defaults. In a resumed run, they then have
the values of the checkpoint."""

OF_INPUT = "model", "pretrained", "image_size", *(each.name for each in fields(InputSettings))
"""Settings that the model's input depends on."""

OF_ONE_START = tuple(f.name for f in fields(LaunchConfig)) + find_marked(TrainConfig, OneStart)
"""Settings that belong to one start and are not saved with the run."""

OF_THIS_MACHINE = OF_ONE_START + find_marked(TrainConfig, Machine)
"""Settings that affect this machine: they come from flags and defaults only, because a checkpoint
may come from someone else."""


def to_yaml(config: TrainConfig) -> str:
    """The settings as a YAML file that --config reads."""
    return dump_yaml({"format": FORMAT} | asdict(config))
