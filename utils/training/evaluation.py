"""The evaluation of train.py, eval.py and predict.py: each sample once, on any topology."""

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.backends import cudnn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from utils.console import progress
from utils.data import DeviceLoader, ImageDataset, InputSpec, evaluation_blocks, make_loaders
from utils.errors import UserError
from utils.launch import fix_for_memory
from utils.models import is_sharded, reshard
from utils.ranks import Ranks, Stopping
from utils.settings.train import TrainConfig
from utils.tasks import Predictions, Task
from utils.training.meter import SyncInterval, rounded

TOP_CLASSES = 5  # classes that are kept for each sample


@dataclass
class Evaluator:
    """Evaluates a model on a split, in blocks of --eval_batch_size.

        rows = evaluator.rows()
        metrics = evaluator.metrics(accelerator.gather(rows))

    `model` is the module without DDP's wrapper, because ranks may have different numbers of blocks.
    `loader` is prepared by Accelerate. With --metrics, the result includes `Task.metrics`. If only
    the task's metric needs these, it includes those of `Task.gathered`.
    """

    ranks: Ranks
    accelerator: Accelerator
    model: nn.Module
    loader: DataLoader
    spec: InputSpec
    task: Task
    config: TrainConfig
    predictions: Predictions | None = None  # of the last evaluation, if they were kept

    def __post_init__(self) -> None:
        self.needs_predictions = self.config.metrics or self.task.metric in self.task.gathered
        self.batches = DeviceLoader(
            self.loader, self.spec, self.config, self.accelerator.device, training=False
        )

    @torch.no_grad()
    def rows(self, stopping: Stopping | None = None, keep: bool = False) -> list[Tensor]:
        """This rank's rows for `accelerator.gather`, see `collect`; collective.

        They are the indices, and the predictions if a metric needs them. `keep` adds the columns of
        `Predictions`. There are none if the ranks were asked to stop.
        """
        if self.config.metrics and self.ranks.is_main:  # takes seconds, which are not counted
            import utils.tasks.metrics  # noqa: F401
        self.start, task = time.perf_counter(), self.task
        sums = torch.zeros(len(task.evaluation), device=self.accelerator.device).double()

        def step(outputs: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
            values, predicted = task.evaluate(outputs, labels)
            sums.add_(rounded(values.double().sum(0)))
            kept = (
                (*task.most_likely(outputs, TOP_CLASSES), values)
                if keep and task.activation
                else ()
            )
            return *([predicted] if self.needs_predictions else []), *kept

        rows = self.collect(step, stopping)
        if not rows:
            return []
        totals = self.accelerator.reduce(sums, "sum").tolist()
        named = dict(zip(task.evaluation, totals, strict=True))
        self.summary = task.summary(named, len(self.batches.dataset.labels))
        return rows

    def metrics(self, gathered: list[Tensor]) -> dict:
        """The metrics of the whole split, and its `count` of samples, from the rows of all ranks.

        Collective; the result is the same on all ranks. If predictions were kept, `predictions` has
        them. Raises RuntimeError if a sample is missing or counted twice.
        """
        indices, *kept = self.in_order(gathered)
        task = self.task
        labels = self.batches.dataset.labels
        result = self.summary | {"count": len(indices)}
        if self.needs_predictions:
            found, *kept = kept
            # As JSON, so that numbers of NumPy become those of Python, as in the log.
            text = self.ranks.from_main(lambda: json.dumps(task.metrics(found, labels)))
            more = json.loads(text)
            names = more if self.config.metrics else task.gathered
            result |= {name: more[name] for name in names if name in more}
        self.predictions = None
        if kept:
            kept = [kept[0][:, :0].astype(int), *kept][-3:]  # some tasks have no `top`
            self.predictions = Predictions(indices, labels, *kept)
        return result | {"seconds": time.perf_counter() - self.start}

    @torch.no_grad()
    def collect(
        self,
        step: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
        stopping: Stopping | None = None,
        shape: Sequence[int] = (),
        most: int | None = None,
    ) -> list[Tensor]:
        """This rank's rows: the indices, and what `step(outputs, labels)` returns; collective.

        `accelerator.gather` needs the same shapes on all ranks: rows with the index -1 are added
        where needed, and tensors without columns, [n, 0], are left out. `shape` is that of the
        output for one image, by default the task's. A rank evaluates at most `most` blocks.
        About once a second, the ranks agree whether to stop: if a rank could not read a sample,
        which raises ValueError, or, with `stopping`, if it was asked to stop, which returns no rows.
        """
        device = self.accelerator.device
        was_training = self.model.training
        stopped = False
        processes = self.accelerator.num_processes
        labels = self.batches.dataset.labels
        blocks = evaluation_blocks(len(labels), self.config.eval_batch_size)
        # Ranks take blocks in turn, so none has more blocks or rows than rank 0.
        sizes = [len(block.indices) for block in [*blocks][::processes]][:most]
        nothing = torch.zeros(0, *(shape or [self.task.outputs]), device=device)  # for its types
        no_rows = step(nothing, self.batches.no_labels)
        found = [(torch.zeros(0, dtype=torch.int64, device=device), *no_rows)]
        bar, interval, block = progress("evaluating"), SyncInterval(), 0
        self.model.eval()
        with same_kernels(), fix_for_memory():
            for block, batch in enumerate(islice(bar(self.batches), most), 1):
                with self.accelerator.autocast():
                    outputs = self.model(batch.images)
                indices = batch.indices.to(device, non_blocking=True)
                found.append((indices, *step(outputs.float(), batch.labels)))
                # Ranks can differ by one block: they synchronise only after blocks that all have.
                if block <= len(blocks) // processes and interval.due(block):
                    if stopped := self._any_wants_to_stop(stopping, interval, block):
                        break
            if is_sharded(self.model):  # also without samples, as other ranks have more blocks
                for _ in range(0 if stopped else len(sizes) - block):
                    self.model(self.batches.no_images)
                reshard(self.model)
            rows = fill_up(found, sum(sizes))
        self.model.train(was_training)
        with self.ranks.agree():
            self.batches.check()
        if stopping:
            stopping.agreed |= stopped
        return [] if stopped else rows

    def in_order(self, gathered: list[Tensor]) -> list[np.ndarray]:
        """The rows of `collect` of all ranks, in the order of the split.

        Raises RuntimeError if a sample is missing or counted twice.
        """
        seen, *rows = (part.cpu().numpy() for part in gathered)
        order = np.argsort(seen)[(seen < 0).sum() :]
        samples = len(self.batches.dataset.labels)
        if not np.array_equal(seen[order], np.arange(samples)):
            raise RuntimeError(
                f"the evaluation did not count each of the {samples} samples once "
                f"({len(order)} counted); please report this"
            )
        return [part[order] for part in (seen, *rows)]

    def _any_wants_to_stop(
        self, stopping: Stopping | None, interval: SyncInterval, block: int
    ) -> bool:
        self.ranks.enter_collective(f"block {block} of the evaluation")
        wants_to_stop = bool(self.batches.error or (stopping and stopping.request))
        own = torch.tensor([wants_to_stop, time.perf_counter() - interval.time]).double()
        stops, seconds = self.accelerator.reduce(own.to(self.accelerator.device), "mean").tolist()
        self.ranks.enter("evaluating")
        interval.synced(block, seconds)
        return stops > 0


def make_eval_loader(
    dataset: ImageDataset, config: TrainConfig, ranks: Ranks, epoch: int = 0
) -> DataLoader:
    """The loader of the evaluation blocks of all ranks, for `Accelerator.prepare`."""
    blocks = evaluation_blocks(len(dataset), config.eval_batch_size, epoch)
    return make_loaders([(dataset, blocks)], config, ranks.threads, ranks.device)[0]


def fill_up(found: list[tuple[Tensor, ...]], most: int) -> list[Tensor]:
    """Join the parts of each tensor, and pad it to `most` rows; the indices come first."""
    columns = [torch.cat(parts) for parts in zip(*found, strict=True)]
    own = len(columns[0])
    rows = [
        F.pad(column, (0, 0) * (column.ndim - 1) + (0, most - own))
        for column in columns
        if column.shape[1:].numel()
    ]
    # Too many rows are an error: all get -1, so that `in_order` reports it.
    rows[0][own if own <= most else 0 :] = -1
    return rows


@torch.no_grad()
def model_rate(evaluator: Evaluator) -> float:
    """Images per second of the model alone, on a random batch, on all ranks at once; collective."""
    # This logger warns if CUDA finds no GPU.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    from torch.utils.benchmark import Timer  # takes long to import

    accelerator = evaluator.accelerator
    spec = evaluator.spec
    shape = (evaluator.config.eval_batch_size, spec.channels, *spec.size)
    fixing = fix_for_memory()
    layout = evaluator.batches.format
    with evaluator.ranks.agree(), same_kernels(), accelerator.autocast(), fixing:
        images = torch.randn(shape, device=accelerator.device).contiguous(memory_format=layout)
        names = {"model": evaluator.model.eval(), "images": images}
        timer = Timer("model(images)", globals=names, num_threads=torch.get_num_threads())
        own = len(images) / timer.blocked_autorange(min_run_time=2.5).median
    return sum(evaluator.ranks.gather(own))


@contextmanager
def same_kernels() -> Iterator[None]:
    """Do not let cuDNN choose kernels by measured time: ranks could get different results."""
    before = cudnn.benchmark
    cudnn.benchmark = False
    try:
        yield
    finally:
        cudnn.benchmark = before


def check_finite(numbers: Any, checkpoint: Path) -> None:
    """Raise UserError unless all of these numbers, from the outputs of a model, are finite."""
    if not np.isfinite(numbers).all():
        fix = "try --mixed_precision no, or use another checkpoint"
        raise UserError(f"{checkpoint}: outputs of the model are NaN or infinite", fix)
