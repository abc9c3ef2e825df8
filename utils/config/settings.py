"""The settings of train.py, and those that all scripts have."""

import re
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from utils.config.bounds import check_microbatches, check_ranges, check_run_name, check_sizes, check_steps, require
from utils.config.yaml_text import dump_yaml

FROM_DATA: Any = None  # the default of settings that defaults.py fills when the data is known
Arguments = dict[str, bool | int | float | str | list | dict | None]  # keyword arguments, in YAML
Size = int | list[int] | None  # of images: the side of a square, or height and width


@dataclass(kw_only=True)
class LaunchConfig:
    """The device of a run's processes, and how they connect."""

    cpu: bool = False
    """Run on the CPU even if there are GPUs."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """Communication backend of the process group; auto is nccl on GPUs and gloo on CPUs."""
    init_method: str = "env://"
    """Where the processes connect: env:// uses the launcher's MASTER_ADDR and MASTER_PORT, tcp://HOST:PORT is a port on
    the machine of rank 0, file:///PATH is a file on a disk that all machines share."""
    interface: str | None = None
    """Network interface between the machines, such as eth0 (default: the one that reaches rank 0's machine)."""
    threads: int | None = None
    """CPU threads per process (default: an equal share of the cores)."""
    timeout: float = 600.0
    """Seconds that a rank waits for another before the run fails; a download on the main process may take longer."""
    traceback: bool = False
    """Print the Python traceback of an error as well."""


