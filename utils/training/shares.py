"""With --microbatches: how long each rank computes and waits, and --shares with which all need the same time."""

import time
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch


class Exchange:
    """A context manager that measures the exchange of gradients. The host does not wait for the device."""

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
        """Add the seconds of the exchanges since the last call. A GPU must have completed them."""
        for begin, end in zip(self.marks[::2], self.marks[1::2], strict=True):
            self.seconds += begin.elapsed_time(end) / 1e3 if self.device.type == "cuda" else end - begin
        self.marks.clear()


def balance(shares: Sequence[int], seconds: Sequence[float]) -> list[int]:
    """Shares with which all ranks need the same time, if they needed these `seconds` for their `shares`.

    Returns `shares` if a rank would get none.
    """
    speeds = [share / max(time, 1e-9) for share, time in zip(shares, seconds, strict=True)]
    ends = [round(sum(shares) * end / sum(speeds)) for end in accumulate(speeds, initial=0.0)]
    found = [end - begin for begin, end in pairwise(ends)]
    return found if min(found) > 0 else list(shares)
