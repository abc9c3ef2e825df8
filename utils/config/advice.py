"""Lines about settings that have no effect or do not suit the data, and the changed settings for the start table."""

from dataclasses import fields

from utils.config.settings import KEPT, TrainConfig

_BUSY = 400_000  # pixels of the images in a pass. With fewer, launching the kernels takes longer than computing them
_LARGE = 30_000_000  # parameters of a model to which this does not apply


def advice(
    config: TrainConfig,
    small: tuple[bool, bool],
    by_loader: bool,
    has_columns: bool,
    processes: int,
    has_momentum: bool = True,
) -> list[str]:
    """A line for each changed setting that has no effect in this run or does not suit its data.

    `small`: whether training and evaluation use small images. With `by_loader`, loader processes augment them.
    `has_momentum`: whether --momentum applies to the optimizer.
    """
    alone, targets = processes == 1, config.task == "classification"
    unused = (
        ("momentum", not has_momentum, f"{config.optimizer} has no momentum"),
        ("comm_hook find_unused_parameters", alone, "a single process exchanges no gradients"),
        ("mix_prob mix_off_epoch", not config.mixes, "neither --mixup nor --cutmix is set"),
        ("num_workers", all(small) and not by_loader, "small images are decoded once, before training"),
        ("data_on_device", not any(small), "only small images are decoded before training"),
        ("eval_crop", small[1], "small images are evaluated whole"),
        ("pos_weight threshold", targets, "only --task multilabel and binary have it"),
        ("image_column label_column", not has_columns, f"{config.data} has no columns"),
    )
    lines = [
        f"--{name} has no effect: {reason}"
        for names, applies, reason in unused
        for name in names.split()
        if applies and getattr(config, name) != getattr(TrainConfig, name)
    ]
    if config.data_on_device == "yes" and small[0] and by_loader:
        lines.append("--data_on_device applies to evaluation only: loader processes augment the training images")
    if config.sync_batchnorm and processes == 1:
        lines.append("--sync_batchnorm is slower on one process; it only helps to compare with runs on several")
    return lines


def hint_for_few(config: TrainConfig, photographs: int) -> list[str]:
    """A line about --pretrained for a new model and few training photographs."""
    if config.pretrained or config.init_from or photographs >= 1000:
        return []
    return [f"{photographs} photographs are few for a new model; --pretrained is usually far more accurate"]


def hint_for_gpus(device: str, processes: int, images: int, size: tuple[int, int], parameters: int) -> list[str]:
    """A line if several GPUs compute passes of so few `images`, of [height, width], that fewer GPUs are as fast.

    Models with many `parameters` keep a GPU busy with a few images.
    """
    height, width = size
    if device != "cuda" or processes == 1 or images * height * width >= _BUSY or parameters >= _LARGE:
        return []
    fix = "raise --global_batch_size, or use fewer GPUs; they may be as fast"
    return [f"{images} images of {height}x{width} per GPU are few to keep it busy: {fix}"]


def changed(config: TrainConfig, group: type) -> list[str]:
    """The names and values of those settings of a group that do not have their defaults, for the start table."""
    usual = {**vars(TrainConfig()), **{name: getattr(config, name) for name in KEPT}}
    values = [(setting.name, getattr(config, setting.name)) for setting in fields(group)]
    return [f"{name} {value}" for name, value in values if value != usual[name]]
