"""How often each sample is drawn (--sampler), and how much each class counts in the loss (--class_weights)."""

import numpy as np

from utils.config.settings import TrainConfig
from utils.config.yaml_text import read_yaml
from utils.console import join_names
from utils.data.order import Plan
from utils.data.splits import Split
from utils.errors import UserError, one_line
from utils.files import expand


def draw_weights(config: TrainConfig, train: Split) -> np.ndarray | None:
    """The weight of each training sample, float64 [N]; None to draw each once. Raises ValueError for several labels."""
    if config.sampler == "shuffle":
        return None
    if train.labels.ndim != 1:
        raise UserError("--sampler balanced needs one class per image", "leave it out")
    return 1 / np.bincount(train.labels)[train.labels]


def make_plan(config: TrainConfig, train: Split, global_batch_size: int, microbatches: int) -> Plan:
    """The order of the run's training samples. Raises ValueError if it does not fit the batch."""
    if global_batch_size % config.repeats:
        problem = f"--repeats {config.repeats} does not divide the global batch of {global_batch_size}"
        raise UserError(problem, f"set --global_batch_size to a multiple of {config.repeats}")
    if config.mixes and global_batch_size // 2 < microbatches:
        problem = f"a global batch of {global_batch_size} has fewer pairs than its {microbatches} microbatches"
        fix = f"--mixup and --cutmix need a --global_batch_size of at least {2 * microbatches}, or fewer microbatches"
        raise UserError(problem, fix)
    return Plan(
        samples=len(train),
        global_batch_size=global_batch_size,
        microbatches=microbatches,
        seed=config.seed,
        drop_last=config.drop_last,
        repeats=config.repeats,
        in_pairs=config.mixes,
        weights=draw_weights(config, train),
    )


def class_weights(config: TrainConfig, train: Split, names: list[str]) -> list[float] | None:
    """The weights of the classes in the loss, whose mean over the training samples is 1; None without --class_weights.

    With `balanced`, a class without training samples has the weight 1. Raises ValueError if the file does not fit.
    """
    if config.class_weights is None:
        return None
    if train.labels.ndim != 1:
        raise UserError("--class_weights needs one class per image", "leave it out")
    counts = np.bincount(train.labels, minlength=len(names))  # unreadable samples included, as before a resume
    if config.class_weights == "balanced":
        weights = np.divide(1, counts, where=counts > 0, out=np.zeros(len(counts)))
    else:
        weights = np.array(_read_weights(config.class_weights, names))
    weights *= counts.sum() / (weights @ counts)
    return np.where(weights > 0, weights, 1).tolist()


def _read_weights(file: str, names: list[str]) -> list[float]:
    flag = f"--class_weights {file}"
    try:
        values = read_yaml(expand(file), most_bytes=2**23)
    except (OSError, ValueError) as error:
        raise UserError(f"--class_weights: {one_line(error)}") from error
    given = {str(name): value for name, value in values.items()} if isinstance(values, dict) else {}
    if set(given) != set(names):
        missing, unknown = [n for n in names if n not in given], [n for n in given if n not in names]
        problem = f"no weight for {join_names(missing, 3)}" if missing else f"no class {join_names(unknown, 3)}"
        raise UserError(f"{flag}: {problem}", f"give a weight to each of the classes {join_names(names, 5)}")
    for name in names:
        if type(given[name]) not in (int, float) or not 0 < given[name] < np.inf:
            raise UserError(f"{flag}: the weight of {name} must be a number above 0, got {given[name]}")
    return [float(given[name]) for name in names]
