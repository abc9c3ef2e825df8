"""The settings of eval.py, predict.py, export.py, replay.py and doctor.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from utils.config.bounds import check_ranges, check_sizes, require
from utils.config.settings import LaunchConfig, Size, TrainConfig


@dataclass(kw_only=True)
class EvalConfig(LaunchConfig):
    """Evaluate a checkpoint or published weights exactly: each sample once, on any number of processes."""

    ckpt: str | None = None
    """Run folder (its best checkpoint, else its latest) or checkpoint folder to evaluate."""
    model: str | None = None
    """Model to evaluate instead of a checkpoint, with --pretrained and --data: the published weights of a torchvision
    model or of timm/NAME. The classes of the data must be classes of ImageNet."""
    pretrained: bool = False
    """Evaluate the published weights of --model."""
    weights: Literal["raw", "ema"] | None = None
    """Weights to evaluate: raw, or ema for their average (default: ema if the run had --ema_decay)."""
    average: int | None = None
    """Evaluate the mean of the weights of this many checkpoints: the last ones of the run, or, if --ckpt is a
    checkpoint, those up to it."""
    split: str | None = None
    """Split to evaluate (default: as in the run; for other data, validation, else test, else the training split)."""
    data: str | None = None
    """Other data to evaluate on, named as in train.py (default: the data of the run)."""
    data_subset: str | None = None
    """Configuration of a Hub data set that has several (default: as in the run)."""
    image_column: str | None = None
    """Column with the images (default: as in the run)."""
    label_column: str | None = None
    """Column with the labels (default: as in the run)."""
    max_eval_samples: int | None = None
    """Evaluate on a random subset of this many samples."""
    eval_batch_size: int | None = None
    """Samples per process and batch (default: as in the run)."""
    mixed_precision: Literal["no", "bf16", "fp16", "auto"] | None = None
    """Precision of the model; auto is bf16 if all devices support it natively (default: as in the run)."""
    bad_images: Literal["refuse", "skip"] | None = None
    """What to do about unreadable images: refuse lists them and exits, skip evaluates the others (default: as in
    the run)."""
    check_images: Literal["quick", "full"] | None = None
    """How to check images: quick reads both ends of each image, full decodes it (default: as in the run)."""
    eval_size: Size = None
    """Side of the square model input in pixels, or '[HEIGHT, WIDTH]' (default: as in the run)."""
    eval_crop: float | None = None
    """Fraction of a photograph's shorter side to use (default: as in the run)."""
    threshold: float | None = None
    """Probability above which multilabel and binary predict a class (default: as in the run)."""
    tta: Literal["flip", "shift", "flip,shift"] | None = None
    """Average the logits of several views of each image (test-time augmentation). The views of flip are the image and
    its mirror image, those of shift are the image and two copies shifted by one pixel, and flip,shift has the views of
    shift and their mirror images."""
    throughput: bool = False
    """Measure the images per second of the model alone and of the evaluation, and count parameters and operations."""
    json: str | None = None
    """File to write the results to, as JSON."""
    predictions: str | None = None
    """File to write the prediction for each sample to: FILE.csv, FILE.json or FILE.parquet."""
    report: bool | None = None
    """Write report.html to the run folder of --ckpt (default: as in the run)."""
    num_workers: int | None = None
    """Loader processes per rank that decode photographs (default: the threads per process, at most 8, or
    up to 16 if there are that many physical cores)."""
    data_dir: str | None = None
    """Folder of torchvision data sets, where missing ones are downloaded (default: CACHE_DIR/torchvision)."""
    cache_dir: str = TrainConfig.cache_dir
    """Folder for decoded small images and the results of image checks."""

    def __post_init__(self):
        check_ranges(self)
        check_sizes(self)
        same = self.json is not None and self.json == self.predictions
        require(not same, "--json and --predictions name the same file", "give two files")
        if self.model is None:
            require(not self.pretrained, "--pretrained needs --model", "name the model")
            fix = "give a run folder or a checkpoint, or --model NAME --pretrained for published weights"
            require(self.ckpt is not None, "--ckpt is missing", fix)
            return
        require(self.ckpt is None, "--ckpt and --model exclude each other", "use only one")
        require(self.pretrained, "--model needs --pretrained: other weights are random", "add --pretrained")
        require(self.data is not None, "--model needs --data", "name the data to evaluate on")
        chosen = self.weights is not None or self.average is not None
        require(not chosen, "--weights and --average need --ckpt: --model has published weights", "leave them out")


