"""utils/training/tree_sum.py: sums have the same bits on any number of processes."""

import math
from itertools import chain

import numpy as np
import pytest
import torch
from helpers.ranks import returned

from utils.data.order import Plan
from utils.ranks.session import distributed_session
from utils.settings.ranks import LaunchConfig
from utils.training.meter import rounded
from utils.training.tree_sum import TreeSum, subtrees


def values(number: int) -> list[torch.Tensor]:
    """The tensors of a microbatch: several shapes, one with the channels last, and two types."""
    generator = torch.Generator().manual_seed(number)
    scale = 10.0 ** (number % 5)
    kernel = torch.randn(4, 3, 2, 2, generator=generator).to(memory_format=torch.channels_last)
    return [
        torch.randn(7, generator=generator) * scale,
        kernel * scale,
        torch.randn(5, generator=generator).double(),
    ]


def root(microbatches: int) -> list[np.ndarray]:
    """The sums by a recursion over the numbers, in numpy."""

    def add(first: int, count: int) -> list[np.ndarray]:
        if count == 1:
            return [tensor.numpy() for tensor in values(first)]
        left, right = add(first, count // 2), add(first + count // 2, count // 2)
        return [a + b for a, b in zip(left, right, strict=True)]

    return add(0, microbatches)


def summed(microbatches: int, updates: int) -> list[list[np.ndarray]]:
    """What each of the updates gives on this rank."""
    with distributed_session("train.py", LaunchConfig(cpu=True)) as ranks:
        ranks.join()
        ranges = Plan(64, 64, microbatches, 0).ranges(ranks.topology.world_size)
        tree = TreeSum(ranges, ranks.topology.rank)
        found = []
        for _ in range(updates):
            for number in tree.own:
                tree.add(number, values(number))
            total = tree.total()
            assert total[1].is_contiguous(memory_format=torch.channels_last)
            found.append([tensor.numpy().copy() for tensor in total])
        return found


@pytest.mark.parametrize("microbatches", [1, 2, 8, 16])
def test_ranges_and_subtrees_cover_each_microbatch_once(microbatches):
    for processes in range(1, microbatches + 1):
        ranges = Plan(64, 64, microbatches, 0).ranges(processes)
        assert [number for numbers in ranges for number in numbers] == list(range(microbatches))
        assert max(map(len, ranges)) - min(map(len, ranges)) <= 1
        for numbers in ranges:
            nodes = subtrees(numbers)
            covered = [range(index << level, (index + 1) << level) for level, index in nodes]
            assert [*chain(*covered)] == list(numbers)
            siblings = {(level, index ^ 1) for level, index in nodes}
            assert not siblings & set(nodes)  # otherwise both would be one larger node


@pytest.mark.parametrize("microbatches,processes", [(1, 1), (8, 1), (2, 2), (8, 3), (8, 5)])
def test_any_number_of_processes_gives_the_bits_of_the_tree(microbatches, processes):
    expected = [tensor.tobytes() for tensor in root(microbatches)]
    for updates in returned(processes, summed, microbatches, 2):
        for total in updates:
            assert [tensor.tobytes() for tensor in total] == expected


def test_another_order_gives_other_bits():
    in_order = values(0)[0].clone()
    for number in range(1, 8):
        in_order += values(number)[0]
    assert not np.array_equal(in_order.numpy(), root(8)[0])


def test_logged_sums_do_not_depend_on_the_order_up_to_a_hundred_million():
    generator = torch.Generator().manual_seed(0)
    sums = 10_000 * torch.rand(20_000, generator=generator, dtype=torch.float64)
    logged, exact = rounded(sums), math.fsum(sums.tolist())
    assert 9e7 < exact < 2**27
    halves = logged[::2].sum() + logged[1::2].sum()
    assert logged.sum() == halves == logged.flip(0).cumsum(0)[-1] == math.fsum(logged.tolist())
    assert logged.sum().item() == pytest.approx(exact, rel=1e-9)
