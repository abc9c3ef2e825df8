"""How long each rank computes and waits with --microbatches, and which --shares of them would balance the ranks."""

import time
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch


class Exchange:
    """A context that adds up the seconds of the exchange of gradients; the host does not wait for the device."""

    def __init__(self, device: torch.device):
        self.device, self.seconds = device, 0.0
        self.marks: list[Any] = []
        self.computed: list[float] = []  # seconds of each rank since the first train record

    def __enter__(self) -> None:
        self.marks.append(self._mark())

    def __exit__(self, *_error: object) -> None:
        self.marks.append(self._mark())

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add_up(self) -> None:
        """Add up what was marked since the last call. A GPU must have completed its work."""
        for begin, end in zip(self.marks[::2], self.marks[1::2], strict=True):
            self.seconds += begin.elapsed_time(end) / 1e3 if self.device.type == "cuda" else end - begin
        self.marks.clear()


def balance(shares: Sequence[int], seconds: Sequence[float]) -> list[int]:
    """Shares with which ranks that needed these seconds for their `shares` need the same time, if all are above 0."""
    speeds = [share / max(time, 1e-9) for share, time in zip(shares, seconds, strict=True)]
    ends = [round(sum(shares) * end / sum(speeds)) for end in accumulate(speeds, initial=0.0)]
    found = [end - begin for begin, end in pairwise(ends)]
    return found if min(found) > 0 else list(shares)
