"""The settings of a run, their bounds, and what of them has no effect."""

from dataclasses import asdict, dataclass, field
from typing import Literal

from utils.config.bounds import COUNTS, check_ranges, check_run_name, require
from utils.config.yaml_text import dump_yaml
from utils.files import expand


@dataclass(kw_only=True)
class Launch:
    """Where the processes of a run compute, and how they meet."""

    cpu: bool = False
    """Run on the CPU where there are GPUs too."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """What the processes talk over; auto is nccl on GPUs and gloo on CPUs."""
    init_method: str = "env://"
    """Where the processes meet: env:// where the launcher says (MASTER_ADDR, MASTER_PORT), tcp://HOST:PORT with the
    host of rank 0, or file:///PATH on a disk that all machines share."""
    interface: str | None = None
    """Network interface between the machines, such as eth0 (default: the one over which rank 0 is reached)."""
    threads: int | None = None
    """Processor threads per process (default: an equal share of the cores)."""
    timeout: float = 600.0
    """Seconds that a rank waits for another before the run fails; a download for all may take longer."""
    traceback: bool = False
    """Show the Python traceback of an error."""


@dataclass(kw_only=True)
class TrainConfig(Launch):
    """Train an image classifier; the same run on one process or on many."""

    data: str = "digits"
    """What to train on: digits (bundled), synthetic[/CLASSESxSIZExCOUNT], a Hub id such as ylecun/mnist,
    torchvision/NAME, an image folder, a folder of parquet or arrow files, or a save_to_disk folder."""
    data_subset: str | None = None
    """Configuration of a Hub data set that has several, or the character set of torchvision/EMNIST."""
    train_split: str | None = None
    """Split to train on (default: train, or the only one there is)."""
    eval_split: str | None = None
    """Split to evaluate on (default: validation, else test, else a hold-out of the training split)."""
    eval_fraction: float | None = None
    """Hold out this fraction of the training split, stratified by class, instead of using an evaluation split."""
    image_column: str | None = None
    """Column that holds the images (default: found by its type)."""
    label_column: str | None = None
    """Column that holds the labels (default: found by its type)."""
    max_train_samples: int | None = None
    """Train on a random subset of this many samples, to debug."""
    max_eval_samples: int | None = None
    """Evaluate on a random subset of this many samples, to debug."""
    bad_images: Literal["refuse", "skip"] = "refuse"
    """Images that cannot be read: refuse lists them and ends the run, skip goes on without them."""
    check_images: Literal["quick", "full"] = "quick"
    """How images are checked before training: quick looks at both ends of each image, full decodes each image."""
    data_dir: str | None = None
    """Folder of a torchvision data set, downloaded there if it is missing (default: CACHE_DIR/torchvision)."""
    cache_dir: str = "~/.cache/lockstep"
    """Where decoded small images and the results of checking images are kept."""
    num_workers: int | None = None
    """Loader processes per rank that decode photographs (default: the threads per process, at most 8)."""

    image_size: int | None = None
    """Side of the model's square input in pixels (default: the data's own size up to 96 pixels, else 224)."""
    channels: int | None = None
    """1 for grey, 3 for colour input (default: as the data, or as pretrained weights need)."""
    mean: list[float] | None = None
    """Per-channel mean that is subtracted, pixels counted as 0 to 1 (default: the pretrained weights' own, or 0.5)."""
    std: list[float] | None = None
    """Per-channel standard deviation to divide by (default: the pretrained weights' own, or 0.5)."""
    crop_padding: int = 0
    """Shift small training images at random by up to this many pixels."""
    flip: bool = False
    """Mirror training images left to right at random."""
    min_scale: float = 0.08
    """Crop random parts of photographs of at least this fraction of the area; 1 takes the centre as evaluation does."""

    model: str = "mnist_cnn"
    """mnist_cnn, mlp, any torchvision classification model, or timm/NAME."""
    model_args: dict[str, bool | int | float | str | list | dict | None] = field(default_factory=dict)
    """Keyword arguments for the model, such as '{dropout: 0.2}'."""
    pretrained: bool = False
    """Start from the model's published weights."""

    epochs: int = 20
    """Passes over the training data."""
    max_steps: int | None = None
    """Updates of the whole run; beats --epochs."""
    global_batch_size: int | None = None
    """Samples of one update over all processes and accumulation steps (default: 128)."""
    batch_size: int | None = None
    """Samples per process and accumulation step; give this or --global_batch_size."""
    grad_accum: int | None = None
    """Forward and backward passes of each process for one update (default: 1, or what the batch sizes imply)."""
    drop_last: bool = False
    """Leave out an epoch's last samples that do not fill a global batch."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """Stochastic gradient descent with Nesterov momentum, or AdamW."""
    lr: float = 0.05
    """Peak learning rate."""
    momentum: float = 0.9
    """Momentum of sgd."""
    weight_decay: float = 5e-4
    """Weight decay of matrices and kernels; biases and normalisation layers have none."""
    lr_schedule: Literal["constant", "linear", "cosine", "onecycle"] = "onecycle"
    """Course of the learning rate after the warm-up: constant, down to 0, or one-cycle (up, then down to ~0)."""
    warmup_steps: int | None = None
    """Updates in which the learning rate rises (default: 0; 30 percent of the run for onecycle)."""
    clip_norm: float | None = None
    """Scale gradients down to this norm."""
    loss: Literal["cross_entropy", "binary_cross_entropy"] = "cross_entropy"
    """Softmax cross-entropy, or one sigmoid per class, averaged over the classes."""
    label_smoothing: float = 0.0
    """Share of the target spread evenly over all classes, in training only."""
    mixed_precision: Literal["no", "bf16", "fp16", "auto"] | None = None
    """Arithmetic of the model: no is float32 (TF32 on GPUs), auto is bf16 where all devices have it natively (default:
    what the accelerate config says, else no)."""
    channels_last: bool = True
    """Keep images with the channels innermost, which convolutions are fastest with."""
    comm_hook: Literal["no", "fp16", "bf16"] = "no"
    """What gradients are rounded to on their way between processes: bf16 halves the traffic, and runs on one process
    and on several then differ by more than float32's rounding."""
    sync_batchnorm: bool = False
    """Batch statistics over all processes instead of each process's own; slower, for few samples per process."""
    find_unused_parameters: bool = False
    """For a model that does not use all of its parameters in each forward pass; slower."""
    static_graph: bool = False
    """The model uses the same parameters in each forward pass, unused ones too, so that none need be searched."""
    seed: int = 0
    """Seed of the initial weights, the order, the augmentation, dropout and the hold-out."""
    deterministic: bool = False
    """Use deterministic kernels on GPUs; slower, and an error where there is none."""

    output_dir: str = "runs"
    """Folder that holds the run folders."""
    run_name: str | None = None
    """Name of the run folder (default: DATA-MODEL-TIME)."""
    resume: str | None = None
    """auto (with --run_name): go on from the run's newest good checkpoint, or start if there is none; or the path of a
    checkpoint or run, to go on from it in a new run folder, or in its own if --run_name names that."""
    save_every: int | None = None
    """Updates between checkpoints (default: one epoch, unless --save_seconds is given); the last and a new best are
    always saved."""
    save_seconds: float | None = None
    """Seconds between checkpoints, looked at about once a second; with --save_every, whichever comes first."""
    if_save_fails: Literal["stop", "continue"] = "stop"
    """When a checkpoint or the log cannot be written: stop, or say so, train on and try again when the next is due."""
    keep: int = 2
    """Newest checkpoints to keep; the best one is kept besides."""
    eval_every: int | None = None
    """Updates between evaluations (default: one epoch); the last update is always evaluated."""
    log_every: int = 50
    """Updates between records of the training log."""
    eval_batch_size: int = 256
    """Samples per process in evaluation; the same on every topology, so that its numbers are too."""
    metrics: bool = False
    """Compute macro F1, precision, recall and per-class accuracy in each evaluation (eval.py always does)."""
    profile: bool = False
    """Write a trace of ten early updates, and of what is evaluated and saved between them, to the run folder, and say
    what took their time."""

    def __post_init__(self):
        check_ranges(self, at_least_one=COUNTS, at_least_zero=("crop_padding", "weight_decay", "momentum"))
        require(self.channels in (None, 1, 3), "--channels must be 1 or 3")
        require(self.lr > 0, "--lr must be above 0")
        require(self.momentum < 1, "--momentum must be below 1")
        require(self.warmup_steps is None or self.warmup_steps >= 0, "--warmup_steps must be at least 0")
        require(0 < self.min_scale <= 1, "--min_scale must be above 0 and at most 1")
        require(0 <= self.label_smoothing < 1, "--label_smoothing must be at least 0 and below 1")
        require(self.save_seconds is None or self.save_seconds > 0, "--save_seconds must be above 0")
        require(self.clip_norm is None or self.clip_norm > 0, "--clip_norm must be above 0")
        require(self.eval_fraction is None or 0 < self.eval_fraction < 1, "--eval_fraction must lie between 0 and 1")
        require(
            self.eval_fraction is None or self.eval_split is None,
            "--eval_split and --eval_fraction exclude each other; give one",
        )
        require(self.mean is None or len(self.mean) > 0, "--mean needs one value, or one for each channel")
        require(self.std is None or (self.std and min(self.std) > 0), "--std needs values above 0")
        require(self.data != "", "--data must not be empty")
        require(all(isinstance(name, str) for name in self.model_args), "--model_args must be a mapping from names")
        check_run_name(self.run_name)
        require(
            not (self.static_graph and self.find_unused_parameters),
            "--static_graph and --find_unused_parameters exclude each other: the first says which are unused for good",
        )
        if self.resume == "auto":
            require(self.run_name is not None, "--resume auto needs --run_name to know which run to go on with")


