"""Settings that follow from the data, and lines about settings that do not suit the data."""

from dataclasses import dataclass, replace

from utils.runs import DEFAULT_BATCH, resolve_batch
from utils.settings.shared import BACKBONE
from utils.settings.train import CHOSEN, GROUPS, TrainConfig
from utils.settings.training import TrainingSettings
from utils.training.rates import RATES

_SMALLEST_BATCH = 8  # smaller ones give poor batch statistics
_UPDATES_PER_EPOCH = 8
_RECORDS = 4  # train records of a short run
# settings of random augmentation, except --flip
_RANDOM = ("crop_padding", "min_scale", "auto_augment", "color_jitter", "random_erasing", "cutout")


def choose_sizes(
    config: TrainConfig, samples: int, processes: int
) -> tuple[TrainConfig, list[str]]:
    """Fill the batch size, drop_last, log interval, learning rate and weight decay for this number
    of training samples.

    Returns the settings, and lines with the chosen values and their reasons. `processes` matters
    only with --batch_size, the batch size per process. Raises ValueError if the batch is not
    divisible.
    """
    batch = DEFAULT_BATCH
    while batch > _SMALLEST_BATCH and samples <= batch * (_UPDATES_PER_EPOCH - 1):
        batch //= 2
    batch = resolve_batch(config, processes, batch)[2]
    is_default = not (config.global_batch_size or config.batch_size)
    rest = samples % batch
    drop_last = config.drop_last
    chosen: dict = {}
    if drop_last is None:  # a small last batch gives poor batch statistics
        is_small = is_default and batch < min(DEFAULT_BATCH, samples)
        drop_last = is_small and 0 < rest < batch // 2
        chosen["drop_last"] = drop_last
    per_epoch = samples // batch + (rest > 0 and not drop_last)
    lines = []
    if is_default:
        chosen["global_batch_size"] = batch
        lines.append(f"global batch {batch} ({samples} training images)")
    elif not config.global_batch_size:
        why = "--batch_size is per process: it changes with the number of processes"
        lines.append(f"global batch {batch} ({why})")
    if chosen.get("drop_last"):
        lines.append(f"drop_last (the last batch would have {rest})")
    intervals, more = _choose_intervals(config, per_epoch)
    rates, reasons = _choose_rates(config, batch)
    texts = [", ".join(part) for part in (lines + more, reasons) if part]
    return replace(config, **chosen, **intervals, **rates), texts


