"""Training loss, accuracy and time over all ranks, gathered on the device and read only when the ranks meet."""

import time
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor

from utils.accelerator import sum_over_ranks


@dataclass
class Totals:
    """Sums over all ranks since the last train record; `wait` is seconds that ranks waited for data, added up."""

    loss: float = 0.0
    correct: float = 0.0
    count: float = 0.0
    wait: float = 0.0


class Meter:
    """Adds up on this rank between two train records, and over the ranks when they meet."""

    def __init__(self, device: torch.device, start: Totals):
        self.sums = torch.tensor([start.loss, start.correct], dtype=torch.float64, device=device)
        self.count, self.wait = start.count, start.wait
        self.started = time.perf_counter()

    def add(self, loss: Tensor, logits: Tensor, labels: Tensor, wait: float) -> None:
        """Count one batch: its summed loss, its logits [n, classes] against `labels` [n]. Does not wait for the GPU."""
        self.sums += torch.stack([loss.detach().double(), (logits.detach().argmax(1) == labels).sum()])
        self.count += len(labels)
        self.wait += wait

    def meet(self, accelerator: Accelerator, failed: bool) -> tuple[Totals, float, bool]:
        """The totals, the seconds since the last meeting or `restart`, and whether any rank `failed`; collective.

        This is the one place where the loop waits for the device. All ranks get the same numbers, the seconds their
        mean over the ranks.
        """
        if self.sums.is_cuda:
            torch.cuda.synchronize()
        now = time.perf_counter()
        own = torch.tensor([self.count, self.wait, now - self.started, failed], dtype=torch.float64)
        self.started = now
        *totals, seconds, failures = sum_over_ranks(
            accelerator, torch.cat([self.sums, own.to(self.sums.device)])
        ).tolist()
        return Totals(*totals), seconds / accelerator.num_processes, failures > 0

    def restart(self) -> None:
        """Leave out the time since the last meeting, which was spent on something else than training."""
        self.started = time.perf_counter()

    def reset(self) -> None:
        """Begin the next train record."""
        self.sums.zero_()
        self.count, self.wait = 0.0, 0.0
