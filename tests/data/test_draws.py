"""utils/data/draws.py: a function of seed, epoch, sample, turn and stream; uniform, independent."""

import hashlib
import math

import numpy as np
import pytest
import torch
from helpers.draws import plain_uniform

from utils.data.draws import Draws

N = 1 << 16
INDICES = np.arange(N)
# The counters of the streams that the first runs used
PINNED = {"shift_top": 1, "shift_left": 2, "flip": 3}
PINNED |= {"crop_area": 5, "crop_aspect": 6, "crop_top": 7, "crop_left": 8}


def numbers(seed, epoch, indices, stream="a", occurrences=None):
    return Draws(seed, epoch, indices, occurrences).uniform(stream)[:, 0].numpy()


def test_random_numbers_are_those_of_splitmix64():
    indices = [0, 1, 2, 1000, 2**31, 2**40 + 7]
    for seed, epoch in ((0, 0), (1, 0), (0, 1), (12345, 99)):
        ours = Draws(seed, epoch, np.array(indices)).uniform(*PINNED, "a new one")
        assert ours.dtype == torch.float32
        digest = hashlib.blake2b(repr(("stream", "a new one")).encode(), digest_size=8).digest()
        counters = [*PINNED.values(), int.from_bytes(digest, "little")]
        assert ours.tolist() == [
            [plain_uniform(seed, epoch, i, counter) for counter in counters] for i in indices
        ]


def test_each_time_that_a_sample_is_drawn_in_an_epoch_has_numbers_of_its_own():
    pairs = [(7, 0), (7, 1), (3, 0), (7, 2), (3, 1)]
    indices, occurrences = np.array(pairs).T
    found = numbers(3, 2, indices, "flip", occurrences)
    assert found.tolist() == [
        plain_uniform(3, 2, index, 3, occurrence) for index, occurrence in pairs
    ]
    assert len(set(found.tolist())) == 5
    assert (numbers(3, 2, indices, "flip", 0 * occurrences) == numbers(3, 2, indices, "flip")).all()


def test_random_numbers_do_not_depend_on_the_batch_or_on_what_else_is_drawn():
    indices, occurrences = np.random.default_rng(0).permutation(1000), np.arange(1000) % 3
    draws = Draws(3, 2, indices, occurrences)
    whole = draws.uniform("a", "b")
    for part in np.array_split(np.arange(1000), 143):
        again = Draws(3, 2, indices[part], occurrences[part]).uniform("a", "b")
        assert torch.equal(again, whole[part])
    assert (Draws(3, 2, indices, occurrences).uniform("b")[:, 0] == whole[:, 1]).all()
    assert draws.uniform().shape == (1000, 0)


def test_a_stream_cannot_be_used_twice():
    draws = Draws(0, 0, INDICES[:4])
    draws.uniform("flip", "a")
    for streams in (("b", "a"), ("flip",), ("c", "c")):
        with pytest.raises(AssertionError, match="used twice"):
            draws.uniform(*streams)


def test_random_numbers_are_uniform():
    values = Draws(0, 0, INDICES, INDICES % 4).uniform("flip", "shift_top", "a", "b")
    assert values.min() >= 0 and values.max() < 1
    for column in values.T:
        assert_uniform(np.histogram(column, 256, (0, 1))[0])


def assert_uniform(counts, name=""):
    """A chi-square test of 256 counts of N numbers."""
    assert abs(((counts - N / 256) ** 2 / (N / 256)).sum() - 255) < 5 * math.sqrt(2 * 255), name


def test_streams_epochs_seeds_occurrences_and_neighbours_are_independent():
    one = numbers(0, 0, INDICES)
    others = {
        "stream": numbers(0, 0, INDICES, "b"),
        "pinned stream": numbers(0, 0, INDICES, "flip"),
        "epoch": numbers(0, 1, INDICES),
        "seed": numbers(1, 0, INDICES),
        "occurrence": numbers(0, 0, INDICES, occurrences=np.ones_like(INDICES)),
        "neighbour": np.roll(one, 1),
        "index with one bit more": numbers(0, 0, INDICES ^ 1),
    }
    for name, other in others.items():
        assert abs(np.corrcoef(one, other)[0, 1]) < 5 / math.sqrt(N), name
        assert_uniform(np.histogram2d(one, other, 16, [[0, 1], [0, 1]])[0], name)
