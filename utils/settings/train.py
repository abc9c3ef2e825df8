"""The settings of train.py.

A setting is one field with its help text below it, in the file of the package that reads it. Its
type says what values it takes and, if it is special, how it is saved and resumed
(`config/bounds.py`). Its name is in `GROUPS`, whose order is that of config.yaml and of --help,
which shows the first group last.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from utils.config import (
    Chosen,
    Fixed,
    Machine,
    OneStart,
    dump_yaml,
    exclude,
    find_marked,
    read_file,
    require,
)
from utils.errors import UserError
from utils.settings.data import AugmentationSettings, DataSettings
from utils.settings.models import InputSettings, ModelSettings
from utils.settings.ranks import LAUNCH_GROUP, LaunchConfig, RankSettings
from utils.settings.runs import RunSettings
from utils.settings.shared import BACKBONE
from utils.settings.tasks import TaskSettings
from utils.settings.training import TrainingSettings

GROUPS = {
    **LAUNCH_GROUP,
    "most used": [
        "data", "model", "pretrained", "image_size", "epochs", "global_batch_size", "lr",
        "run_name", "resume", "seed",
    ],
    "data": [
        "data_subset", "train_split", "eval_split", "eval_fraction", "fold", "group_by",
        "image_column", "label_column", "image_bits", "max_train_samples",
        "max_eval_samples", "bad_images", "check_images", "shrink", "data_dir", "cache_dir",
        "num_workers", "data_on_device",
    ],
    "model input": [
        "eval_size", "eval_crop", "interpolation", "squash", "channels", "mean", "std",
    ],
    "augmentation of training images": [
        "crop_padding", "flip", "min_scale", "auto_augment", "auto_augment_args",
        "color_jitter", "random_erasing", "cutout", "mixup", "cutmix", "mix_prob",
        "mix_off_epoch",
    ],
    "model": [
        "model_args", "init_from", "init_match", "grad_checkpointing", "stem",
    ],
    "length and batch size": [
        "max_steps", "max_seconds", "stop_after", "early_stopping", "batch_size",
        "grad_accum", "microbatches", "shares", "drop_last",
    ],
    "optimizer, schedule and regularisation": [
        "optimizer", "weight_decay", "lr_schedule", "optimizer_args", "momentum",
        "fit_head", "layer_decay", "head_scale", "keep_batch_stats", "freeze",
        "feature_views", "drop_path", "lr_schedule_args", "warmup_steps", "cooldown_steps",
        "clip_norm", "clip_value", "ema_decay",
    ],
    "samples, targets and loss": [
        "sampler", "repeats", "class_weights", "task", "loss", "loss_args",
        "label_smoothing", "pos_weight", "threshold",
    ],
    "precision, speed and randomness": [
        "mixed_precision", "tf32", "channels_last", "comm_hook", "sync_batchnorm",
        "find_unused_parameters", "deterministic",
    ],
    "runs and checkpoints": [
        "output_dir", "save_every", "save_seconds", "keep",
    ],
    "evaluation and log": [
        "eval_every", "log_every", "report_to", "eval_batch_size", "metrics", "best_metric",
        "report", "dry_run", "profile",
    ],
}  # fmt: skip
"""The groups of --help."""

NAMES = [name for names in GROUPS.values() for name in names]
"""All settings, in the order of config.yaml."""

FORMAT = 5
"""The format of config.yaml and state.json. A new field that files may lack does not change it."""

OLDER_FORMAT = 4
"""The format of Lockstep 0.2. Its checkpoints can be used, but not resumed."""


@dataclass(kw_only=True)
class ExtraSettings:
    """What train.py asks of extras/."""

    report: bool = True
    """Write report.html to the run folder at the end: a page of curves, metrics, confusions,
    calibration and errors, with images of the data."""
    dry_run: OneStart[bool] = False
    """Compute one update and one evaluation batch, print their time and memory, and save
    nothing."""


@dataclass(kw_only=True)
class TrainConfig(
    ExtraSettings,
    TrainingSettings,
    RunSettings,
    TaskSettings,
    ModelSettings,
    DataSettings,
    RankSettings,
):
    """Train an image classifier; the same run on one process or on many. Example: train.py --data
    photos --model resnet50 --pretrained --epochs 10 --run_name first"""

    groups = GROUPS
    file_format = FORMAT
    first_word = "data"

    def __post_init__(self):
        super().__post_init__()
        exclude(self, "eval_split", "eval_fraction", "fold", "group_by")
        exclude(self, "fold", "eval_fraction")
        exclude(self, "pretrained", "init_from")
        exclude(self, "sync_batchnorm", "grad_checkpointing")
        # These change the bits of the microbatches.
        exclude(self, "microbatches", "batch_size", "grad_accum", "sync_batchnorm", "comm_hook")
        self.epochs = self.epochs or (40 if BACKBONE in self.freeze else 20)
        default = "adamw" if self.fine_tunes else "sgd"
        self.optimizer = (self.optimizer or default).lower()  # upper and lower case are the same
        named = self.resume != "auto" or self.run_name is not None
        require(named, "--resume auto needs --run_name", "give the name of the run to resume")

    @classmethod
    def merge(cls, file: dict, flags: dict) -> dict:
        """--init_from also replaces the published weights that a recipe asks for."""
        replaces = bool(flags.get("init_from"))
        return {n: value for n, value in file.items() if n != "pretrained" or not replaces} | flags

    @property
    def fine_tunes(self) -> bool:
        """Whether more than the head of a model with given weights is trained."""
        return bool(self.pretrained or self.init_from) and BACKBONE not in self.freeze

    @property
    def fits_head(self) -> bool:
        """Whether a new head, if there is one, is fitted before all layers are trained."""
        return self.fit_head and self.fine_tunes


FIXED = sorted(find_marked(TrainConfig, Fixed), key=NAMES.index)
"""Settings of a resumed run that must equal those of its checkpoint."""

CHOSEN = find_marked(TrainConfig, Chosen)
"""Settings that follow from the data if they have their defaults. In a resumed run, they then have
the values of the checkpoint."""

OF_INPUT = "model", "pretrained", "image_size", *(each.name for each in fields(InputSettings))
"""Settings that the model's input depends on."""

OF_AUGMENTATION = tuple(each.name for each in fields(AugmentationSettings))
"""Settings that random views of an image depend on."""

OF_ONE_START = *(each.name for each in fields(LaunchConfig)), *find_marked(TrainConfig, OneStart)
"""Settings that belong to one start and are not saved with the run."""

OF_THIS_MACHINE = OF_ONE_START + find_marked(TrainConfig, Machine)
"""Settings that affect this machine: they come from flags and defaults only, because a checkpoint
may come from someone else."""


def to_yaml(config: TrainConfig) -> str:
    """The settings as a YAML file that --config reads."""
    values = asdict(config)
    return dump_yaml({"format": FORMAT} | {name: values[name] for name in NAMES})


def read_config(path: Path, older: Sequence[int] = ()) -> TrainConfig:
    """The settings that a run has written, also in `older` formats. Raises UserError if they are
    not valid.
    """
    values = {"fit_head": False} | read_file(path, TrainConfig, older)  # 0.2 did not fit heads
    try:
        return TrainConfig(**values)
    except UserError as error:
        raise UserError(f"{path}: {error.problem}", error.fix) from None