@dataclass(kw_only=True)
class EvalConfig(Launch):
    """Evaluate a checkpoint exactly: each sample once, on any number of processes."""

    ckpt: str
    """A run folder (its best checkpoint, else its latest) or a checkpoint folder."""
    split: str | None = None
    """Split to evaluate (default: what training evaluated on; of other data its validation or test split, or all)."""
    data: str | None = None
    """Other data to evaluate on, named as for train.py (default: the data of the run)."""
    data_subset: str | None = None
    """Configuration of a Hub data set that has several (default: as in the run)."""
    image_column: str | None = None
    """Column that holds the images (default: as in the run)."""
    label_column: str | None = None
    """Column that holds the labels (default: as in the run)."""
    max_eval_samples: int | None = None
    """Evaluate on a random subset of this many samples."""
    eval_batch_size: int | None = None
    """Samples per process and batch (default: as in the run)."""
    mixed_precision: Literal["no", "bf16", "fp16", "auto"] | None = None
    """Arithmetic of the model; auto is bf16 where all devices have it natively (default: as in the run)."""
    bad_images: Literal["refuse", "skip"] | None = None
    """Images that cannot be read: refuse lists them, skip evaluates the others (default: as in the run)."""
    check_images: Literal["quick", "full"] | None = None
    """How images are checked: quick looks at both ends of each, full decodes each (default: as in the run)."""
    json: str | None = None
    """Also write the numbers to this file."""
    num_workers: int | None = None
    """Loader processes per rank that decode photographs (default: the threads per process, at most 8)."""
    data_dir: str | None = None
    """Folder of a torchvision data set, downloaded there if it is missing (default: CACHE_DIR/torchvision)."""
    cache_dir: str = TrainConfig.cache_dir
    """Where decoded small images are kept."""

    def __post_init__(self):
        check_ranges(self, at_least_one=("max_eval_samples", "eval_batch_size", "threads"), at_least_zero=())


