"""Random numbers of samples, a pure function of (seed, epoch, sample, occurrence, stream).

An image is therefore augmented in the same way on every rank, in every worker and in a resumed run.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from utils.data.order import fold_in

# SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIERS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))  # as int64
# The counters of the oldest streams, fixed so that earlier runs can be resumed; any other is a hash
# of its name.
_COUNTERS = {"shift_top": 1, "shift_left": 2, "flip": 3}
_COUNTERS |= {"crop_area": 5, "crop_aspect": 6, "crop_top": 7, "crop_left": 8}
ALTERNATING = "flip_alternate"
"""A stream whose numbers are the same in all epochs, but on the other side of 0.5 in every second
one.

The occurrences of a sample in an epoch alternate too.
"""


class Draws:
    """The random numbers of the samples of one microbatch: int64 `indices` [n] and `occurrences`
    [n] (None: all 0), arrays or tensors.

    Each stream has independent numbers and can be used only once. They are computed on the device
    of the indices without waiting for it, and are the same on any device, bit for bit.
    """

    def __init__(self, seed: int, epoch: int, indices: Any, occurrences: Any = None):
        self._seed = seed
        self._indices = torch.as_tensor(indices)
        self._turns: Any = epoch
        states = _scramble(self._indices ^ _signed(fold_in(seed, "augment", epoch) ^ 1 << 63))
        if occurrences is not None:
            again = torch.as_tensor(occurrences)
            states = torch.where(again > 0, _scramble(states ^ _scramble(again)), states)
            self._turns = epoch + again
        self._states = states[:, None]
        self._used = set[str]()

    def uniform(self, *streams: str) -> Tensor:
        """Random numbers in [0, 1) of the named streams: float32 [n, len(streams)]."""
        assert len(set(streams)) == len(streams) and self._used.isdisjoint(streams), (
            f"used twice: {streams}"
        )
        self._used.update(streams)
        bits = _right(_scramble(self._states + _offsets(streams, self._states.device)), 40)
        if ALTERNATING in streams:  # the highest bit is inverted after an odd number of turns
            own = _scramble(self._indices ^ _signed(fold_in(self._seed, "augment", ALTERNATING)))
            bits[:, streams.index(ALTERNATING)] = _right(own, 40) ^ (self._turns & 1) << 23
        return bits.float() / 2**24


# 64-bit words are int64, because PyTorch cannot shift uint64: sums and products have the same bits,
# and a shift to the right must clear the copies of the sign.


@cache
def _offsets(streams: tuple[str, ...], device: torch.device) -> Tensor:
    counters = [_COUNTERS.get(stream, fold_in("stream", stream)) for stream in streams]
    words = [_signed(counter * _GAMMA % 2**64) for counter in counters]
    return torch.tensor(words, dtype=torch.int64, device=device)


def _signed(word: int) -> int:
    return (word ^ 1 << 63) - (1 << 63)


def _right(x: Tensor, places: int) -> Tensor:
    return x >> places & (1 << 64 - places) - 1


def _scramble(x: Tensor) -> Tensor:
    for places, multiplier in _MULTIPLIERS:
        x = (x ^ _right(x, places)) * multiplier
    return x ^ _right(x, 31)


class Transform:
    """An augmentation of uint8 images, either `image` or, with `batched`, `batch`. Each image has
    one random number in [0, 1) from each of the `streams`.

    Streams are names that no other transform uses.
    """

    streams: tuple[str, ...] = ()
    # Whether `batch` is fast on a GPU. If one transform of a run is not batched, all of them run in
    # loader processes.
    batched = False

    def image(self, pixels: Tensor, random: Tensor) -> Tensor:
        """The changed image [H, W, C], not in place, from its numbers, float32 [len(streams)]."""
        raise NotImplementedError

    def batch(self, images: Tensor, random: Tensor) -> Tensor:
        """The changed images [n, H, W, C], possibly in place, from their numbers [n, len(streams)].

        On a GPU, this must not wait for it.
        """
        for place, pixels in enumerate(images):
            images[place] = self.image(pixels, random[place])
        return images

    def shrink(self, random: Tensor, height: int, width: int) -> float:
        """How many times smaller the first transform makes a photograph of this size; below 2 it is
        decoded whole.
        """
        return 1.0
