"""The order of a run's training samples: which are drawn, and how updates divide them."""

import numpy as np

from utils.config.settings import TrainConfig
from utils.data.order import Plan
from utils.data.splits import Split
from utils.errors import UserError


def make_plan(config: TrainConfig, train: Split, global_batch_size: int, microbatches: int) -> Plan:
    """The order of the run's training samples.

    Raises ValueError if it does not fit the batch or the labels.
    """
    if global_batch_size % config.repeats:
        problem = (
            f"--repeats {config.repeats} does not divide the global batch of {global_batch_size}"
        )
        raise UserError(problem, f"set --global_batch_size to a multiple of {config.repeats}")
    if config.mixes and global_batch_size // 2 < microbatches:
        problem = f"a global batch of {global_batch_size} has fewer pairs than its {microbatches} microbatches"
        fix = f"--mixup and --cutmix need a --global_batch_size of at least {2 * microbatches}, or fewer microbatches"
        raise UserError(problem, fix)
    weights = None
    if config.sampler == "balanced":
        if train.labels.ndim != 1:
            raise UserError("--sampler balanced needs one class per image", "leave it out")
        weights = 1 / np.bincount(train.labels)[train.labels]
    return Plan(
        samples=len(train),
        global_batch_size=global_batch_size,
        microbatches=microbatches,
        seed=config.seed,
        drop_last=config.drop_last,
        repeats=config.repeats,
        in_pairs=config.mixes,
        shares=config.shares,
        weights=weights,
    )
