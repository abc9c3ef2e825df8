"""What the ranks of a run agree on and exchange, besides what Accelerate gathers."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from utils.config import require
from utils.errors import USER_ERRORS, AgreedError, split_error
from utils.launch import Topology
from utils.ranks.watch import Watch

Result = TypeVar("Result")


class Collectives:
    """Methods that all ranks must call, or none: `agree`, `local_main_first`, `from_main`,
    `gather`, `check_same`, `any_rank`, `broadcast`, `broadcast_buffers`.

    `enter` and `enter_collective` are not collective: they record what this rank is doing, so that
    ranks that wait for it can report it.
    """

    def __init__(self, topology: Topology, watch: Watch):
        self.topology = topology
        self.watch = watch
        self.enter = watch.enter
        self.enter_collective = watch.enter_collective
        # Agreements use separate gloo groups, because NCCL's groups need a GPU. The store could not
        # replace them: a wait in it does not end when a rank dies, and fails when the launcher,
        # which may serve the store, dies.
        self._fast: Any = None  # a single process needs none
        self._slow: Any = None

    @property
    def is_main(self) -> bool:
        return self.topology.is_main

    @contextmanager
    def agree(self, place: str = "", no_timeout: bool = False) -> Iterator[None]:
        """Run the block on every rank; an error on any rank is raised on all of them, as
        AgreedError, at its end.

        The block must not communicate. `place` is passed to `enter`. With `no_timeout`, the wait
        for the other ranks lasts as long as they are alive. A single process raises its error
        unchanged.
        """
        self.enter(place)
        error = None
        try:
            yield
        except USER_ERRORS as raised:
            if self._fast is None:
                raise
            error = raised
        self._raise_on_all(error, no_timeout)

    def _raise_on_all(self, error: Exception | None, no_timeout: bool) -> None:
        who = "" if self.is_main else f"rank {self.topology.rank}: "
        mine = None
        if error:
            problem, fix = split_error(error)
            mine = AgreedError(who + problem, fix)
        if first := next(filter(None, self.gather(mine, no_timeout)), None):
            raise first from error

    @contextmanager
    def local_main_first(self, place: str = "") -> Iterator[None]:
        """`agree`, but the first rank of each machine runs the block before the others.

        They then find the files that it has downloaded or decoded. They wait for it as long as it
        is alive.
        """
        is_first = self.topology.local_rank == 0
        self.enter(place)
        if not is_first:
            self._raise_on_all(None, no_timeout=True)
        with self.agree(no_timeout=True):
            yield
        if is_first:
            self._raise_on_all(None, no_timeout=True)

    def from_main(self, action: Callable[[], Result], no_timeout: bool = False) -> Result:
        """The result of `action`, run on the main process, on every rank.

        An error is raised on all ranks, as AgreedError. With `no_timeout`, the wait lasts as long
        as the main process is alive.
        """
        result: Any = None
        with self.agree(no_timeout=no_timeout):
            if self.is_main:
                result = action()
        return self.gather(result)[0]

    def gather(self, value: Result, no_timeout: bool = False) -> list[Result]:
        """Every rank's value, in the order of the ranks.

        With `no_timeout`, the wait lasts as long as the ranks are alive. The values are pickled:
        the ranks of a run trust each other.
        """
        if self._fast is None:
            return [value]
        values = [value] * self.topology.world_size
        self.watch.enter_collective(no_timeout=no_timeout)
        dist.all_gather_object(values, value, self._slow if no_timeout else self._fast)
        self.watch.enter()
        return values

    def check_same(self, text: str, what: str, fix: str = "give all ranks the same files") -> None:
        """Raise UserError on all ranks unless all have the same text; `what` describes the
        difference.
        """
        texts = self.gather(text)
        other = next((rank for rank, theirs in enumerate(texts) if theirs != texts[0]), None)
        require(other is None, f"rank {other} has {what} than rank 0", fix)

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return any(self.gather(flag))

    def broadcast_buffers(self, model: nn.Module) -> None:
        """Copy the main process's buffers to all ranks, whose batch statistics are those of their
        own batches.
        """
        self.broadcast(model.buffers())

    @torch.no_grad()
    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Copy the main process's values of these tensors to all ranks."""
        if self._fast is not None:
            self.watch.enter_collective()
            for tensor in tensors:
                dist.broadcast(tensor, 0)
            self.watch.enter()
