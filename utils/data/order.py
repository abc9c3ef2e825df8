"""The order of the samples, a pure function of (seed, epoch, position), which is the same on any
number of processes.

An epoch is as many draws as there are samples: a permutation, or draws with replacement by weight.
An update takes the next `global_batch_size` draws, fewer at the epoch's end, and divides them into
microbatches, numbered by their position in the update. Each rank computes a contiguous range of
them, one in each accumulation step.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from utils.config import require
from utils.settings.data import DataSettings


def fold_in(*parts: int | str) -> int:
    """Hash the parts into 64 bits.

    Unlike a sum, it differs for seed 1, epoch 0 and seed 0, epoch 1.
    """
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def permutation(samples: int, seed: int, epoch: int) -> np.ndarray:
    """The epoch's random order of all sample indices, int64 [samples].

    It is a stable sort of random keys. The keys are the raw output of Philox, which numpy
    guarantees not to change.
    """
    return np.argsort(_random(samples, seed, epoch), kind="stable")


def _random(samples: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.Philox(key=fold_in(seed, "order", epoch)).random_raw(samples)


def weighted_draws(weights: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """The epoch's draws with replacement, int64 [N], each sample in proportion to its weight,
    float64 [N].
    """
    ends = np.cumsum(weights)
    uniform = (_random(len(weights), seed, epoch) >> 11) / 2**53
    # A product that rounds up to the whole sum would select a sample after the last one.
    below = np.minimum(uniform * ends[-1], np.nextafter(ends[-1], 0))
    return np.searchsorted(ends, below, side="right")


class Microbatch(NamedTuple):
    """The samples of one forward pass on one rank. `update` counts from 0 over the run, `number`
    from 0 in each update. A rank with fewer microbatches than others gets an empty one in their
    place, with the number -1.

    `indices` is int64 [n], n >= 0. `occurrences`, int64 [n], counts how often a sample was drawn
    before in its epoch; None stands for zeros. In an evaluation, `update` is 0 and `number` counts
    the blocks of the split.
    """

    update: int
    epoch: int
    number: int
    indices: np.ndarray
    occurrences: np.ndarray | None = None


@dataclass(frozen=True)
class Plan:
    """How an epoch divides into updates, and an update into microbatches.

    An update has `repeats` copies of each of its samples. With `weights`, float64 [samples],
    samples are drawn with replacement. With `in_pairs`, microbatches consist of pairs of
    neighbours, to be mixed. `shares` has the number of microbatches of each rank in this start.
    With None, the numbers differ by at most one.
    """

    samples: int
    global_batch_size: int
    microbatches: int
    seed: int
    drop_last: bool = False
    repeats: int = 1
    in_pairs: bool = False
    shares: Sequence[int] | None = field(default=None, compare=False)
    weights: np.ndarray | None = field(default=None, compare=False, repr=False)

    @property
    def updates_per_epoch(self) -> int:
        full, rest = divmod(self.samples, self.global_batch_size)
        if rest and not self.drop_last:
            return full + 1
        return full

    def ranges(self, processes: int) -> list[range]:
        """The numbers of the microbatches that each rank computes: contiguous ranges."""
        if self.shares:
            ends = [*accumulate(self.shares, initial=0)]
        else:
            ends = [rank * self.microbatches // processes for rank in range(processes + 1)]
        return [range(*pair) for pair in pairwise(ends)]

    def sizes(self, processes: int) -> dict[str, int]:
        """How the global batch is divided."""
        return {
            "processes": processes,
            "batch_size": -(-self.global_batch_size // self.microbatches),
            "grad_accum": max(map(len, self.ranges(processes))),
            "global_batch_size": self.global_batch_size,
        }

    def update_size(self, position: int) -> int:
        """Samples in the update that starts after `position` samples of its epoch."""
        return min(self.global_batch_size, self.samples - position)

    def at(self, step: int) -> tuple[int, int]:
        """The epoch and position of update `step`, counted from 0."""
        epoch, update = divmod(step, self.updates_per_epoch)
        return epoch, update * self.global_batch_size

    def microbatch_sizes(self, position: int) -> list[int]:
        """Samples in each microbatch of the update at `position`; they differ by at most one, in
        pairs by two.
        """
        each = 2 if self.in_pairs else 1
        pieces, alone = divmod(self.update_size(position), each)
        small, larger = divmod(pieces, self.microbatches)
        sizes = [(small + 1) * each] * larger + [small * each] * (self.microbatches - larger)
        return [*sizes[:-1], sizes[-1] + alone]

    def draws(self, epoch: int) -> tuple[np.ndarray, np.ndarray | None]:
        """The samples of an epoch in order, int64 [samples], and their occurrences (see
        Microbatch).

        With repeats, the distinct samples of an update come one after the other, and then all of
        them again, so that neighbours differ ("Augment your batch", Hoffer et al., 2019).
        """
        if self.weights is None:
            drawn = permutation(self.samples, self.seed, epoch)
        else:
            drawn = weighted_draws(self.weights, self.seed, epoch)
        if self.repeats > 1:
            size = self.global_batch_size
            update, place = np.divmod(np.arange(self.samples), size)
            sizes = np.minimum(size, self.samples - update * size)
            distinct = -(-sizes // self.repeats)
            drawn = drawn[update * (size // self.repeats) + place % distinct]
        if self.weights is None and self.repeats == 1:
            return drawn, None
        import pandas  # takes half a second

        counts = pandas.Series(drawn).groupby(drawn).cumcount()
        return drawn, counts.to_numpy(copy=True)  # writable, for PyTorch


def make_plan(
    config: DataSettings, labels: np.ndarray, global_batch_size: int, microbatches: int
) -> Plan:
    """The order of a run's training samples with these labels.

    Raises ValueError if it does not fit the batch or the labels.
    """
    problem = f"--repeats {config.repeats} does not divide the global batch of {global_batch_size}"
    fix = f"set --global_batch_size to a multiple of {config.repeats}"
    require(global_batch_size % config.repeats == 0, problem, fix)
    fits = not config.mixes or global_batch_size // 2 >= microbatches
    pairs = f"fewer pairs than its {microbatches} microbatches"
    problem = f"a global batch of {global_batch_size} has {pairs}"
    fix = f"--mixup and --cutmix need a --global_batch_size of at least {2 * microbatches}"
    require(fits, problem, f"{fix}, or fewer microbatches")
    weights = None
    if config.sampler == "balanced":
        require(labels.ndim == 1, "--sampler balanced needs one class per image", "leave it out")
        weights = 1 / np.bincount(labels)[labels]
    return Plan(
        len(labels),
        global_batch_size,
        microbatches,
        config.seed,
        drop_last=config.drop_last,
        repeats=config.repeats,
        in_pairs=config.mixes,
        shares=config.shares,
        weights=weights,
    )