@dataclass(kw_only=True)
class DoctorConfig(Launch):
    """Say whether this machine, and the processes launched on it and others, are fit to train."""

    output_dir: str = "runs"
    """Folder that will hold the run folders; it must be writable, and the same on all machines."""
    json: str | None = None
    """Also write the findings to this file."""
    slow: float = 0.02
    """GB/s below which a connection between two processes is red."""
    timeout: float = 60.0
    """Seconds that a rank waits for another before the check is given up."""

    def __post_init__(self):
        check_ranges(self, at_least_one=("threads",), at_least_zero=("slow",))


def advice(config: TrainConfig, small_images: bool, processes: int) -> list[str]:
    """A line for each setting that was changed and does nothing in this run, or does not fit its data."""
    no_table = config.data.split("/")[0] in ("digits", "synthetic", "torchvision")
    cases = (
        ("momentum", config.optimizer == "adamw", "adamw has none"),
        ("crop_padding", not small_images, "photographs are cropped, see --min_scale"),
        ("min_scale", small_images, "small images are shifted, see --crop_padding"),
        ("comm_hook", processes == 1, "one process exchanges no gradients"),
        ("sync_batchnorm", processes == 1, "one process has all samples"),
        ("find_unused_parameters", processes == 1, "one process exchanges no gradients"),
        ("static_graph", processes == 1, "one process exchanges no gradients"),
        ("num_workers", small_images, "small images are decoded once, before training"),
        ("image_column", no_table, f"{config.data} has no columns"),
        ("label_column", no_table, f"{config.data} has no columns"),
    )
    changed = (case for case in cases if getattr(config, case[0]) != getattr(TrainConfig, case[0]))
    lines = [f"--{name} has no effect: {reason}" for name, applies, reason in changed if applies]
    if config.model == "mnist_cnn" and not small_images:
        lines.append("mnist_cnn is made for small images; for photographs try --model resnet18")
    return lines


def to_yaml(config: TrainConfig) -> str:
    """The settings as a YAML file that --config reads."""
    return dump_yaml(asdict(config))


def absolute_data(name: str) -> str:
    """What --data names, for use from any folder: a local path in full, any other name as it is."""
    is_path = name.split("/")[0] not in ("digits", "synthetic", "torchvision") and expand(name).exists()
    return str(expand(name).resolve()) if is_path else name
