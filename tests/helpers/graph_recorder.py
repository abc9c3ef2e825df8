"""CUDA's graphs on a CPU.

A capture records operations with their memory and computes nothing, a replay repeats them in this
memory, and a wait of the host raises.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SYNCS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal")


class RecordedGraph:
    """In place of torch.cuda.CUDAGraph."""

    counts: dict[str, int]  # what has happened in this process

    def __init__(self) -> None:
        self.operations: list[tuple[Any, tuple, dict, list]] = []

    def replay(self) -> None:
        self.counts["replays"] += 1
        with torch.no_grad():
            for function, args, kwargs, results in self.operations:
                for old, new in zip(results, tree_leaves(function(*args, **kwargs)), strict=True):
                    # else it is a view, or was changed in place
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        assert old.shape == new.shape, function
                        old.copy_(new)


class Recorder(TorchDispatchMode):
    """Records the operations of a capture, and the memory from before it that they change."""

    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()
        self.graph = graph
        self.before: dict[int, tuple[Tensor, Tensor]] = {}  # by memory
        self.made: set[int] = set()  # memory of the capture itself

    def keep(self, value: Any) -> None:
        """Keep the content of a tensor that is about to be changed."""
        if isinstance(value, Tensor):
            memory = value.untyped_storage()._cdata
            if memory not in self.before and memory not in self.made:
                self.before[memory] = value, value.clone()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function._schema.name.removeprefix("aten::")
        assert name not in SYNCS, f"{name}: sync in a capture"
        for place, argument in enumerate(function._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.keep(args[place] if place < len(args) else kwargs.get(argument.name))
        if "batch_norm" in name and "backward" not in name:
            for average in args[3:5]:  # changed, though the schema does not say so
                self.keep(average)
        result = function(*args, **kwargs)
        results = tree_leaves(result)
        self.made |= {each.untyped_storage()._cdata for each in results if isinstance(each, Tensor)}
        self.graph.operations.append((function, args, kwargs, results))
        return result


@contextmanager
def recording(graph: RecordedGraph, **options: Any) -> Iterator[None]:
    """In place of torch.cuda.graph."""
    graph.counts["captures"] += 1
    random, recorder = torch.get_rng_state(), Recorder(graph)
    with recorder:
        yield
    torch.set_rng_state(random)
    with torch.no_grad():
        for tensor, content in recorder.before.values():
            tensor.copy_(content)
    graph.counts["operations"] = len(graph.operations)


def install() -> dict[str, int]:
    """Use them in this process. Returns the counts of captures, replays and operations."""
    RecordedGraph.counts = dict.fromkeys(("captures", "replays", "operations"), 0)
    torch.cuda.CUDAGraph, torch.cuda.graph = RecordedGraph, recording
    torch.backends.mkldnn.is_available = lambda: False  # a GPU has no tensors in oneDNN's layout
    return RecordedGraph.counts
