"""The evaluation loop of train.py, eval.py and predict.py: each sample once, on any number of processes."""

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from utils.config.settings import TrainConfig
from utils.console import Terminal
from utils.data.batches import Batches
from utils.data.order import evaluation_blocks
from utils.data.spec import InputSpec
from utils.data.workers import make_loader
from utils.errors import UserError
from utils.launch.exits import fix_for_memory
from utils.models.sharded import forget_whole_weights, is_sharded
from utils.ranks.accelerator import make_accelerator
from utils.ranks.ranks import Ranks
from utils.ranks.stopping import Stopping
from utils.runs.inference import load_for_inference, place_model
from utils.runs.metadata import SavedRun
from utils.tasks.task import Predictions, Task
from utils.training.meter import SyncInterval, rounded

TOP = 5  # classes that are kept for each sample
Step = Callable[[Tensor, Tensor], tuple[Tensor, ...]]


@dataclass
class Evaluator:
    """Evaluates a model on a split, in blocks of --eval_batch_size.

    `model` is the module without DDP's wrapper, because ranks may have different numbers of blocks. With --metrics, the
    result has `Task.metrics` too; without, only its single numbers, if --best_metric is one of them.
    """

    ranks: Ranks
    accelerator: Accelerator
    model: nn.Module
    batches: Batches
    task: Task
    config: TrainConfig
    predictions: Predictions | None = None  # of the last evaluation that was asked to keep them
    is_constant: bool = False  # whether all predictions of the last evaluation are the same

    @torch.no_grad()
    def evaluate(self, stopping: Stopping | None = None, keep: bool = False) -> dict | None:
        """The metrics of the whole split, and its `count` of samples; the same on all ranks; collective.

        Returns None if the ranks were asked to stop, see `collect`.
        Raises RuntimeError if a sample is missing or counted twice. With `keep`, the main process has the predictions
        afterwards.
        """
        if self.config.metrics and self.ranks.is_main:  # takes seconds, which are not those of the evaluation
            import utils.tasks.metrics  # noqa: F401
        start, task = time.perf_counter(), self.task
        keep = keep and bool(task.activation)
        sums = torch.zeros(len(task.evaluation), dtype=torch.float64, device=self.accelerator.device)

        def step(outputs: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
            values, predicted = task.evaluate(outputs, labels)
            sums.add_(rounded(values.double().sum(0)))
            kept = (*task.most_likely(outputs, TOP), values) if keep else ()
            return predicted, *kept

        rows = self.collect(step, stopping)
        if rows is None:
            return None
        indices, predictions, *kept = rows
        decided = predictions if task.cut is None else predictions > task.cut
        same = bool((decided == decided[:1]).all())
        kinds = self.ranks.gather(decided[:1].tolist() if same else [0, 1])  # two values stand for several
        self.is_constant = len({str(kind) for own in kinds for kind in own}) == 1
        needed = [predictions] if self.config.metrics or task.metric in task.gathered else []
        seen, *found = self.gather([indices, *needed, *kept])
        totals, labels = self.accelerator.reduce(sums, "sum").tolist(), self.batches.labels
        result = task.summary(dict(zip(task.evaluation, totals, strict=True)), len(seen)) | {"count": len(seen)}
        if keep:
            self.predictions = Predictions(seen, labels, *found[len(needed) :])
        if needed:
            # As JSON, so that numbers of NumPy become those of Python, as in the log.
            more = json.loads(self.ranks.from_main(lambda: json.dumps(task.metrics(found[0], labels))))
            result |= more if self.config.metrics else {k: more[k] for k in task.gathered if k in more}
        return result | {"seconds": time.perf_counter() - start}

    @torch.no_grad()
    def collect(
        self, step: Step, stopping: Stopping | None = None, shape: Sequence[int] = (), what: str = "evaluating"
    ) -> list[Tensor] | None:
        """The indices of this rank's samples, and what `step(outputs, labels)` returns for them; collective.

        About once a second, the ranks agree whether to stop early: if a rank could not read a sample, or, with
        `stopping`, if it was asked to stop. Returns None if asked to stop. Raises ValueError if a rank could not read
        an image. `shape` is the shape of the output for one image, by default that of the task.
        """
        device, was_training, stopped = self.accelerator.device, self.model.training, False
        blocks = evaluation_blocks(len(self.batches.labels), self.config.eval_batch_size)
        shared_blocks = len(blocks) // self.accelerator.num_processes
        no_labels = torch.tensor(self.batches.labels[:0], device=device)
        # A rank without samples needs the shapes and types, too.
        found = [step(torch.zeros(0, *(shape or [self.task.outputs]), device=device), no_labels)]
        indices: list[Tensor] = []  # on the host, or all on the device
        bar, interval, block = Terminal(self.ranks.is_main).progress(what), SyncInterval(), 0
        self.model.eval()
        with same_kernels(), fix_for_memory("lower --eval_batch_size"):
            for block, batch in enumerate(bar(self.batches), 1):
                with self.accelerator.autocast():
                    outputs = self.model(batch.images)
                indices.append(batch.indices)
                found.append(step(outputs.float(), batch.labels))
                # Ranks may differ by one block, so they synchronise only after blocks that all of them have.
                if block <= shared_blocks and interval.due(block):
                    wants_to_stop = self.batches.error is not None or bool(stopping and stopping.request)
                    stopped = self._any_wants_to_stop(wants_to_stop, interval, block)
                    if stopped:
                        break
            most = -(-len(blocks) // self.accelerator.num_processes)
            self.join_others(0 if stopped else most - block)
            seen = torch.cat(indices or [torch.zeros(0, dtype=torch.int64)]).to(device)
            rows = [torch.cat(parts) for parts in zip(*found, strict=True)]
        self.model.train(was_training)
        with self.ranks.agree():
            self.batches.check()
        if stopped and stopping is not None:
            stopping.agreed = True
            return None
        return [seen, *rows]

    def join_others(self, passes: int) -> None:
        """Run `passes` forward passes of a sharded model on empty batches, because other ranks have more blocks.

        Does nothing if the model is not sharded.
        """
        if is_sharded(self.model):
            for _ in range(passes):
                self.model(self.batches.no_images)
            forget_whole_weights(self.model)

    def gather(self, own: list[Tensor]) -> list[np.ndarray]:
        """The rows of all ranks, in the order of the split; `own` begins with the indices; collective.

        Raises RuntimeError if a sample is missing or counted twice.
        """
        counts = self.ranks.gather(len(own[0]))
        seen, *rows = (gather_rows(self.accelerator, part, counts).cpu().numpy() for part in own)
        order, samples = np.argsort(seen), len(self.batches.labels)
        if not np.array_equal(seen[order], np.arange(samples)):
            problem = f"the evaluation did not count each of the {samples} samples once"
            raise RuntimeError(f"{problem} ({len(seen)} counted); please report this")
        return [part[order] for part in (seen, *rows)]

    def _any_wants_to_stop(self, wants_to_stop: bool, interval: SyncInterval, block: int) -> bool:
        self.ranks.mark_waiting(f"block {block} of the evaluation")
        own = [wants_to_stop, time.perf_counter() - interval.time]
        values = torch.tensor(own, dtype=torch.float64, device=self.accelerator.device)
        stops, seconds = self.accelerator.reduce(values, "sum").tolist()
        self.ranks.mark("evaluating")
        interval.synced(block, seconds / self.accelerator.num_processes)
        return stops > 0


def make_evaluator(
    dataset: Any, saved: SavedRun, config: TrainConfig, task: Task, tta: str | None, ranks: Ranks
) -> Evaluator:
    """What evaluates a checkpoint on a data set of eval.py or predict.py, with the views `tta`; collective."""
    accelerator, spec = make_accelerator(ranks, config), saved.spec.for_evaluation()
    model = place_model(load_for_inference(saved, config, task, ranks), tta, accelerator)
    blocks = evaluation_blocks(len(dataset), config.eval_batch_size)
    loader = accelerator.prepare(make_loader(dataset, blocks, config, ranks.threads, ranks.device))
    batches = Batches(loader, spec, config, accelerator.device, training=False)
    return Evaluator(ranks, accelerator, model, batches, task, config)


@torch.no_grad()
def model_rate(evaluator: Evaluator, spec: InputSpec) -> float:
    """Images per second of the model alone, on a random batch on the device, on all ranks at once; collective."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it warns if CUDA finds no GPU
    from torch.utils.benchmark import Timer  # takes long to import

    accelerator, shape = evaluator.accelerator, (evaluator.config.eval_batch_size, spec.channels, *spec.size)
    with evaluator.ranks.agree(), same_kernels(), accelerator.autocast(), fix_for_memory("lower --eval_batch_size"):
        images = torch.randn(shape, device=accelerator.device).contiguous(memory_format=evaluator.batches.format)
        names = {"model": evaluator.model.eval(), "images": images}
        timer = Timer("model(images)", globals=names, num_threads=torch.get_num_threads())
        own = len(images) / timer.blocked_autorange(min_run_time=2.5).median
    return sum(evaluator.ranks.gather(own))


@contextmanager
def same_kernels() -> Iterator[None]:
    """Do not let cuDNN choose kernels by measured time: ranks could use different ones and get different results."""
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def gather_rows(accelerator: Accelerator, rows: Tensor, counts: list[int]) -> Tensor:
    """The `rows` [n, ...] of all ranks, one rank after the other; collective.

    `counts` has the n of each rank. They differ, and `accelerator.gather` needs tensors of one shape, so the rows are
    padded.
    """
    padded = rows.new_zeros(max(1, *counts), *rows.shape[1:])
    if not padded.numel():  # rows of no columns
        return rows.new_zeros(sum(counts), *rows.shape[1:])
    padded[: len(rows)] = rows
    parts = accelerator.gather(padded).split(len(padded))
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def check_outputs(numbers: Any, checkpoint: Path) -> None:
    """Raise UserError unless all of these numbers, which follow from the outputs of a model, are finite."""
    if not np.isfinite(numbers).all():
        fix = "try --mixed_precision no, or use another checkpoint"
        raise UserError(f"{checkpoint}: outputs of the model are NaN or infinite", fix)
