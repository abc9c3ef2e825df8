"""The settings of all scripts other than train.py."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from utils.config import (
    Bound,
    Fraction,
    FractionBelow1,
    NonNegativeFloat,
    NonNegativeInt,
    NotEmpty,
    PositiveInt,
    Settings,
    at_least,
    at_most,
    exclude,
    require,
)
from utils.settings.data import BadImages, CheckImages
from utils.settings.models import InitMatch, Interpolation, Mean, Std
from utils.settings.ranks import LAUNCH_GROUP, LaunchConfig, Precision, Seconds
from utils.settings.runs import RunName
from utils.settings.shared import Size

_DIFFERENT = Bound("different seeds", lambda seeds: seeds and len(seeds) == len(set(seeds)))
# a larger number was probably meant as one seed
Seeds = Annotated[int, at_least(1), at_most(1000)] | Annotated[list[NonNegativeInt], _DIFFERENT]

LOADING_GROUP = {"loading": ["num_workers", "data_dir", "cache_dir"]}
CHECKPOINT_GROUP = {"checkpoint": ["ckpt", "weights"]}
INFERENCE_GROUP = {
    "inference": ["tta", "eval_batch_size", "mixed_precision", "threshold", "overwrite"]
}


@dataclass(kw_only=True)
class LoadingConfig(LaunchConfig):
    """What scripts that load data have in common."""

    num_workers: NonNegativeInt | None = None
    """Loader processes per rank that decode photographs (default: as in train.py)."""
    data_dir: str | None = None
    """Folder of torchvision data sets, where missing ones are downloaded (default: as in
    train.py)."""
    cache_dir: str | None = None
    """Folder for decoded small images and the results of image checks (default: as in train.py)."""


@dataclass(kw_only=True)
class CheckpointConfig(LaunchConfig):
    """What scripts that load a checkpoint have in common."""

    groups = LAUNCH_GROUP | CHECKPOINT_GROUP

    ckpt: str
    """Run folder (its best checkpoint, else its latest) or checkpoint folder."""
    weights: Literal["raw", "ema"] | None = None
    """Weights to use: raw, or ema for their average (default: ema if the run had --ema_decay)."""


@dataclass(kw_only=True)
class InferenceConfig(CheckpointConfig):
    """What eval.py and predict.py have in common."""

    groups = LAUNCH_GROUP | CHECKPOINT_GROUP | INFERENCE_GROUP

    tta: Literal["flip", "shift", "flip,shift"] | None = None
    """Average the logits of several views of each image (test-time augmentation). The views of flip
    are the image and its mirror image, those of shift are the image and two copies shifted by one
    pixel, and flip,shift has the views of shift and their mirror images."""
    eval_batch_size: PositiveInt | None = None
    """Samples per process and batch (default: as in the run)."""
    mixed_precision: Precision | None = None
    """Precision of the model; auto is bf16 if all devices support it natively (default: as in the
    run)."""
    threshold: FractionBelow1 | None = None
    """Probability above which multilabel and binary predict a class (default: as in the run)."""
    overwrite: bool = False
    """Let outputs replace files that Lockstep has not written."""


@dataclass(kw_only=True)
class EvalConfig(LoadingConfig, InferenceConfig):
    """Evaluate a checkpoint or published weights exactly: each sample once, on any number of
    processes.
    """

    groups = LAUNCH_GROUP | CHECKPOINT_GROUP | INFERENCE_GROUP | LOADING_GROUP

    ckpt: str = ""
    """Run folder (its best checkpoint, else its latest) or checkpoint folder to evaluate."""
    weights: str | None = None  # type: ignore[assignment]  # of a checkpoint or a file
    """Weights to use: raw, or ema for their average (default: ema if the run had --ema_decay). With
    --model: a file (safetensors, or a state dict that torch.save wrote), or hf://OWNER/NAME on the
    Hugging Face Hub."""
    model: str | None = None
    """Model to evaluate instead of a checkpoint: a torchvision model or timm/NAME. Needs --data,
    and --pretrained or --weights. The classes of the data must be classes of ImageNet, or as many
    as the file has outputs."""
    pretrained: bool = False
    """Evaluate the published weights of --model."""
    init_match: InitMatch = "name"
    """How the tensors in the file of --weights are assigned to those of the model. order is for a
    file with other names but the same shapes in the same order."""
    mean: Mean | None = None
    """Mean per channel of the input of --model (default: that of its published weights, else
    0.5)."""
    std: Std | None = None
    """Standard deviation per channel of the input of --model (default: as for --mean)."""
    interpolation: Interpolation | None = None
    """Interpolation of photographs for --model (default: as for its published weights, else
    bilinear)."""
    split: str | None = None
    """Split to evaluate (default: as in the run; for other data, validation, else test, else the
    training split)."""
    data: NotEmpty | None = None
    """Other data to evaluate on, named as in train.py (default: the data of the run)."""
    data_subset: str | None = None
    """Configuration of a Hub data set that has several (default: as in the run)."""
    image_column: str | None = None
    """Column with the images (default: as in the run)."""
    label_column: str | None = None
    """Column with the labels (default: as in the run)."""
    max_eval_samples: PositiveInt | None = None
    """Evaluate on a random subset of this many samples."""
    bad_images: BadImages | None = None
    """What to do about unreadable images: error lists them and exits, skip evaluates the others
    (default: as in the run)."""
    check_images: CheckImages | None = None
    """How to check images: quick reads both ends of each image, full decodes it (default: as in the
    run)."""
    eval_size: Size = None
    """Side of the square model input in pixels, or '[HEIGHT, WIDTH]' (default: as in the run)."""
    eval_crop: Fraction | None = None
    """Fraction of a photograph's shorter side to use (default: as in the run)."""
    throughput: bool = False
    """Also measure the images per second of the model alone, without reading data."""
    json: str | None = None
    """File to write the results to, as JSON."""
    predictions: str | None = None
    """File to write the prediction for each sample to: FILE.csv, FILE.json or FILE.parquet."""
    report: bool | None = None
    """Write report.html to the run folder of --ckpt (default: as in the run)."""

    def __post_init__(self):
        super().__post_init__()
        is_part = self.weights in (None, "raw", "ema")
        if self.model is None:
            require(not self.pretrained, "--pretrained needs --model", "name the model")
            problem = f"--weights {self.weights} needs --model"
            why = "the file does not name the model of its weights"
            require(is_part, f"{problem}: {why}", "add --model NAME")
            published = "--model NAME with --pretrained or --weights FILE"
            fix = f"give a run folder or a checkpoint, or {published}"
            require(self.ckpt != "", "--ckpt is missing", fix)
            exclude(self, "ckpt", "init_match", "mean", "std", "interpolation")
            return
        exclude(self, "model", "ckpt")
        exclude(self, "pretrained", "weights", "init_match")
        fix = "add --pretrained, or --weights FILE"
        problem = "--model needs weights: otherwise they are random"
        require(self.pretrained or not is_part, problem, fix)
        require(self.data is not None, "--model needs --data", "name the data to evaluate on")


