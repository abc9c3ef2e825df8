"""Training loss and accuracy over all ranks, gathered on the device and read only when a record is due."""

from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor

from utils.distributed import sum_over_ranks


@dataclass
class Totals:
    """Sums over all ranks and samples since the last train record."""

    loss: float = 0.0
    correct: float = 0.0
    count: float = 0.0
    wait: float = 0.0
    """Seconds that the ranks waited for data, added up."""


class Meter:
    """Adds up on this rank; `totals` adds over the ranks."""

    def __init__(self, device: torch.device, start: Totals):
        self.sums = torch.tensor([start.loss, start.correct], dtype=torch.float64, device=device)
        self.count, self.wait = start.count, start.wait

    def add(self, loss: Tensor, logits: Tensor, labels: Tensor, wait: float) -> None:
        """Count one batch: its summed loss, its logits [n, classes] against `labels` [n]. Does not wait for the GPU."""
        self.sums += torch.stack([loss.detach().double(), (logits.detach().argmax(1) == labels).sum()])
        self.count += len(labels)
        self.wait += wait

    def totals(self, accelerator: Accelerator) -> Totals:
        """The sums over all ranks; collective, and the one place where the loop waits for the device."""
        host = torch.tensor([self.count, self.wait], dtype=torch.float64, device=self.sums.device)
        return Totals(*sum_over_ranks(accelerator, torch.cat([self.sums, host])).tolist())

    def reset(self) -> None:
        self.sums.zero_()
        self.count, self.wait = 0.0, 0.0
