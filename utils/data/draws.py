"""Random numbers of samples, a pure function of (seed, epoch, sample, occurrence, stream).

An image is therefore augmented in the same way on every rank, in every worker and in a resumed run.
"""

from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from utils.data.order import fold_in

Array = np.ndarray | Tensor

# SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIERS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
# The counters of the oldest streams, fixed so that earlier runs can be resumed; any other is a hash of its name.
_COUNTERS = {"shift_top": 1, "shift_left": 2, "flip": 3}
_COUNTERS |= {"crop_area": 5, "crop_aspect": 6, "crop_top": 7, "crop_left": 8}
ALTERNATING = "flip_alternate"
"""A stream with the same numbers in all epochs, except that they move across 0.5 from each epoch to the next.

They also do so from each occurrence in an epoch to the next.
"""


class Draws:
    """The random numbers of the samples of one microbatch: int64 `indices` [n] and `occurrences` [n] (None: all 0).

    Each stream has independent numbers and can be used only once. For tensors, they are computed on their device
    without waiting for it, and are the same, bit for bit.
    """

    def __init__(self, seed: int, epoch: int, indices: Array, occurrences: Array | None = None):
        key = fold_in(seed, "augment", epoch) ^ 1 << 63
        states = _scramble(_bits(indices) ^ _constant(key, indices))
        if occurrences is not None:
            repeated = _scramble(states ^ _scramble(_bits(occurrences)))
            states = (np if isinstance(states, np.ndarray) else torch).where(occurrences > 0, repeated, states)
        self._states, self._used = states[:, None], set[str]()
        self._alternating = partial(_alternating, seed, indices, epoch + (0 if occurrences is None else occurrences))

    def uniform(self, *streams: str) -> Any:
        """Random numbers in [0, 1) of the named streams: float32 [n, len(streams)], an array or a tensor."""
        assert len(set(streams)) == len(streams) and self._used.isdisjoint(streams), f"used twice: {streams}"
        self._used.update(streams)
        device = self._states.device if isinstance(self._states, Tensor) else None
        bits = _right(_scramble(self._states + _offsets(streams, device)), 40)
        if ALTERNATING in streams:
            bits[:, streams.index(ALTERNATING)] = self._alternating()
        return (bits.float() if isinstance(bits, Tensor) else bits.astype(np.float32)) / 2**24


def _alternating(seed: int, indices: Array, turns: int | Array) -> Any:
    """24 random bits for each sample, with the highest one inverted after an odd number of turns."""
    key = fold_in(seed, "augment", ALTERNATING)
    odd = turns & 1 if isinstance(turns, int) else _bits(turns & 1)
    return _right(_scramble(_bits(indices) ^ _constant(key, indices)), 40) ^ odd << 23


@cache
def _offsets(streams: tuple[str, ...], device: torch.device | None) -> Array:
    counters = [_COUNTERS.get(stream, fold_in("stream", stream)) for stream in streams]
    offsets = np.array([counter * _GAMMA % 2**64 for counter in counters], np.uint64)
    return offsets if device is None else torch.from_numpy(offsets.view(np.int64)).to(device)


# 64-bit words are uint64 in arrays. In tensors they are int64, because PyTorch cannot shift uint64: sums and products
# have the same bits, and a shift to the right must clear the copies of the sign.


def _bits(values: Array) -> Any:
    return values if isinstance(values, Tensor) else values.astype(np.uint64)


def _constant(word: int, like: Array) -> int:
    return (word ^ 1 << 63) - (1 << 63) if isinstance(like, Tensor) else word


def _right(x: Any, places: int) -> Any:
    return x >> places & (1 << 64 - places) - 1 if isinstance(x, Tensor) else x >> places


def _scramble(x: Any) -> Any:
    for places, multiplier in _MULTIPLIERS:
        x = (x ^ _right(x, places)) * _constant(multiplier, x)
    return x ^ _right(x, 31)
