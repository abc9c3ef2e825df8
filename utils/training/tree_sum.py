"""Sums over the microbatches of an update in one fixed order, so that they have the same bits on any number of ranks.

Floating-point sums depend on their order. Here the order is a binary tree over the numbers 0 .. M - 1 of the
microbatches, where M is a power of two: the node (level, index) is the sum of the nodes (level - 1, 2 * index) and
(level - 1, 2 * index + 1). A rank has a contiguous range of the microbatches. It adds up the largest subtrees that lie
in its range, and the ranks add up the rest of the tree together.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from utils.data.order import share

Node = tuple[int, int]  # its level, 0 for microbatches, and its index in the level


def subtrees(numbers: range) -> list[Node]:
    """The largest nodes that together cover exactly these microbatches, from left to right."""
    nodes: list[Node] = []
    for number in numbers:
        node = (0, number)
        while nodes and node[1] % 2 and nodes[-1] == (node[0], node[1] - 1):
            nodes.pop()
            node = (node[0] + 1, node[1] // 2)
        nodes.append(node)
    return nodes


class TreeSum:
    """The sum of the tensors of all microbatches of an update, in the tree's order."""

    def __init__(self, microbatches: int, processes: int, rank: int):
        self.microbatches, self.processes = microbatches, processes
        self.nodes = [subtrees(share(microbatches, processes, each)) for each in range(processes)]
        self.own = share(microbatches, processes, rank)
        self.parts: dict[Node, list[Tensor]] = {}

    def add(self, number: int, tensors: list[Tensor]) -> None:
        """Add the tensors of a microbatch, in the order of `own`. They are overwritten."""
        node = (0, number)
        while node[1] % 2 and (left := (node[0], node[1] - 1)) in self.parts:
            parts = self.parts.pop(left)
            torch._foreach_add_(parts, tensors)
            tensors, node = parts, (node[0] + 1, node[1] // 2)
        self.parts[node] = tensors

    def total(self) -> list[Tensor]:
        """The sums over all microbatches of all ranks, the same bits on each; collective. Starts the next update."""
        parts, self.parts = list(self.parts.values()), {}
        result = parts[0]
        if self.processes > 1:
            for dtype in {tensor.dtype: None for tensor in result}:
                chosen = [place for place, tensor in enumerate(result) if tensor.dtype == dtype]
                flat = [torch.cat([part[place].reshape(-1) for place in chosen]) for part in parts]
                sums = self.exchange(flat).finish().split([result[place].numel() for place in chosen])
                # Copied into the first tensors to keep their layout in memory: a norm may depend on it.
                targets = [result[place] for place in chosen]
                torch._foreach_copy_(targets, [s.view_as(t) for s, t in zip(sums, targets, strict=True)])
        return result

    def exchange(self, flat: Sequence[Tensor]) -> "Exchange":
        """Begin to add up vectors [n], one for each of this rank's nodes, over all ranks; collective."""
        return Exchange(self, flat)

    def add_up(self, received: Sequence[Tensor]) -> Tensor:
        """The tree's root from the nodes of all ranks, in the order of `nodes`."""
        values = dict(zip([node for nodes in self.nodes for node in nodes], received, strict=True))

        def value(level: int, index: int) -> Tensor:
            if (level, index) in values:
                return values[level, index]
            return value(level - 1, 2 * index) + value(level - 1, 2 * index + 1)

        return value(self.microbatches.bit_length() - 1, 0)


class Exchange:
    """A sum over the ranks in the tree's order. It begins in the background, and `finish` completes it."""

    def __init__(self, tree: TreeSum, flat: Sequence[Tensor]):
        self.tree, self.flat, counts = tree, flat, list(map(len, tree.nodes))
        self.received: Tensor | None = None
        self.work: Any
        if sum(counts) == 2:  # a + b has only one order
            self.work = dist.all_reduce(flat[0], async_op=True)
            return
        # Each rank adds up one slice of the vectors of all nodes.
        self.length = -(-flat[0].numel() // tree.processes)
        sent = flat[0].new_zeros(tree.processes, len(flat), self.length)
        for place, vector in enumerate(flat):
            for rank, part in enumerate(vector.split(self.length)):
                sent[rank, place, : part.numel()] = part
        self.sent = sent.view(-1, self.length)
        self.received = flat[0].new_empty(sum(counts), self.length)
        own = [len(flat)] * tree.processes
        self.work = dist.all_to_all_single(self.received, self.sent, counts, own, async_op=True)

    def finish(self) -> Tensor:
        """Wait for the sum [n], the same bits on each rank; collective."""
        self.work.wait()
        if self.received is None:
            return self.flat[0]
        own = self.tree.add_up(list(self.received))
        result = own.new_empty(self.tree.processes * self.length)
        dist.all_gather_into_tensor(result, own)
        return result[: self.flat[0].numel()]
