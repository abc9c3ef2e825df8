"""--dry_run: build everything, compute one update and one evaluation batch, and leave nothing
behind.
"""

import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from utils.console import say
from utils.data import Batch, evaluation_blocks
from utils.files import expand
from utils.memory import bytes_text
from utils.settings.train import TrainConfig
from utils.training import Evaluator, Run, SyncInterval, synchronise


def settings_of_dry_run(config: TrainConfig) -> TrainConfig:
    """The settings of a dry run: those given, in a new run folder."""
    resume = config.resume
    folder = expand(config.output_dir) / (config.run_name or "")
    if resume == "auto":
        resume = str(folder) if (folder / "checkpoints" / "latest").exists() else None
    return replace(config, run_name=None, resume=resume, report_to=None)


def dry_run(run: Run, update: Callable[[Run, Iterator[Batch]], None]) -> None:
    """Compute one update and one evaluation batch, and print what they need; collective.

    Both begin with their largest batch. The run folder is deleted.
    """
    size = run.plan.update_size(run.state.position)
    block = evaluation_blocks(len(run.data.evaluation), run.config.eval_batch_size).largest
    try:
        training = _measured(run, lambda: _first_update(run, update))
        evaluation = _measured(run, lambda: _first_block(run.evaluator))
        batches = f"an evaluation batch of {block} images {evaluation}"
        say(f"dry run: an update of {size} images took {training}, {batches}; nothing was saved")
    finally:
        run.log.close()
        if run.ranks.is_main:
            shutil.rmtree(run.folder, ignore_errors=True)


def _measured(run: Run, action: Callable[[], None]) -> str:
    """The seconds of an action, and the largest memory of a process; collective."""
    start = time.perf_counter()
    action()
    memory = bytes_text(max(run.ranks.gather(_peak(run.accelerator.device))))
    return f"{time.perf_counter() - start:.1f} s (largest memory of a process: {memory})"


def _first_update(run: Run, update: Callable[[Run, Iterator[Batch]], None]) -> None:
    run.model.train()
    run.meter.restart()
    update(run, iter(run.train_batches))
    synchronise(run, SyncInterval())  # raises the errors of any rank


def _first_block(evaluator: Evaluator) -> None:
    task = evaluator.task
    columns = evaluator.collect(lambda *batch: {"values": task.evaluate(*batch)[0]}, most=1)
    columns["values"].tolist()  # waits for the device


def _peak(device: torch.device) -> int:
    """The most bytes that this process has used at a time: of its GPU since the last call, else of
    the host.
    """
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else 1024 * largest
