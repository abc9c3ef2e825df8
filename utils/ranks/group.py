"""The connections between the ranks: process groups, and the short texts that the ranks exchange over them."""

import json
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from utils.errors import USER_ERRORS, AgreedError, fix_of, is_lost_rank, one_line, problem_of
from utils.launch.environment import Topology
from utils.ranks.watch import Watch
from utils.waiting import call_with_timeout

_PATIENCE = timedelta(days=1)  # for slow work on one rank, such as a download
_NCCL_LATER = timedelta(seconds=30)  # more for NCCL, which prints a dump and aborts: the watch reports a timeout first
_CONNECT = 12.0  # seconds, for 32 ranks; gloo may try to connect for up to five times as long

# Public since PyTorch 2.15.
_set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout


class Group:
    """This rank's connections to all other ranks. Every rank of a run creates one, after they have met in `store`.

    Raises RuntimeError or ValueError if the ranks cannot connect. `exchange`, `agree` and `finish` are collective.
    """

    def __init__(self, store: dist.Store, watch: Watch, topology: Topology, backend: str, timeout: float):
        self._watch, self._topology = watch, topology
        limit = timedelta(seconds=timeout)
        main_limit = limit + _NCCL_LATER if backend == "nccl" else limit
        connecting = timedelta(seconds=time_to_connect(topology.world_size, timeout))
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", store),
            rank=topology.rank,
            world_size=topology.world_size,
            timeout=connecting if backend == "gloo" else main_limit,
        )
        # Agreements use separate gloo groups, because NCCL's groups need a GPU. The store could not replace them: a
        # wait in it does not end when a rank dies, and fails when the launcher, which may serve the store, dies.
        self.fast, self._slow = _gloo_group(connecting), _gloo_group(connecting)
        for group, seconds in ((None, main_limit), (self.fast, limit), (self._slow, _PATIENCE)):
            _set_timeout(seconds, group)
        self.store = dist.PrefixStore("lockstep", store)

    def exchange(self, text: str, patient: bool = False) -> list[str]:
        """Every rank's text, in the order of the ranks. A `patient` exchange waits as long as the ranks are alive."""
        texts = [""] * self._topology.world_size
        self._watch.mark_waiting(patient=patient)
        dist.all_gather_object(texts, text, self._slow if patient else self.fast)
        self._watch.mark()
        return texts

    def agree(self, action: Callable[[], Any], patient: bool = False) -> Any:
        """Run `action` and return its result. If it fails on any rank, raises AgreedError on all ranks."""
        result, error = None, None
        try:
            result = action()
        except USER_ERRORS as raised:
            error = raised
        who = "" if self._topology.is_main else f"rank {self._topology.rank}: "
        own = json.dumps([who + problem_of(error), fix_of(error)]) if error else ""
        text = next((text for text in self.exchange(own, patient) if text), None)
        if text is not None:
            raise AgreedError(*json.loads(text)) from error
        return result

    def finish(self) -> None:
        """Wait until no rank needs the store. The main process may serve it, so it must exit last."""
        with suppress(RuntimeError):  # the launcher, which may serve the store, may have exited
            self.store.set(f"finished-{self._topology.rank}", "")
            if self._topology.is_main:
                self._keys_arrive(*(f"finished-{rank}" for rank in range(self._topology.world_size)), seconds=10)

    def should_report(self, error: BaseException) -> bool:
        """Whether this rank prints the error that it exits with. Not collective.

        The main process prints errors that all ranks have. It also prints that a rank was lost; the others print this
        only if the main process does not, as it may be the lost rank. Any other error is printed by the first rank that
        reports it.
        """
        if self._watch.store_lost:  # the ranks cannot agree on which of them prints
            return True
        rank, is_main = str(self._topology.rank), self._topology.is_main
        with suppress(RuntimeError):
            if isinstance(error, AgreedError) and not is_main:
                return False
            if is_lost_rank(error) and not is_main:
                return not self._keys_arrive("main-reports", seconds=3)
            if is_main:
                self.store.set("main-reports", "")
            return self.store.compare_set(f"error {one_line(error)}", "", rank).decode() == rank
        return True

    def _keys_arrive(self, *keys: str, seconds: float) -> bool:
        try:
            call_with_timeout(lambda: self.store.wait(list(keys), timedelta(seconds=seconds)), seconds + 1)
            return True
        except RuntimeError:
            return False


def time_to_connect(world_size: int, timeout: float) -> float:
    """The seconds that one group may take. The ranks have met, so they connect immediately, or one has died."""
    return min(timeout, _CONNECT * max(1.0, world_size / 32))


def _gloo_group(timeout: timedelta) -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)  # a rank outside the group would get a number
    return group
