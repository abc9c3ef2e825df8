"""Numbers gone bad: which update, rank and samples, and no checkpoint of what they leave behind."""

import json

import numpy as np
import torch
from torch import nn

from utils.data.order import Plan, permutation
from utils.data.splits import Split
from utils.ranks.ranks import Ranks
from utils.runs.log import RunLog

_FIX = "lower --lr, lengthen --warmup_steps or set --clip_norm"
_SHOWN = 8  # samples in the message; the log has all


def report_bad_loss(ranks: Ranks, log: RunLog, plan: Plan, train: Split, bad: tuple[int, int] | None) -> None:
    """Raise ValueError on all ranks that names the first batch whose loss is no number; collective.

    `bad` is the first such of this rank since the ranks met: its update, counted from 0, and its microbatch.
    """
    step, microbatch = min(tuple(json.loads(text)) for text in ranks.gather_text(json.dumps(bad)) if text != "null")
    sizes = plan.microbatch_sizes(plan.at(step)[1])
    start = sum(sizes[:microbatch])
    samples = train.rows[samples_of(plan, step)[start : start + sizes[microbatch]]].tolist()
    rank = microbatch % ranks.topology.world_size
    log.write("bad_loss", step=step + 1, rank=rank, samples=samples)
    shown = ", ".join(map(str, samples[:_SHOWN]))
    more = f" and {len(samples) - _SHOWN} more, see {log.path}" if len(samples) > _SHOWN else ""
    raise ValueError(
        f"the training loss became no number at update {step + 1} on rank {rank}, samples {shown}{more}; {_FIX}"
    )


def samples_of(plan: Plan, step: int) -> np.ndarray:
    """Positions in the training split of the samples of an update, counted from 0, in the order of its microbatches."""
    epoch, position = plan.at(step)
    return permutation(plan.samples, plan.seed, epoch)[position : position + plan.update_size(position)]


def check_weights(module: nn.Module, plan: Plan, train: Split, step: int) -> None:
    """Raise ValueError when a weight is no number after `step` updates, the losses so far having been fine."""
    tensors = [tensor for tensor in module.state_dict().values() if tensor.is_floating_point()]
    if not torch.stack([tensor.isfinite().all() for tensor in tensors]).all():
        samples = train.rows[samples_of(plan, step - 1)].tolist()
        shown = ", ".join(map(str, samples[:_SHOWN]))
        raise ValueError(
            f"update {step}, of {len(samples)} samples {shown}..., made weights that are no numbers, though its loss "
            f"was one; {_FIX}"
        )
