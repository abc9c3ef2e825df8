"""--dry_run: build everything, compute one update, and leave nothing behind."""

import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from utils.config.settings import TrainConfig
from utils.data.batches import Batch
from utils.files import expand
from utils.memory import bytes_text
from utils.training.meter import Pace
from utils.training.run import Run
from utils.training.synchronise import synchronise


def trial(config: TrainConfig) -> TrainConfig:
    """The settings of a dry run: those given, in a new run folder. Without --dry_run they are unchanged."""
    if not config.dry_run:
        return config
    resume, folder = config.resume, expand(config.output_dir) / (config.run_name or "")
    if resume == "auto":
        resume = str(folder) if (folder / "checkpoints" / "latest").exists() else None
    return replace(config, run_name=None, resume=resume)


def dry_run(run: Run, update: Callable[[Run, Iterator[Batch]], None]) -> dict:
    """Compute one update, print its time and the memory that it needed, and delete the run folder; collective.

    The update begins with its largest microbatch. Returns the seconds and the largest memory of a process in bytes.
    """
    try:
        return _first_update(run, update)
    finally:
        run.log.close()
        if run.ranks.is_main:
            shutil.rmtree(run.folder.path, ignore_errors=True)


def _first_update(run: Run, update: Callable[[Run, Iterator[Batch]], None]) -> dict:
    device, start = run.accelerator.device, time.perf_counter()
    size, pace = run.plan.update_size(run.state.position), Pace(run.state.step)
    run.model.train()
    run.meter.restart()
    update(run, iter(run.train_batches))
    synchronise(run, pace)  # raises the errors of any rank
    seconds = time.perf_counter() - start
    peaks = [int(text) for text in run.ranks.gather_text(str(_peak(device)))]
    where = "GPU memory" if device.type == "cuda" else "memory of a process"
    text = f"dry run: the first update, of {size} images, took {seconds:.1f} s; "
    run.log.say(f"{text}largest {where} {bytes_text(max(peaks))}; nothing was saved")
    return {"seconds": seconds, "memory": max(peaks)}


def _peak(device: torch.device) -> int:
    """The most bytes that this process has used at a time: of its GPU, else of the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