@dataclass(kw_only=True)
class PredictConfig(InferenceConfig):
    """Predict the classes of images with a checkpoint: files, folders with their sub-folders, glob
    patterns.
    """

    paths: list[str] = field(default_factory=list)
    """Image files, folders and glob patterns."""
    out: str | None = None
    """File to write the prediction for each image to: FILE.csv, FILE.json or FILE.parquet."""
    html: str | None = None
    """File to write a page with the images and their predictions to."""
    top: PositiveInt = 5
    """Number of most likely classes to list for each image."""
    num_workers: NonNegativeInt | None = None
    """Loader processes per rank that decode images (default: as in train.py)."""

    def __post_init__(self):
        super().__post_init__()
        require(self.paths, "PATH is missing", "name images, folders or glob patterns")


@dataclass(kw_only=True)
class ExportConfig(CheckpointConfig):
    """Export a checkpoint as a folder that loads without Lockstep: weights, config.json and a model
    card.
    """

    to: Literal["torch", "onnx", "timm"]
    """Format of the model: timm is a folder for timm.create_model, torch is a program of
    torch.export, and onnx is a file for ONNX Runtime. torch and onnx take uint8 images and return
    probabilities."""
    out: str
    """Folder to write; it must not exist."""


@dataclass(kw_only=True)
class ReplayConfig(LoadingConfig):
    """Recompute one update of a run in one process, and show the samples of one of its
    microbatches; or verify updates, or compare two runs, on any number of processes.
    """

    groups = LAUNCH_GROUP | LOADING_GROUP

    run: str
    """Run folder."""
    update: PositiveInt | None = None
    """Update to show, counted from 1 as in the log."""
    microbatch: NonNegativeInt | None = None
    """Microbatch to show, counted from 0 (default: the first one with a NaN or infinite loss, else
    0)."""
    pdb: bool = False
    """Stop in the debugger before the forward pass."""
    verify: str | None = None
    """Compute updates again, and compare their digests with those in the log, and the weights with
    the checkpoints on the way: all, random:20, or numbers such as 40,41. Only runs with
    --microbatches have digests."""
    json: str | None = None
    """File to write the result of --verify to, as JSON."""
    overwrite: bool = False
    """Let --json replace a file that Lockstep has not written."""
    against: str | None = None
    """Another run folder: find the first update in which the two runs differ."""


