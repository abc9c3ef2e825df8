"""The evaluation loop of train.py and eval.py. It counts each sample once, on any number of processes."""

import time
from dataclasses import dataclass

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from utils.config.settings import TrainConfig
from utils.console import Terminal
from utils.data.batches import Batches
from utils.errors import UserError
from utils.ranks.accelerator import sum_over_ranks
from utils.ranks.ranks import Ranks
from utils.ranks.stopping import Stopping
from utils.tasks.task import Task
from utils.training.meter import Pace


@dataclass
class Evaluator:
    """Evaluates a model on a split, in blocks of --eval_batch_size.

    `model` is the module without DDP's wrapper, because ranks may have different numbers of blocks. With --metrics, the
    result has those of `Task.metrics` too.
    """

    ranks: Ranks
    accelerator: Accelerator
    model: nn.Module
    batches: Batches
    task: Task
    config: TrainConfig

    @torch.no_grad()
    def evaluate(self, stopping: Stopping | None = None) -> dict | None:
        """The metrics of the whole split, and its `count` of samples; collective.

        About once a second, the ranks agree whether to stop early: if a rank could not read a sample, or, with
        `stopping`, if it was asked to stop. Returns None if asked to stop. Only the main process's result has
        `Task.metrics`. The result has `left_out` if images were skipped. Raises ValueError if images cannot be read,
        and RuntimeError if a sample is missing or in the wrong place.
        """
        start, was_training = time.perf_counter(), self.model.training
        self.model.eval()
        sums, gathered, stopped = self._loop(stopping)
        self.model.train(was_training)
        self.ranks.run_on_all(self.batches.check)
        if stopped and stopping is not None:
            stopping.agreed = True
            return None
        numbers, predictions = gathered.gather(self.accelerator, len(self.batches.labels))
        result = self._summary(sums, numbers)
        if self.config.metrics and self.accelerator.is_main_process:
            seen = numbers > 0
            result |= self.task.metrics(predictions[seen], self.batches.labels[seen])
        return result | {"seconds": time.perf_counter() - start}

    def _loop(self, stopping: Stopping | None) -> tuple[Tensor, "Gathered", bool]:
        """This rank's sums and predictions, and whether the ranks have agreed to stop."""
        device, task, processes = self.accelerator.device, self.task, self.accelerator.num_processes
        size = self.config.eval_batch_size
        blocks = -(-len(self.batches.labels) // size)
        sums = torch.zeros(len(task.evaluation), dtype=torch.float64, device=device)
        gathered = Gathered(size, -(-blocks // processes), task, device)
        bar, pace = Terminal(self.ranks.is_main).progress("evaluating"), Pace()
        for block, batch in enumerate(bar(self.batches), 1):
            with self.accelerator.autocast():
                outputs = self.model(batch.images)
            own, predictions = task.evaluate(outputs.float(), batch.labels)
            sums += own
            gathered.add(batch.number // processes, batch.indices, predictions)
            # Ranks may differ by one block, so they synchronise only after blocks that all of them have.
            if block <= blocks // processes and pace.due(block):
                wants_to_stop = self.batches.error is not None or (stopping is not None and stopping.requested)
                if self._any_wants_to_stop(wants_to_stop, pace, block):
                    return sums, gathered, True
        return sums, gathered, False

    def _any_wants_to_stop(self, wants_to_stop: bool, pace: Pace, block: int) -> bool:
        self.ranks.mark_waiting(f"block {block} of the evaluation")
        own = [wants_to_stop, time.perf_counter() - pace.time]
        values = torch.tensor(own, dtype=torch.float64, device=self.accelerator.device)
        stops, seconds = sum_over_ranks(self.accelerator, values).tolist()
        self.ranks.mark("evaluating")
        pace.synced(block, seconds / self.accelerator.num_processes)
        return stops > 0

    def _summary(self, sums: Tensor, numbers: np.ndarray) -> dict:
        """The metrics over all ranks. `numbers` is from `Gathered.gather`."""
        left_out = torch.tensor([self.batches.left_out], dtype=torch.float64, device=sums.device)
        *totals, missing = sum_over_ranks(self.accelerator, torch.cat([sums, left_out])).tolist()
        samples, count = len(numbers), int((numbers > 0).sum())
        is_right = (numbers == 0) | (numbers == np.arange(1, samples + 1))
        if count + missing != samples or not is_right.all():
            problem = f"the evaluation did not count each of the {samples} samples once"
            raise RuntimeError(f"{problem} ({count} counted, {missing:.0f} left out); please report this")
        if not count:
            fix = "set another --eval_split or --data"
            raise UserError(f"none of the {samples} images to evaluate can be read", fix)
        result = self.task.summary(dict(zip(self.task.evaluation, totals, strict=True)), count)
        return {**result, "count": count} | ({"left_out": int(missing)} if missing else {})


class Gathered:
    """The predictions of this rank's blocks, which `gather` combines with those of the other ranks.

    Ranks may have different numbers of blocks, and blocks different numbers of samples. `accelerator.gather` needs
    tensors of one shape, so each rank has room for `rounds` whole blocks, as many as the rank with the most blocks.
    """

    def __init__(self, block_size: int, rounds: int, task: Task, device: torch.device):
        nothing = torch.zeros(0, task.outputs, device=device), torch.zeros(0, dtype=torch.int64, device=device)
        _, like = task.evaluate(*nothing)  # a rank without blocks needs their shape and type too
        self.block_size, self.rounds = block_size, rounds
        self.predictions = like.new_zeros(rounds * block_size, *like.shape[1:])
        # 1 + the position of each sample in its split; 0 where there is no sample, or an unreadable one
        self.numbers = torch.zeros(rounds * block_size, dtype=torch.int64, device=device)

    def add(self, block: int, indices: Tensor, predictions: Tensor) -> None:
        """Store the predictions of the samples at `indices` [n], which are in this rank's `block`, counted from 0."""
        places = block * self.block_size + indices % self.block_size
        self.numbers[places] = indices + 1
        self.predictions[places] = predictions

    def gather(self, accelerator: Accelerator, samples: int) -> tuple[np.ndarray, np.ndarray]:
        """`numbers` [N] and `predictions` [N, ...] of all `samples`, in the order of the split; collective."""
        numbers, predictions = (
            self._in_order(accelerator.gather(values), accelerator.num_processes)[:samples].cpu().numpy()
            for values in (self.numbers, self.predictions)
        )
        return numbers, predictions

    def _in_order(self, values: Tensor, processes: int) -> Tensor:
        """Accelerate assigns block i to rank i modulo the number of processes: put the blocks back in order."""
        blocks = values.view(processes, self.rounds, self.block_size, *values.shape[1:])
        return blocks.transpose(0, 1).flatten(0, 2)