def _choose_intervals(config: TrainingSettings, per_epoch: int) -> tuple[dict, list[str]]:
    """The intervals of logs, evaluations and saves that are not given, and lines about them."""
    chosen: dict = {}
    lines = []
    if config.log_every is None:
        updates = config.max_steps or config.epochs * per_epoch
        chosen["log_every"] = max(1, min(50, updates // _RECORDS))
        lines.append(f"log_every {chosen['log_every']}")
    # an epoch of a new head takes milliseconds
    if BACKBONE in config.freeze and config.feature_views != 0:
        if not config.eval_every:
            chosen["eval_every"] = 4 * max(1, per_epoch)
            lines.append("evaluation after every fourth epoch")
        if not (config.save_every or config.save_seconds):
            chosen["save_seconds"] = 10.0
            lines.append("checkpoints 10 s apart")
    return chosen, lines


def _choose_rates(config: TrainConfig, batch: int) -> tuple[dict, list[str]]:
    """The learning rate and weight decay that are not given, and their reasons."""
    chosen = {}
    lines = []
    own = RATES.get(config.optimizer, RATES["adamw"])
    if config.lr is None:
        base = own.pretrained if config.fine_tunes else own.new
        start = "pretrained" if config.fine_tunes else "new"
        if BACKBONE in config.freeze:
            start = "new head of a"
        lr = base * min(1.0, batch / DEFAULT_BATCH) ** own.power
        chosen["lr"] = lr
        lines.append(f"lr {lr:.3g} ({config.optimizer}, {start} model: {base:g} for batch 128)")
    if config.weight_decay is None:
        chosen["weight_decay"] = own.weight_decay
        lines.append(f"weight decay {own.weight_decay:g}")
    # Only for adamw: with fixed batch statistics, sgd diverged at usual learning rates.
    gently = config.fine_tunes and config.optimizer == "adamw"
    if config.head_scale is None and gently and not config.layer_decay:
        chosen["head_scale"] = own.new / own.pretrained
        lines.append(f"{chosen['head_scale']:g} times this lr for the head")
    if config.keep_batch_stats is None and gently and not config.sync_batchnorm:
        chosen["keep_batch_stats"] = True
        lines.append("batch statistics of the pretrained weights")
    return chosen, lines


def choose_images(
    config: TrainConfig, small: bool, small_input: bool, is_new: bool = True
) -> tuple[TrainConfig, list[str]]:
    """Fill the model and --flip, for small images or photographs, and for a small or large model
    input.

    Returns the settings, and lines with the chosen values and their reason.
    """
    chosen: dict = {}
    texts = []
    if config.model is None:
        is_tiny = small and small_input and not config.pretrained
        chosen["model"] = "mnist_cnn" if is_tiny else "resnet18"
        texts.append(f"model {chosen['model']}")
    if config.flip is None:
        chosen["flip"] = not small
        texts.append("no flip" if small else "flip")
    if is_new and config.min_scale is None and config.fine_tunes and not (small or small_input):
        chosen["min_scale"] = 0.35
        texts.append(f"random crops of at least {chosen['min_scale']} of the image")
    if not chosen:
        return config, []
    reason = "images up to 96 pixels" if small else "images above 96 pixels or of several sizes"
    return replace(config, **chosen), [f"{', '.join(texts)} ({reason})"]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What decides which settings have an effect in a run."""

    processes: int
    small: bool  # training uses small images
    small_evaluation: bool  # evaluation uses small images
    by_loader: bool  # loader processes augment the images
    has_columns: bool  # the data has named columns
    has_momentum: bool = True  # the optimizer uses --momentum
    cached: bool = False  # training uses cached features


def without_effect(config: TrainConfig, facts: Facts) -> list[str]:
    """A line for each changed setting that has no effect in this run."""
    lines = []

    def ignored(reason: str, *names: str) -> None:
        for name in names:
            if getattr(config, name) != getattr(TrainConfig, name):
                lines.append(f"--{name} has no effect: {reason}")

    if not facts.has_momentum:
        ignored(f"{config.optimizer} does not use it", "momentum")
    if facts.processes == 1:
        reason = "a single process exchanges no gradients"
        ignored(reason, "comm_hook", "find_unused_parameters")
    if not config.mixes:
        ignored("neither --mixup nor --cutmix is set", "mix_prob", "mix_off_epoch")
    if facts.small and facts.small_evaluation and not facts.by_loader:
        ignored("small images are decoded once, before training", "num_workers")
    if not (facts.small or facts.small_evaluation or facts.cached):
        ignored("only small images and cached features are kept there", "data_on_device")
    if facts.small_evaluation:
        ignored("small images are used whole", "eval_crop", "shrink")
    if config.task == "classification":
        ignored("only --task multilabel and binary use it", "pos_weight", "threshold")
    if facts.cached and not config.feature_views:
        centre = "features are of the centre only; --feature_views 4 caches random views"
        ignored(centre, *_RANDOM)
    if config.sampler == "balanced" and config.pos_weight in (None, "balanced"):
        reason = "--sampler balanced draws all classes equally often"
        ignored(reason, "class_weights", "pos_weight")
    if not facts.has_columns:
        ignored(f"{config.data} has no columns", "image_column", "label_column")
    return lines


def hint_for_few(config: TrainConfig, images: int) -> list[str]:
    """A line about --pretrained, for a new model that has published weights and few images."""
    if images >= 1000 or config.freeze or config.pretrained or config.init_from:
        return []
    return [f"{images} images are few for a new model; --pretrained is usually far more accurate"]


def list_changes(config: TrainConfig, group: str, *without: str) -> list[str]:
    """The settings of a group of --help that differ from their defaults, with their values, for the
    start table; those in `without` are left out.
    """
    names = [name for name in GROUPS[group] if name not in (*CHOSEN, *without)]
    now = vars(config)
    usual = vars(TrainConfig())
    return [f"{name} {now[name]}" for name in names if now[name] != usual[name]]
