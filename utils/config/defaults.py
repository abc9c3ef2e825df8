"""Settings that follow from the data unless they are given. They are the same on any number of processes."""

from dataclasses import replace
from typing import Any, NamedTuple

from utils.config.batch import LARGEST_BATCH, resolve_batch
from utils.config.bounds import Chosen, marked
from utils.config.settings import TrainConfig
from utils.errors import UserError

NAMES = marked(TrainConfig, Chosen)
"""The settings that `choose_sizes` and `choose_images` fill."""

_SMALLEST_BATCH = 8  # smaller ones give poor batch statistics
_UPDATES_PER_EPOCH = 8
_RECORDS = 4  # train records of a short run


class Rates(NamedTuple):
    """The defaults of an optimizer.

    The learning rates of a new and of a pretrained model are those for 128 samples per update. For n samples, they are
    multiplied by (n / 128) ** power, but not increased.
    """

    new: float
    pretrained: float
    power: float
    weight_decay: float


# SGD's rule is that of Goyal et al., 2017, whose 0.1 for 256 samples is 0.05 for 128. The square root for Adam is that
# of Malladi et al., 2022. An optimizer without values of its own has those of adamw; muon's updates have the same size.
# The optimizers listed after adamw have a weight decay of 0, as in PyTorch. It is not decoupled (except in adafactor),
# so it would be divided by the size of the gradients. Their learning rates are PyTorch's, except that adamax and nadam
# have that of adam, and rmsprop has a lower one, because --momentum makes its steps up to 10 times as large.
RATES = {
    "sgd": Rates(new=0.05, pretrained=0.01, power=1.0, weight_decay=5e-4),
    "asgd": Rates(new=0.05, pretrained=0.01, power=1.0, weight_decay=5e-4),
    "adamw": Rates(new=1e-3, pretrained=1e-4, power=0.5, weight_decay=0.05),
    **dict.fromkeys(("adam", "adamax", "nadam", "radam"), Rates(1e-3, 1e-4, 0.5, 0.0)),
    "rmsprop": Rates(new=3e-4, pretrained=3e-5, power=0.5, weight_decay=0.0),
    "adagrad": Rates(new=1e-2, pretrained=1e-3, power=0.5, weight_decay=0.0),
    "adadelta": Rates(new=1.0, pretrained=0.1, power=0.5, weight_decay=0.0),
    "adafactor": Rates(new=1e-2, pretrained=1e-3, power=0.5, weight_decay=0.0),
}


def choose_sizes(config: TrainConfig, samples: int, processes: int) -> tuple[TrainConfig, list[str]]:
    """Fill the batch size, learning rate, weight decay and log interval for this number of training samples.

    Returns the settings, and lines with the chosen values and their reasons. `processes` matters only with
    --batch_size, the batch size per process. Raises ValueError if they do not divide the batch.
    """
    chosen: dict[str, Any] = {}
    sizes: list[str] = []
    rates: list[str] = []
    batch = LARGEST_BATCH
    if config.global_batch_size or config.batch_size:
        batch = resolve_batch(config, processes)[2]
        if not config.global_batch_size:
            sizes.append(f"global batch {batch} (--batch_size is per process: it changes with their number)")
    else:
        while batch > _SMALLEST_BATCH and samples <= batch * (_UPDATES_PER_EPOCH - 1):
            batch //= 2
        parts = processes * (config.grad_accum or 1)
        if config.microbatches:
            resolve_batch(replace(config, global_batch_size=batch), processes)
        elif batch % parts:
            raise UserError(
                f"the default global batch for {samples} training images is {batch}, which {processes} processes x "
                f"{config.grad_accum or 1} accumulation steps do not divide",
                f"set --global_batch_size to a multiple of {parts}, or use fewer processes",
            )
        chosen["global_batch_size"] = batch
    rest = samples % batch
    if config.drop_last is None:  # a small last batch gives poor batch statistics
        is_chosen_small = "global_batch_size" in chosen and batch < LARGEST_BATCH
        chosen["drop_last"] = is_chosen_small and samples > batch and 0 < rest < batch // 2
    drop_last = config.drop_last or chosen.get("drop_last", False)
    per_epoch = samples // batch + (rest > 0 and not drop_last)
    if "global_batch_size" in chosen:
        times = f"{per_epoch} update{'s' * (per_epoch != 1)} per epoch"
        sizes.append(f"global batch {batch} ({samples} training images: {times})")
    if chosen.get("drop_last"):
        sizes.append(f"drop_last (the last batch would have {rest})")
    if config.log_every is None:
        updates = config.max_steps or config.epochs * per_epoch
        chosen["log_every"] = max(1, min(50, updates // _RECORDS))
        sizes.append(f"log every {chosen['log_every']} update{'s' * (chosen['log_every'] != 1)}")
    own = RATES.get(config.optimizer, RATES["adamw"])
    if config.lr is None:
        base, start = (own.pretrained, "pretrained") if config.pretrained or config.init_from else (own.new, "new")
        chosen["lr"] = base * min(1.0, batch / LARGEST_BATCH) ** own.power
        rates.append(f"lr {chosen['lr']:.3g} ({config.optimizer}, {start} model: {base:g} for batch 128)")
    if config.weight_decay is None:
        chosen["weight_decay"] = own.weight_decay
        rates.append(f"weight decay {own.weight_decay:g}")
    return replace(config, **chosen), [", ".join(part) for part in (sizes, rates) if part]


def choose_images(config: TrainConfig, small: bool, small_input: bool) -> tuple[TrainConfig, list[str]]:
    """Fill the model and --flip, for small images or photographs, and for a small or large model input.

    Returns the settings, and lines with the chosen values and their reason.
    """
    chosen: dict[str, Any] = {}
    if config.model is None:
        chosen["model"] = "mnist_cnn" if small and small_input and not config.pretrained else "resnet18"
    if config.flip is None:
        chosen["flip"] = not small
    texts = [f"model {value}" if name == "model" else "flip" if value else "no flip" for name, value in chosen.items()]
    reason = "images up to 96 pixels" if small else "photographs"
    return replace(config, **chosen), [f"{', '.join(texts)} ({reason})"] if chosen else []
