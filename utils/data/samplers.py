"""Samplers of microbatches: those of training, and the blocks of an evaluation."""

from collections.abc import Iterable, Iterator, Sized
from itertools import accumulate, chain, zip_longest

import numpy as np

from utils.data.order import Microbatch, Plan


class MicrobatchSampler(Sized, Iterable):
    """Yields microbatches of at most `largest` samples, for a DataLoader that `Accelerator.prepare`
    wraps.

    Accelerate assigns microbatch i to rank i modulo the number of processes. It does so without
    changing the batches only because a sampler has neither a `batch_size` nor a `set_epoch`
    attribute, and `even_batches` is off.
    """

    largest: int


class UpdateSampler(MicrobatchSampler):
    """Yields the microbatches of `updates` updates over all epochs, from update `start`, counted
    from 0.

    The microbatches of an update are yielded in the order in which Accelerate assigns contiguous
    ranges to the ranks.
    """

    def __init__(self, plan: Plan, processes: int, updates: int, start: int = 0):
        self.plan = plan
        self.updates = updates
        self.start = start
        self.largest = max(plan.microbatch_sizes(0))
        # -1 stands for no microbatch: all ranks must get the same number of batches.
        self.numbers = list(chain.from_iterable(zip_longest(*plan.ranges(processes), fillvalue=-1)))

    def __len__(self) -> int:
        return self.updates * len(self.numbers)

    def __iter__(self) -> Iterator:  # of Microbatch; PyTorch's type hints ask for lists
        plan = self.plan
        drawn = -1  # the epoch of the draws
        for update in range(self.start, self.start + self.updates):
            epoch, position = plan.at(update)
            if epoch != drawn:
                draws = plan.draws(epoch)
                drawn = epoch
            ends = list(accumulate(plan.microbatch_sizes(position), initial=position))
            for number in self.numbers:
                begin, end = ends[number : number + 2] if number >= 0 else (0, 0)
                occurrences = None if draws[1] is None else draws[1][begin:end]
                yield Microbatch(update, epoch, number, draws[0][begin:end], occurrences)


class BlockSampler(MicrobatchSampler):
    """Yields 0 .. samples - 1 in blocks of `block_size`, for evaluation.

    A sample is in the same block on every topology, so its logits are the same too. `epoch` selects
    the augmentation.
    """

    def __init__(self, samples: int, block_size: int, epoch: int = 0):
        self.samples = samples
        self.block_size = block_size
        self.epoch = epoch
        self.largest = min(samples, block_size)

    def __len__(self) -> int:
        return -(-self.samples // self.block_size)

    def __iter__(self) -> Iterator:
        for number in range(len(self)):
            start = number * self.block_size
            indices = np.arange(start, min(start + self.block_size, self.samples))
            yield Microbatch(0, self.epoch, number, indices)


def evaluation_blocks(samples: int, most: int, epoch: int = 0) -> BlockSampler:
    """The blocks of an evaluation, of at most `most` samples. They do not depend on the number of
    ranks.

    A small split has smaller blocks, of at least 16 samples, so that up to 16 ranks have work.
    """
    return BlockSampler(samples, min(most, max(16, -(-samples // 16))), epoch)