@dataclass(kw_only=True)
class DoctorConfig(LaunchConfig):
    """Check whether this machine, and the processes launched on it and on other machines, are ready
    to train.
    """

    groups = {  # noqa: RUF012  --timeout has another default, so it is a flag of the script
        title: [name for name in names if name != "timeout"]
        for title, names in LAUNCH_GROUP.items()
    }

    output_dir: str = "runs"
    """Folder that contains the run folders; it must be writable, and the same on all machines."""
    json: str | None = None
    """File to write the findings to, as JSON."""
    overwrite: bool = False
    """Let --json replace a file that Lockstep has not written."""
    slow: NonNegativeFloat = 0.02
    """Bandwidth in GB/s below which a connection between two processes is reported as too slow."""
    timeout: Seconds = 60.0
    """Seconds that a rank waits for another before the check ends."""


@dataclass(kw_only=True)
class SweepConfig(Settings):
    """Train a run for each combination of settings and each seed, and compare the combinations.
    Flags after -- are those of train.py. Example: python sweep.py --name lr --seeds 3 --grid
    lr=0.05,0.1 -- --data photos --epochs 10"""

    name: RunName
    """Name of the sweep: its runs are in OUTPUT_DIR/NAME. If it exists, the missing runs are
    trained."""
    seeds: Seeds | None = None
    """Seeds of each combination: 3 for 0 to 2, or a list such as 3,7,11 (default: --seed of
    train.py)."""
    grid: list[str] = field(default_factory=list)
    """Settings of train.py and their values, such as lr=0.05,0.1 mixup=0,0.2; each combination is
    trained."""
    trials: str | None = None
    """CSV file with the combinations, instead of --grid: the columns are settings; for an empty
    cell, the flag or default of train.py is used."""
    launch: str | None = None
    """Command that starts train.py, such as 'accelerate launch --config_file
    accelerate_configs/2gpu.yaml' (default: plain python)."""
    dry_run: bool = False
    """Print the runs, and estimate their time from a dry run of the first; train nothing."""

    def __post_init__(self):
        super().__post_init__()
        both = "--grid and --trials cannot be used together"
        require(not (self.grid and self.trials), both, "use only one")
