"""Sums over the microbatches of an update in one fixed order, so that they have the same bits on
any number of ranks.

Floating-point sums depend on their order. Here the order is a binary tree over the numbers 0 .. M -
1 of the microbatches, where M is a power of two: the node (level, index) is the sum of the nodes
(level - 1, 2 * index) and (level - 1, 2 * index + 1). A rank has a contiguous range of the
microbatches. It adds up the largest subtrees that lie in its range, and the ranks add up the rest
of the tree together.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

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


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """The values of tensors of one type as one new vector, in the order of their dimensions."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


@torch.no_grad()
def set_parts(tensors: Sequence[Tensor], vector: Tensor) -> None:
    """Copy a vector, as `joined` makes it, into the tensors, which keep their layout in memory."""
    parts = vector.split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_(list(tensors), [*map(Tensor.view_as, parts, tensors)])


class TreeSum:
    """The sum of the tensors of all microbatches of an update, in the tree's order.

    `ranges` has the numbers of the microbatches of each rank.
    """

    def __init__(self, ranges: Sequence[range], rank: int):
        self.microbatches, self.processes = ranges[-1].stop, len(ranges)
        self.nodes = [subtrees(numbers) for numbers in ranges]
        self.own = ranges[rank]
        self.parts: dict[Node, list[Tensor]] = {}

    def add(self, number: int, tensors: list[Tensor]) -> None:
        """Add the tensors of a microbatch, in the order of `own`. They are overwritten."""
        node = (0, number)
        while node[1] % 2 and (left := (node[0], node[1] - 1)) in self.parts:
            parts = self.parts.pop(left)
            torch._foreach_add_(parts, tensors)
            tensors = parts
            node = (node[0] + 1, node[1] // 2)
        self.parts[node] = tensors

    def total(self) -> list[Tensor]:
        """The sums over all microbatches of all ranks, the same bits on each; collective.

        Starts the next update.
        """
        parts = list(self.parts.values())
        self.parts = {}
        result = parts[0]
        if self.processes == 1:
            return result
        for dtype in dict.fromkeys(tensor.dtype for tensor in result):
            chosen = [place for place, tensor in enumerate(result) if tensor.dtype == dtype]
            nodes = [[part[place] for place in chosen] for part in parts]
            # into the first tensors, because a norm may depend on the layout in memory
            set_parts(nodes[0], self._exchange([*map(joined, nodes)]))
        return result

    def _exchange(self, nodes: Sequence[Tensor]) -> Tensor:
        """The sum [n] of the nodes of all ranks, from those of this rank, [n] each; collective."""
        counts = [len(each) for each in self.nodes]
        size = len(nodes[0])
        if sum(counts) == 2:  # a + b has only one order
            dist.all_reduce(nodes[0])
            return nodes[0]
        # Each rank adds up one slice of all nodes.
        length = -(-size // self.processes)
        padded = nodes[0].new_zeros(len(nodes), self.processes * length)
        for row, node in zip(padded, nodes, strict=True):
            row[:size] = node
        sent = padded.view(len(nodes), self.processes, length).transpose(0, 1).reshape(-1, length)
        received = sent.new_empty(sum(counts), length)
        dist.all_to_all_single(received, sent, counts, [len(nodes)] * self.processes)
        result = sent.new_empty(self.processes * length)
        dist.all_gather_into_tensor(result, self.add_up(received))
        return result[:size]

    def add_up(self, received: Tensor) -> Tensor:
        """The tree's root [n] from the nodes of all ranks, [nodes, n], in the order of `nodes`."""
        values = dict(zip([node for nodes in self.nodes for node in nodes], received, strict=True))

        def value(level: int, index: int) -> Tensor:
            if (level, index) in values:
                return values[level, index]
            return value(level - 1, 2 * index) + value(level - 1, 2 * index + 1)

        return value(self.microbatches.bit_length() - 1, 0)
