"""Random numbers of samples, a pure function of (seed, epoch, sample, occurrence, stream).

An image is therefore augmented in the same way on every rank, in every worker and in a resumed run.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from utils.data.order import fold_in

Array = np.ndarray | Tensor

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
    [n] (None: all 0).

    Each stream has independent numbers and can be used only once. For tensors, they are computed on
    their device without waiting for it, and are the same, bit for bit.
    """

    def __init__(self, seed: int, epoch: int, indices: Array, occurrences: Array | None = None):
        states = _scramble(indices ^ _signed(fold_in(seed, "augment", epoch) ^ 1 << 63))
        self._turns: Any = epoch
        if occurrences is not None:
            repeated = _scramble(states ^ _scramble(occurrences))
            states = namespace(states).where(occurrences > 0, repeated, states)
            self._turns = epoch + occurrences
        self._states, self._used = states[:, None], set[str]()
        self._seed, self._indices = seed, indices

    def uniform(self, *streams: str) -> Any:
        """Random numbers in [0, 1) of the named streams: float32 [n, len(streams)], an array or a
        tensor.
        """
        assert len(set(streams)) == len(streams) and self._used.isdisjoint(streams), (
            f"used twice: {streams}"
        )
        self._used.update(streams)
        xp = namespace(self._states)
        bits = _right(_scramble(self._states + _offsets(streams, xp, self._states.device)), 40)
        if ALTERNATING in streams:  # the highest bit is inverted after an odd number of turns
            own = self._indices ^ _signed(fold_in(self._seed, "augment", ALTERNATING))
            bits[:, streams.index(ALTERNATING)] = (
                _right(_scramble(own), 40) ^ (self._turns & 1) << 23
            )
        return xp.asarray(bits, dtype=xp.float32) / 2**24


def namespace(array: Array) -> Any:
    """The module whose functions take this array: numpy, which is faster for small arrays on the
    host, or torch.
    """
    return torch if isinstance(array, Tensor) else np


# 64-bit words are int64, because PyTorch cannot shift uint64: sums and products have the same bits,
# and a shift to the right must clear the copies of the sign.


@cache
def _offsets(streams: tuple[str, ...], xp: Any, device: Any) -> Any:
    counters = [_COUNTERS.get(stream, fold_in("stream", stream)) for stream in streams]
    return xp.asarray(
        [_signed(counter * _GAMMA % 2**64) for counter in counters], dtype=xp.int64, device=device
    )


def _signed(word: int) -> int:
    return (word ^ 1 << 63) - (1 << 63)


def _right(x: Any, places: int) -> Any:
    return x >> places & (1 << 64 - places) - 1


def _scramble(x: Any) -> Any:
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

    def image(self, pixels: Tensor, random: np.ndarray) -> Tensor:
        """The changed image [H, W, C], not in place, from its numbers, float32 [len(streams)]."""
        raise NotImplementedError

    def batch(self, images: Tensor, random: Any) -> Tensor:
        """The changed images [n, H, W, C], possibly in place, from their numbers [n, len(streams)].

        On the host, these are an array. On a GPU, this must not wait for it.
        """
        for place, pixels in enumerate(images):
            images[place] = self.image(pixels, random[place])
        return images

    def shrink(self, random: np.ndarray, height: int, width: int) -> float:
        """How many times smaller the first transform makes a photograph of this size; below 2 it is
        decoded whole.
        """
        return 1.0
