"""Check that no batch normalisation computes its statistics from a single sample."""

from dataclasses import replace
from functools import partial

from torch import nn

from utils.data.order import Plan
from utils.errors import UserError


def has_batch_norm(model: nn.Module) -> bool:
    """Whether a layer of a model in training mode uses batch statistics. Frozen ones stay in evaluation mode."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
    return any(layer.training for layer in layers)


def check_batch_norm(plan: Plan, updates: int, together: int = 1) -> None:
    """Raise ValueError, with batch sizes that work, if batch statistics would be those of a single sample.

    With synchronised batch normalisation, `together` processes share their statistics.
    """
    sizes = partial(_sample_sizes, updates=updates, together=together)
    if 1 not in sizes(plan):
        return
    near = sorted(
        range(plan.microbatches * 2, 2 * plan.global_batch_size + 1, plan.microbatches),
        key=lambda size: abs(size - plan.global_batch_size),
    )
    fits = [size for size in near if size % plan.repeats == 0]
    works = [size for size in fits if 1 not in sizes(replace(plan, global_batch_size=size))][:2]
    fixes = [f"--global_batch_size {size}" for size in sorted(works)]
    if 1 not in sizes(replace(plan, drop_last=True)):
        fixes.insert(0, "--drop_last")
    raise UserError(
        f"batch normalisation needs more than one sample, but one batch has only one ({plan.samples} samples, global "
        f"batches of {plan.global_batch_size} in {plan.microbatches} microbatches)",
        f"use {' or '.join(fixes) or 'fewer processes or microbatches'}",
    )


def _sample_sizes(plan: Plan, updates: int, together: int) -> set[int]:
    """The numbers of samples in the batch statistics of a full update and of the epoch's last update."""
    last = (plan.updates_per_epoch - 1) * plan.global_batch_size
    positions = (0, last) if updates >= plan.updates_per_epoch else (0,)
    microbatches = [plan.microbatch_sizes(position) for position in positions]
    per_rank = plan.microbatches // together  # ranks compute contiguous ranges; an accumulation step shares statistics
    return {sum(sizes[step::per_rank]) for sizes in microbatches for step in range(per_rank)}
