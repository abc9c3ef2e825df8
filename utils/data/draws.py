"""Random numbers of samples, a pure function of (seed, epoch, sample, occurrence, stream).

An image is therefore augmented in the same way on every rank, in every worker and in a resumed run.
"""

from functools import cache

import numpy as np

from utils.data.order import fold_in

# SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIERS = ((30, np.uint64(0xBF58476D1CE4E5B9)), (27, np.uint64(0x94D049BB133111EB)))
# The counters of the oldest streams, fixed so that earlier runs can be resumed; any other is a hash of its name.
_COUNTERS = {"shift_top": 1, "shift_left": 2, "flip": 3}
_COUNTERS |= {"crop_area": 5, "crop_aspect": 6, "crop_top": 7, "crop_left": 8}


class Draws:
    """The random numbers of the samples of one microbatch: int64 `indices` [n] and `occurrences` [n] (None: all 0).

    Each stream has independent numbers and can be used only once.
    """

    def __init__(self, seed: int, epoch: int, indices: np.ndarray, occurrences: np.ndarray | None = None):
        key = np.uint64(fold_in(seed, "augment", epoch) ^ 1 << 63)
        states = _scramble(indices.astype(np.uint64) ^ key)
        if occurrences is not None:
            repeated = _scramble(states ^ _scramble(occurrences.astype(np.uint64)))
            states = np.where(occurrences > 0, repeated, states)
        self._states, self._used = states[:, None], set[str]()

    def uniform(self, *streams: str) -> np.ndarray:
        """Random numbers in [0, 1) of the named streams: float32 [n, len(streams)]."""
        assert len(set(streams)) == len(streams) and self._used.isdisjoint(streams), f"used twice: {streams}"
        self._used.update(streams)
        offsets = np.array([_offset(stream) for stream in streams], np.uint64)
        return (_scramble(self._states + offsets) >> 40).astype(np.float32) / 2**24


@cache
def _offset(stream: str) -> int:
    return _COUNTERS.get(stream, fold_in("stream", stream)) * _GAMMA % 2**64


def _scramble(x: np.ndarray) -> np.ndarray:
    for shift, multiplier in _MULTIPLIERS:
        x = (x ^ x >> shift) * multiplier
    return x ^ x >> 31
