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
Columns = dict[str, Tensor]  # by name, a row for each sample


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
    output_shape: Sequence[int] = ()  # of one image; by default that of the task
    predictions: Predictions | None = None  # of the last evaluation, if they were kept

    def __post_init__(self) -> None:
        self.needs_predictions = self.config.metrics or self.task.metric in self.task.gathered
        self.batches = DeviceLoader(
            self.loader, self.spec, self.config, self.accelerator.device, training=False
        )

    @torch.no_grad()
    def rows(self, stopping: Stopping | None = None, keep: bool = False) -> Columns:
        """This rank's columns for `accelerator.gather`, see `collect`; collective.

        They are the indices, and `predicted` if a metric needs it. `keep` adds those of
        `Predictions`. There are none if the ranks were asked to stop.
        """
        if self.config.metrics and self.ranks.is_main:  # takes seconds, which are not counted
            import utils.tasks.metrics  # noqa: F401
        self.start = time.perf_counter()
        task = self.task
        sums = torch.zeros(len(task.evaluation), device=self.accelerator.device).double()

        def step(outputs: Tensor, labels: Tensor) -> Columns:
            values, predicted = task.evaluate(outputs, labels)
            sums.add_(rounded(values.double().sum(0)))
            columns = {}
            if self.needs_predictions:
                columns["predicted"] = predicted
            if keep and task.activation:
                top, scores = task.most_likely(outputs, TOP_CLASSES)
                columns |= {"top": top, "scores": scores, "values": values}
            return columns

        columns = self.collect(step, stopping)
        if columns:
            totals = self.accelerator.reduce(sums, "sum").tolist()
            named = dict(zip(task.evaluation, totals, strict=True))
            self.summary = task.summary(named, len(self.batches.dataset.labels))
        return columns

    def metrics(self, gathered: Columns) -> dict:
        """The metrics of the whole split, and its `count` of samples, from the columns of all
        ranks.

        Collective; the result is the same on all ranks. If predictions were kept, `predictions` has
        them. Raises RuntimeError if a sample is missing or counted twice.
        """
        columns = self.in_order(gathered)
        task = self.task
        labels = self.batches.dataset.labels
        result = self.summary | {"count": len(columns["indices"])}
        if self.needs_predictions:
            found = columns.pop("predicted")
            # As JSON, so that numbers of NumPy become those of Python, as in the log.
            text = self.ranks.from_main(lambda: json.dumps(task.metrics(found, labels)))
            more = json.loads(text)
            names = more if self.config.metrics else task.gathered
            result |= {name: more[name] for name in names if name in more}
        self.predictions = None
        if "scores" in columns:
            self.predictions = Predictions(labels=labels, **columns)
        return result | {"seconds": time.perf_counter() - self.start}

    @torch.no_grad()
    def collect(
        self,
        step: Callable[[Tensor, Tensor], Columns],
        stopping: Stopping | None = None,
        most: int | None = None,
    ) -> Columns:
        """This rank's columns: the `indices`, and what `step(outputs, labels)` returns; collective.

        `accelerator.gather` needs the same shapes on all ranks: rows with the index -1 are added
        where needed, and columns without values, [n, 0], are left out. A rank evaluates at most
        `most` blocks. About once a second, the ranks agree whether to stop: if a rank could not
        read a sample, which raises ValueError, or, with `stopping`, if it was asked to stop, which
        returns no columns.
        """
        device = self.accelerator.device
        processes = self.accelerator.num_processes
        was_training = self.model.training
        stopped = False
        samples = len(self.batches.dataset.labels)
        blocks = evaluation_blocks(samples, self.config.eval_batch_size)
        # Ranks take blocks in turn, so none has more blocks or rows than rank 0.
        starts = range(0, samples, processes * blocks.block_size)[:most]
        longest = sum(min(blocks.block_size, samples - start) for start in starts)
        shape = self.output_shape or [self.task.outputs]
        nothing = step(torch.zeros(0, *shape, device=device), self.batches.no_labels)
        indices = torch.zeros(0, dtype=torch.int64, device=device)
        found = [{"indices": indices, **nothing}]  # for the types, if this rank has no block
        bar, interval, block = progress("evaluating"), SyncInterval(), 0
        self.model.eval()
        with same_kernels(), fix_for_memory():
            for block, batch in enumerate(islice(bar(self.batches), most), 1):
                with self.accelerator.autocast():
                    outputs = self.model(batch.images)
                indices = batch.indices.to(device, non_blocking=True)
                found.append({"indices": indices, **step(outputs.float(), batch.labels)})
                # Ranks can differ by one block: they synchronise only after blocks that all have.
                if block <= len(blocks) // processes and interval.due(block):
                    if stopped := self._any_wants_to_stop(stopping, interval, block):
                        break
            if is_sharded(self.model):
                self._finish_blocks(0 if stopped else len(starts) - block)
            columns = fill_up(found, longest)
        self.model.train(was_training)
        with self.ranks.agree():
            self.batches.check()
        if stopping:
            stopping.agreed |= stopped
        return {} if stopped else columns

    def _finish_blocks(self, missing: int) -> None:
        """Run a sharded model on empty blocks while other ranks have more blocks; collective."""
        for _ in range(missing):
            self.model(self.batches.no_images)
        reshard(self.model)

    def in_order(self, gathered: Columns) -> dict[str, np.ndarray]:
        """The columns of `collect` of all ranks, in the order of the split; `top` is [n, 0] if a
        task has scores only.

        Raises RuntimeError if a sample is missing or counted twice.
        """
        columns = {name: column.cpu().numpy() for name, column in gathered.items()}
        seen = columns["indices"]
        order = np.argsort(seen)[(seen < 0).sum() :]
        samples = len(self.batches.dataset.labels)
        if not np.array_equal(seen[order], np.arange(samples)):
            raise RuntimeError(
                f"the evaluation did not count each of the {samples} samples once "
                f"({len(order)} counted); please report this"
            )
        ordered = {name: column[order] for name, column in columns.items()}
        if "scores" in ordered and "top" not in ordered:
            ordered["top"] = np.zeros((samples, 0), np.int64)
        return ordered

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


def fill_up(found: Sequence[Columns], most: int) -> Columns:
    """Join the parts of each column, and pad it to `most` rows."""
    filled = {}
    for name in found[0]:
        column = torch.cat([part[name] for part in found])
        if column.shape[1:].numel():
            before = (0, 0) * (column.ndim - 1)  # pads only rows
            filled[name] = F.pad(column, (*before, 0, most - len(column)))
    own = sum(len(part["indices"]) for part in found)
    # Too many rows are an error: all get -1, so that `in_order` reports it.
    filled["indices"][own if own <= most else 0 :] = -1
    return filled


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
