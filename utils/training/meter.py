"""The sums and the time of training over all ranks, which are read from the device only when the
ranks synchronise.
"""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.optim import Optimizer

from utils.console import join_names
from utils.data import Batch
from utils.errors import UserError
from utils.models import main_output
from utils.tasks import Task


def rounded(values: Tensor) -> Tensor:
    """The values as float64 multiples of 2**-26.

    Their sums are exact below 2**27, so the order does not matter.
    """
    return (values.double() * 2**26).round() / 2**26


class SyncInterval:
    """When the ranks synchronise: about once a second, after the same number of steps on all of
    them.
    """

    def __init__(self, step: int = 0):
        self.step, self.next, self.time = step, step + 1, time.perf_counter()

    def due(self, step: int) -> bool:
        """Whether to synchronise after `step` steps."""
        return step >= self.next

    def synced(self, step: int, seconds: float) -> None:
        """Record that the steps since the last synchronisation took `seconds`, the same number on
        all ranks.
        """
        self.step, self.next = step, step + max(1, int((step - self.step) / max(seconds, 1e-6)))
        self.time = time.perf_counter()


class Meter:
    """This rank's sums since the last train record; `reduce` adds them up over the ranks.

    `start` has the totals that a resumed run continues from. The main process adds them to its own.
    """

    def __init__(
        self,
        task: Task,
        device: torch.device,
        start: Mapping[str, float],
        is_main: bool,
        optimizer: Optimizer | None = None,
    ):
        self.task, self.names = task, (*task.training, "count", "wait", "skipped")
        if start and start.keys() != set(self.names):
            there = join_names(start)
            here = join_names(self.names)
            problem = f"the checkpoint has the training sums {there}, but this task needs {here}"
            raise UserError(problem, "use another checkpoint")
        # besides sums of the task: samples, seconds waited for them, and updates that fp16 skipped
        self.totals = dict.fromkeys(self.names, 0.0) | (dict(start) if is_main else {})
        self.device, self.updates, self.taken = device, 0, torch.zeros((), device=device)
        scaled = getattr(optimizer, "optimizer", None)  # only fp16 has a wrapper around it
        self.scaled = scaled is not None
        if scaled:
            scaled.register_step_pre_hook(self._count_step)
        self.grad_norm: Tensor | None = None  # of the last update, on the device
        # since the last synchronisation
        self.batches: list[tuple[tuple[int, int], Sequence[Tensor]]] = []
        self.started = time.perf_counter()

    def add(self, loss: Tensor, outputs: Any, batch: Batch) -> None:
        """Add a microbatch with its summed loss and its `outputs`, as the model returns them.

        Does not wait for the GPU.
        """
        outputs = main_output(outputs).detach()
        sums = self.task.training_sums(loss.detach(), outputs, batch.labels)
        self.batches.append(((batch.update, batch.number), sums))
        self.totals["count"] += len(batch.labels)

    def _count_step(self, optimizer: Optimizer, *_given: Any) -> None:
        """Count a step on the device.

        A fused optimizer is called for each update, and skips it on the device.
        """
        self.taken += 1 - getattr(optimizer, "found_inf", 0)

    def reduce(
        self, accelerator: Accelerator, failed: bool, stop: bool
    ) -> tuple[dict[str, float], float, bool, bool]:
        """Add up over the ranks, and agree whether any rank `failed` or wants to `stop`;
        collective.

        Returns the totals since the last train record, the mean seconds of the ranks since the last
        synchronisation, and whether any rank failed or wants to stop. The totals are the task's
        training sums by name, the `count` of samples, the seconds that ranks waited for data
        (`wait`), and the updates that fp16 skipped, summed over the ranks (`skipped`).

        This is the only place where the loop waits for the device. The result is the same on all
        ranks.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        # On the device, each batch would need several kernels for this.
        columns = zip(*(sums for _, sums in self.batches), strict=True)
        for name, column in zip(self.names, columns, strict=False):
            self.totals[name] += rounded(torch.stack(column)).sum().item()
        if self.scaled:
            self.totals["skipped"] += self.updates - self.taken.item()
            self.taken.zero_()
        self.updates, now = 0, time.perf_counter()
        own = [*self.totals.values(), now - self.started, failed, stop]
        self.started = now
        values = torch.tensor(own, dtype=torch.float64, device=self.device)
        # Exact for counts below 2**53.
        *sums, seconds, failures, stops = accelerator.reduce(values, "sum").tolist()
        totals = dict(zip(self.names, sums, strict=True))
        if math.isfinite(totals["loss"]):  # otherwise `first_bad` needs them, and the run ends
            self.batches.clear()
        return totals, seconds / accelerator.num_processes, failures > 0, stops > 0

    def first_bad(self) -> tuple[int, int] | None:
        """The update and number of this rank's first microbatch with a NaN or infinite loss, if
        there is one.
        """
        return next((where for where, (loss, *_) in self.batches if not loss.isfinite()), None)

    def restart(self) -> None:
        """Do not count the time since the last synchronisation, which was not spent on training."""
        self.started = time.perf_counter()

    def reset(self) -> None:
        """Start the sums of the next train record."""
        self.totals = dict.fromkeys(self.names, 0.0)