@dataclass(kw_only=True)
class TrainConfig(LaunchConfig):
    """Train an image classifier; the same run on one process or on many."""

    data: str = "digits"
    """Data set."""
    data_subset: str | None = None
    """Configuration of a Hub data set that has several, or the character set of torchvision/EMNIST."""
    train_split: str | None = None
    """Split to train on (default: train, or the only one)."""
    eval_split: str | None = None
    """Split to evaluate on (default: validation, else test, else a hold-out of the training split)."""
    eval_fraction: float | None = None
    """Evaluate on a hold-out of this fraction of the training split, stratified by class, instead of on a split."""
    image_column: str | None = None
    """Column with the images (default: found by its type, or named path in a CSV file)."""
    label_column: str | None = None
    """Column with the labels (default: found by its type, or named label in a CSV file)."""
    max_train_samples: int | None = None
    """Train on a random subset of this many samples, for debugging."""
    max_eval_samples: int | None = None
    """Evaluate on a random subset of this many samples, for debugging."""
    bad_images: Literal["refuse", "skip"] = "refuse"
    """What to do about unreadable images: refuse lists them and ends the run, skip continues without them."""
    check_images: Literal["quick", "full"] = "quick"
    """How to check images before training: quick reads both ends of each image, full decodes it."""
    data_dir: str | None = None
    """Folder of torchvision data sets, where missing ones are downloaded (default: CACHE_DIR/torchvision)."""
    cache_dir: str = "~/.cache/lockstep"
    """Folder for decoded small images and the results of image checks."""
    num_workers: int | None = None
    """Loader processes per rank that decode photographs (default: the threads per process, at most 8, or
    up to 16 if there are that many physical cores)."""
    data_on_device: Literal["auto", "yes", "no"] = "auto"
    """Keep decoded small images in the memory of the device, and draw batches there; auto does so on a GPU if they take
    at most a quarter of its free memory. The images are the same either way."""

    image_size: Size = None
    """Side of the square model input in pixels, or '[HEIGHT, WIDTH]' (default: that of the pretrained weights, else
    that of the images if it is at most 96 pixels, else 224)."""
    eval_size: Size = None
    """The same for evaluation; a larger size than in training is often more accurate (default: as in training)."""
    channels: int | None = None
    """Input channels, 1 for grey or 3 for colour (default: those of the pretrained weights, else of the data)."""
    mean: list[float] | None = None
    """Mean per channel to subtract from pixels in 0 to 1 (default: that of the pretrained weights, else 0.5)."""
    std: list[float] | None = None
    """Standard deviation per channel to divide by (default: that of the pretrained weights, else 0.5)."""
    crop_padding: int = 0
    """Shift training images at random by up to this many pixels, and fill the border with black."""
    flip: bool | Literal["alternate"] = FROM_DATA
    """Mirror training images left to right: true mirrors a random half, alternate each image in every other epoch
    (default: true for photographs)."""
    min_scale: float | None = None
    """Smallest area of a random training crop, as a fraction of the image; with 1, images are not cropped at random,
    and photographs are cropped to their centre as in evaluation (default: 1 for images up to 96 pixels, else 0.08)."""
    auto_augment: str | None = None
    """Change colours and shapes of training images by a policy."""
    auto_augment_args: Arguments = field(default_factory=dict)
    """Keyword arguments of the policy, such as '{magnitude: 7}'."""
    color_jitter: float = 0.0
    """Multiply brightness, contrast and saturation of training images by random factors within this number of 1."""
    random_erasing: float = 0.0
    """Probability of filling a random box, 2 to 33 percent of a training image, with the mean colour."""
    cutout: int = 0
    """Side in pixels of a square to fill with the mean colour, at a random place of each training image."""
    mixup: float = 0.0
    """Average the images of each pair of neighbouring training samples, and their targets, with a weight drawn from
    Beta(A, A), where A is this number, usually 0.1 to 1; 0 turns it off."""
    cutmix: float = 0.0
    """Swap a random box between the images of each pair, and mix their targets in proportion to its area. This is drawn
    from Beta(A, A), where A is this number, usually 1; 0 turns it off. With --mixup, each pair gets one of the two."""
    mix_prob: float = 1.0
    """Fraction of the pairs that --mixup and --cutmix mix."""
    mix_off_epoch: int | None = None
    """First epoch, counted from 0, in which nothing is mixed (default: none)."""

    eval_crop: float | None = None
    """Fraction of a photograph's shorter side that evaluation uses (default: that of the pretrained weights, else
    0.875); images up to 96 pixels are used whole."""

    model: str = FROM_DATA
    """Model (default: mnist_cnn for images up to 96 pixels without --pretrained, else resnet18)."""
    model_args: Arguments = field(default_factory=dict)
    """Keyword arguments of the model, such as '{dropout: 0.2}'."""
    pretrained: bool = False
    """Start from the published weights of the model; their head is kept if it has all classes of the data."""
    init_from: str | None = None
    """Start from other weights: a run (its best checkpoint), a checkpoint, a safetensors file, or hf://OWNER/NAME on
    the Hugging Face Hub. Rows of the head are kept for classes of the same name, other tensors if their shape fits.
    Model, input size, mean and std are those of the weights unless they are given."""
    freeze: list[str] = field(default_factory=list)
    """Names or patterns of layers or parameters that are not trained, such as conv1 'layer[12]'; backbone is everything
    except the head. Batch normalisation without trained parameters keeps its statistics."""
    drop_path: float | None = None
    """Probability of dropping the residual branch of the last block, per sample (stochastic depth); lower in earlier
    blocks (default: that of the model)."""
    grad_checkpointing: bool = False
    """Compute the activations inside blocks again in the backward pass instead of keeping them. This saves memory, is
    slower, and gives the same results."""
    stem: Literal["auto", "small", "standard"] = "auto"
    """First layers of a torchvision model: standard keeps them; small replaces them with a 3x3 convolution of stride
    1, which is slower but more accurate on small images and does not fit torchvision's weights; auto is small for
    inputs up to 96 pixels without --pretrained, else standard."""

    epochs: int = 20
    """Passes over the training data."""
    max_steps: int | None = None
    """Updates of the whole run; overrides --epochs."""
    max_seconds: float | None = None
    """End the run after this many seconds of training, added up over all resumes; evaluations and saves do not count.
    The run then evaluates and saves. A schedule that depends on the number of updates does not reach its end."""
    early_stopping: int | None = None
    """End the run after this many evaluations in a row without a new best value of the metric of --best."""
    global_batch_size: int | None = None
    """Samples per update over all processes and accumulation steps (default: 128, or less for up to 896 samples)."""
    batch_size: int | None = None
    """Samples per process and accumulation step; give this or --global_batch_size."""
    grad_accum: int | None = None
    """Accumulation steps: forward and backward passes per update (default: 1, or as the batch sizes imply)."""
    microbatches: int | None = None
    """Cut each global batch into this many parts, a power of two, and add up their gradients in one fixed order. The
    weights are then the same, bit for bit, on any number of processes up to this number. This is slower, and on CPUs
    each process then has one thread by default."""
    drop_last: bool = FROM_DATA
    """Leave out the last samples of an epoch if they do not fill a global batch (default: true if a global batch
    below 128 was chosen and they would fill less than half of it)."""
    sampler: str = "shuffle"
    """How the samples of an epoch are drawn: shuffle draws each one once; balanced draws with replacement, all classes
    equally often; weights:COLUMN draws with replacement in proportion to the numbers in a column of a table or CSV
    file. An epoch always has as many draws as samples."""
    repeats: int = 1
    """Copies of each sample in an update, each augmented differently (repeated augmentation); an epoch is still as many
    draws as samples."""
    optimizer: str = "sgd"
    """Optimizer."""
    optimizer_args: Arguments = field(default_factory=dict)
    """Keyword arguments of the optimizer, such as '{betas: [0.9, 0.95]}'."""
    lr: float = FROM_DATA
    """Peak learning rate (default: depends on optimizer, start and batch; 0.05 for sgd and 128 samples)."""
    lr_per: int | None = None
    """Global batch for which --lr is given: the learning rate is --lr times the global batch / this number."""
    layer_decay: float | None = None
    """For fine-tuning: each layer has this factor, usually 0.65 to 0.9, times the learning rate of the next layer
    (default: all layers have the same learning rate)."""
    momentum: float = 0.9
    """Momentum of sgd, rmsprop and muon."""
    weight_decay: float = FROM_DATA
    """Weight decay of matrices and kernels; biases, normalisation layers, position embeddings and class tokens have
    none (default: 5e-4 for sgd and asgd, 0.05 for adamw and muon, else 0)."""
    lr_schedule: str = "onecycle"
    """Learning rate schedule."""
    lr_schedule_args: Arguments = field(default_factory=dict)
    """Keyword arguments of the schedule, such as '{end: 0.01}'."""
    warmup_steps: int | float | None = None
    """Updates over which the learning rate rises to --lr, or, if below 1, the fraction of the run's updates (default:
    30 percent of the run for onecycle, else 0)."""
    cooldown_steps: int | float = 0
    """Updates at the end of the run over which the learning rate falls linearly to 0, or, if below 1, the fraction of
    the run's updates; the schedule ends before them."""
    clip_norm: float | None = None
    """Largest norm of the gradient over all parameters; a larger gradient is scaled down to it."""
    clip_value: float | None = None
    """Largest absolute value of each element of the gradient; it is limited before --clip_norm."""
    task: str = "auto"
    """Task."""
    loss: str = "cross_entropy"
    """Loss."""
    loss_args: Arguments = field(default_factory=dict)
    """Keyword arguments of the loss, such as '{gamma: 1.5}'."""
    label_smoothing: float = 0.0
    """Fraction of the training target to spread evenly over all classes; in multilabel and binary, over positive and
    negative."""
    pos_weight: float | list[float] | Literal["balanced"] | None = None
    """Weight of positive targets in the training loss of multilabel and binary: a number, a list with one number for
    each class, or balanced (negatives / positives of the training split)."""
    threshold: float = 0.5
    """Probability above which multilabel and binary predict a class."""
    class_weights: str | None = None
    """Weights of the classes in the training loss: balanced is inversely proportional to the number of samples of each
    class; a YAML or JSON file maps each class name to a weight. The mean over the training samples is scaled to 1."""
    ema_decay: float | None = None
    """Keep an exponential moving average of the weights with this decay, such as 0.999, and evaluate it beside the
    weights; the average then decides which checkpoint is the best, and eval.py evaluates it (default: none)."""
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
    seed: int = 0
    """Seed of the initial weights, sample order, augmentation, dropout and hold-out."""
    deterministic: bool = False
    """Use deterministic GPU kernels; slower. An operation without such a kernel is an error."""

    output_dir: str = "runs"
    """Folder that contains the run folders."""
    run_name: str | None = None
    """Name of the run folder (default: DATA-MODEL-TIME)."""
    resume: str | None = None
    """auto resumes the run --run_name from its newest valid checkpoint, or starts it if there is none. The path of a
    checkpoint or run resumes from it in a new run folder, or in the same one if --run_name names it."""
    save_every: int | None = None
    """Updates between checkpoints (default: one epoch, unless --save_seconds is given); the last update and a new
    best are always saved."""
    save_seconds: float | None = None
    """Seconds between checkpoints, checked about once a second; with --save_every, whichever is due first."""
    if_save_fails: Literal["stop", "continue"] = "stop"
    """If a checkpoint or the log cannot be written: stop, or continue with a warning and try again at the next save."""
    keep: int = 2
    """Number of newest checkpoints to keep, besides the best one."""
    eval_every: int | None = None
    """Updates between evaluations (default: one epoch); the last update is always evaluated."""
    log_every: int = FROM_DATA
    """Updates between training records in the log (default: 50, or a quarter of the run's updates if that is less)."""
    report_to: str | None = None
    """Trackers, separated by commas, that also get the records of the log."""
    eval_batch_size: int = 256
    """Samples per process in an evaluation batch; the batches are the same on any topology."""
    metrics: bool = False
    """Compute macro F1, precision, recall and per-class accuracy in each evaluation (eval.py always does)."""
    best: str | None = None
    """Metric of the evaluation that decides which checkpoint is the best, such as loss (default: mAP for multilabel,
    else accuracy); of equal values, the earliest is the best."""
    report: bool = True
    """Write report.html to the run folder at the end: a page of curves, metrics, confusions, calibration and errors,
    with images of the data."""
    dry_run: bool = False
    """Compute one update and one evaluation batch, print their time and memory and the size of the model, and save
    nothing."""
    profile: bool = False
    """Profile ten early updates, and evaluations and saves between them: write a trace to the run folder and print the
    slowest operations."""

    def __post_init__(self):
        check_ranges(self)
        check_run_name(self.run_name)
        require(self.channels in (None, 1, 3), f"--channels must be 1 or 3, got {self.channels}")
        exclusive = self.eval_fraction is not None and self.eval_split is not None
        require(not exclusive, "--eval_split and --eval_fraction exclude each other", "use only one")
        check_sizes(self)
        require(self.mean != [], "--mean has no values", "give one value, or one for each channel")
        require(self.std != [], "--std has no values", "give one value, or one for each channel")
        require(self.data != "", "--data is empty", "name a data set, such as digits")
        for flag in ("model_args", "optimizer_args", "lr_schedule_args", "loss_args", "auto_augment_args"):
            names = all(isinstance(name, str) for name in getattr(self, flag))
            require(names, f"--{flag} must map names to values", "write '{NAME: VALUE}'")
        is_known = self.sampler in ("shuffle", "balanced") or re.fullmatch("weights:.+", self.sampler)
        require(bool(is_known), f"--sampler {self.sampler}: no such sampler", "use shuffle, balanced or weights:COLUMN")
        require(self.class_weights != "", "--class_weights is empty", "use balanced or give a file")
        require(not (self.pretrained and self.init_from), "--pretrained and --init_from exclude each other", "use one")
        together = self.sync_batchnorm and self.grad_checkpointing
        require(not together, "--grad_checkpointing cannot be used with --sync_batchnorm", "use only one")
        self.optimizer = self.optimizer.lower()  # upper and lower case are the same
        require(self.lr_per is None or self.lr is not None, "--lr_per needs --lr", "give the learning rate too")
        for flag in ("warmup_steps", "cooldown_steps"):
            check_steps(flag, getattr(self, flag))
        if self.microbatches is not None:
            check_microbatches(self)
        if self.resume == "auto":
            require(self.run_name is not None, "--resume auto needs --run_name", "give the name of the run to resume")

    @property
    def peak_lr(self) -> float:
        """--lr, for the global batch of the run if --lr_per is set."""
        return self.lr * self.global_batch_size / self.lr_per if self.lr_per and self.global_batch_size else self.lr

    @property
    def mixes(self) -> bool:
        """Whether training images are mixed."""
        return self.mixup > 0 or self.cutmix > 0


def to_yaml(config: TrainConfig) -> str:
    """The settings as a YAML file that --config reads."""
    return dump_yaml({"format": 1} | asdict(config))