@dataclass(kw_only=True)
class PredictConfig(LaunchConfig):
    """Predict the classes of images with a checkpoint: files, folders with their sub-folders, glob patterns."""

    ckpt: str
    """Run folder (its best checkpoint, else its latest) or checkpoint folder."""
    out: str | None = None
    """File to write the prediction for each image to: FILE.csv, FILE.json or FILE.parquet. After an interruption, the
    same command continues where it stopped."""
    html: str | None = None
    """File to write a page with the images and their predictions to."""
    top: int = 5
    """Number of most likely classes to list for each image."""
    weights: Literal["raw", "ema"] | None = None
    """Weights to use: raw, or ema for their average (default: ema if the run had --ema_decay)."""
    average: int | None = None
    """Use the mean of the weights of this many checkpoints: the last ones of the run, or, if --ckpt is a checkpoint,
    those up to it."""
    tta: Literal["flip", "shift", "flip,shift"] | None = None
    """Average the logits of several views of each image, as in eval.py."""
    eval_batch_size: int | None = None
    """Images per process and batch (default: as in the run)."""
    mixed_precision: Literal["no", "bf16", "fp16", "auto"] | None = None
    """Precision of the model; auto is bf16 if all devices support it natively (default: as in the run)."""
    threshold: float | None = None
    """Probability above which multilabel and binary predict a class (default: as in the run)."""
    num_workers: int | None = None
    """Loader processes per rank that decode images (default: the threads per process, at most 8, or
    up to 16 if there are that many physical cores)."""
    paths: Sequence[str] = ()
    """Image files, folders and glob patterns: the arguments that are not flags."""

    def __post_init__(self):
        check_ranges(self)
        require(bool(self.paths), "PATH is missing", "name images, folders or glob patterns")
        same = self.out is not None and self.out == self.html
        require(not same, "--out and --html name the same file", "give two files")


@dataclass(kw_only=True)
class ExportConfig(LaunchConfig):
    """Export a checkpoint as a folder that loads without Lockstep: weights, config.json and a model card."""

    ckpt: str
    """Run folder (its best checkpoint, else its latest) or checkpoint folder to export."""
    to: Literal["safetensors", "torch", "onnx", "timm"]
    """Form of the model: safetensors has weights for the class of torchvision or timm, timm is a folder that
    timm.create_model loads, torch is a program of torch.export, and onnx is a file for ONNX Runtime. torch and onnx
    take uint8 images and return probabilities."""
    out: str
    """Folder to write; it must not exist."""
    weights: Literal["raw", "ema"] | None = None
    """Weights to export: raw, or ema for their average (default: ema if the run had --ema_decay)."""
    push: str | None = None
    """Repository of the Hugging Face Hub to upload the folder to, such as USER/NAME; created if it does not exist."""

    def __post_init__(self):
        check_ranges(self)


@dataclass(kw_only=True)
class ReplayConfig(LaunchConfig):
    """Compute one update of a run again, in one process, and show the samples and layers of one of its microbatches."""

    run: str
    """Run folder."""
    update: int
    """Update to show, counted from 1 as in the log."""
    microbatch: int | None = None
    """Microbatch to show, counted from 0 (default: the first one with a NaN or infinite loss, else 0)."""
    pdb: bool = False
    """Stop in the debugger before the forward pass."""
    num_workers: int | None = None
    """Loader processes that decode photographs (default: as in the run)."""
    data_dir: str | None = None
    """Folder of torchvision data sets (default: as in the run)."""
    cache_dir: str | None = None
    """Folder for decoded small images and the results of image checks (default: as in the run)."""

    def __post_init__(self):
        check_ranges(self)


@dataclass(kw_only=True)
class DoctorConfig(LaunchConfig):
    """Check whether this machine, and the processes launched on it and on other machines, are ready to train."""

    output_dir: str = "runs"
    """Folder that contains the run folders; it must be writable, and the same on all machines."""
    json: str | None = None
    """File to write the findings to, as JSON."""
    slow: float = 0.02
    """Bandwidth in GB/s below which a connection between two processes is reported as too slow."""
    timeout: float = 60.0
    """Seconds that a rank waits for another before the check ends."""

    def __post_init__(self):
        check_ranges(self)
