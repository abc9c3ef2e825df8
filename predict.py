"""Predict the classes of images with a checkpoint; any number of processes writes the same file.

    python predict.py --ckpt runs/NAME photo.jpg                                       prints the most likely classes
    accelerate launch --config_file accelerate_configs/2gpu.yaml predict.py --ckpt runs/NAME photos --out photos.csv
    python predict.py --ckpt runs/NAME 'photos/**/*.jpg' --out photos.parquet --html photos.html

Images are decoded and resized as in an evaluation. `python predict.py --help` lists the settings.
"""

from utils.output import guard_output  # the first import: see its docstring

# isort: split
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from utils.config.cli import parse_args
from utils.config.scripts import PredictConfig
from utils.config.settings import TrainConfig
from utils.console import Terminal, printable, table
from utils.data.augment import make_augmentation
from utils.data.batches import Batch, Batches
from utils.data.datasets import ImagesToPredict
from utils.data.order import BlockSampler
from utils.data.pipeline import make_loader
from utils.data.splits import Split, fingerprint_of
from utils.errors import UserError
from utils.files import check_output_file, expand, write_output
from utils.launch.exits import fix_for_memory
from utils.models.zoo import check_model
from utils.predictions.gallery import page
from utils.predictions.inputs import check_all, find_images
from utils.predictions.rows import Row, columns_of, make_rows, result_rows
from utils.predictions.tables import check_table_file, encode
from utils.ranks.accelerator import check_precision, make_accelerator
from utils.ranks.ranks import Ranks
from utils.ranks.session import distributed_session
from utils.runs.inference import (
    find_saved,
    given_settings,
    load_for_inference,
    place_model,
    remarks,
    set_evaluation_input,
)
from utils.runs.metadata import SavedRun
from utils.runs.weights import find_checkpoints
from utils.tasks.table import make_task
from utils.tasks.task import Task
from utils.training.evaluation import gather_rows, same_kernels
from utils.training.predictions import check_outputs, check_predictions, most_likely

BLOCKS = 8  # of each process between two synchronisations


@dataclass(kw_only=True)
class Work:
    """The images to predict, and the checkpoint and settings to predict them with."""

    flags: PredictConfig
    config: TrainConfig
    saved: SavedRun
    task: Task
    split: Split
    ranks: Ranks
    accelerator: Accelerator


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Predict with these arguments; returns the number of images and, on the main process, their rows."""
    guard_output()
    flags = parse_args(PredictConfig, "predict.py", argv)
    with distributed_session("predict.py", flags) as ranks:
        check_flags(flags)
        ranks.join()
        work = prepare(flags, ranks)
        for line in [*remarks(flags, work.config, work.saved.spec), *map(printable, work.split.notes)]:
            Terminal(ranks.is_main).print(line)
        start = time.perf_counter()
        rows = predict(work)
        with ranks.agree("writing the predictions"):
            if ranks.is_main:
                write(work, rows)
        if ranks.is_main:
            print(report(work, rows, time.perf_counter() - start))
        with ranks.agree():
            if ranks.is_main:
                check_any_read(rows)
    return {"count": len(work.split), "rows": rows}


def check_flags(flags: PredictConfig) -> None:
    """Raise ValueError for errors that one process can detect alone."""
    find_checkpoints(expand(flags.ckpt), flags.average)
    if flags.out:
        check_table_file("--out", expand(flags.out))
    if flags.html:
        check_output_file("--html", expand(flags.html))


def prepare(flags: PredictConfig, ranks: Ranks) -> Work:
    """Find the checkpoint and the images; collective."""
    saved = find_saved(flags.ckpt, flags.average, flags.weights, ranks)
    config = replace(saved.settings, **given_settings(flags))
    spec = saved.spec.for_evaluation().cropped(config.eval_crop)
    saved = set_evaluation_input(saved, spec)
    with ranks.agree():
        check_precision(config, ranks)
        check_model(config)
        config, task = make_task(config, saved.class_names, None)
        check_predictions(task)
    with ranks.local_main_first("listing the images"):
        split = find_images(flags.paths)
    with ranks.local_main_first("checking the images"):
        split = check_all(split, config.cache_dir, Terminal(ranks.is_main).progress("checking images"))
    same = fingerprint_of(split.fingerprint, split.content, *sorted(split.bad))
    ranks.check_same(same, "different images")
    return Work(
        flags=flags,
        config=config,
        saved=saved,
        task=task,
        split=split,
        ranks=ranks,
        accelerator=make_accelerator(ranks, config),
    )


@torch.no_grad()
def predict(work: Work) -> list[Row]:
    """The rows of all images, in their order; empty on all ranks but rank 0; collective.

    A block has the same images on any number of processes, so its predictions are the same, too.
    """
    config, ranks, accelerator, split = work.config, work.ranks, work.accelerator, work.split
    spec = work.saved.spec.for_evaluation()
    blocks = BlockSampler(len(split), config.eval_batch_size)
    dataset = ImagesToPredict(split, spec, make_augmentation(config, spec, training=False))
    if len(blocks) == 1:  # a loader process decodes whole blocks, so it would save no time
        config = replace(config, num_workers=0)
    loader = accelerator.prepare(make_loader(dataset, blocks, config, ranks.threads, ranks.device))
    batches = Batches(loader, spec, config, accelerator.device, training=False)
    model = place_model(load_for_inference(work.saved, config, work.task, ranks), work.flags.tta, accelerator)
    together, found = BLOCKS * accelerator.num_processes, list[tuple[int, Row]]()
    own = iter(Terminal(ranks.is_main).progress("predicting")(batches))
    with same_kernels(), fix_for_memory("lower --eval_batch_size"):
        for begin in range(0, len(blocks), together):
            ranks.mark("predicting")
            parts = [predict_batch(work, model, batch) for batch in islice(own, BLOCKS)]
            ranks.mark_waiting(f"the predictions from block {begin} on")
            with ranks.agree():
                batches.check()
            found += gather(work, parts)
    if not ranks.is_main:
        return []
    if sorted(index for index, _ in found) != np.flatnonzero(split.readable).tolist():
        raise RuntimeError("the images were not predicted once each; please report this")
    rows = dict(found) | {row: Row(None, [], [], reason) for row, reason in split.bad.items()}
    return [rows[position] for position in range(len(split))]


def predict_batch(work: Work, model: nn.Module, batch: Batch) -> tuple[Tensor, ...]:
    """The indices int64 [n], and `top` and `scores` of `Predictions`."""
    with work.accelerator.autocast():
        outputs = model(batch.images)
    return batch.indices, *most_likely(work.task, outputs.float(), work.flags.top)


def gather(work: Work, parts: list[tuple[Tensor, ...]]) -> list[tuple[int, Row]]:
    """The images of all ranks' batches and their rows, on the main process; collective."""
    device, ranks = work.accelerator.device, work.ranks
    # A rank without images needs the shapes and types, too.
    nothing = most_likely(work.task, torch.zeros(0, work.task.outputs, device=device), work.flags.top)
    parts = [(torch.zeros(0, dtype=torch.int64), *nothing), *parts]
    own = [torch.cat(column).to(device) for column in zip(*parts, strict=True)]
    counts = ranks.gather(len(own[0]))
    indices, top, scores = (gather_rows(work.accelerator, each, counts).cpu().numpy() for each in own)
    check_outputs(scores, work.saved.path)
    if not ranks.is_main:
        return []
    rows = make_rows(work.task, work.saved.class_names, top, scores, work.flags.top)
    return list(zip(indices.tolist(), rows, strict=True))


def write(work: Work, rows: list[Row]) -> None:
    """Write the files of --out and --html."""
    flags, split = work.flags, work.split
    if flags.out:
        paths = [split.describe(position) for position in range(len(rows))]
        count = min(flags.top, len(work.saved.class_names))
        columns = {"path": paths, **columns_of(rows, count), "error": [row.error for row in rows]}
        write_output(expand(flags.out), encode(columns, expand(flags.out)))
    if flags.html:
        title = f"Predictions of {work.config.model}, update {work.saved.state.step}"
        write_output(expand(flags.html), page(title, rows, split))


def check_any_read(rows: list[Row]) -> None:
    """Raise ValueError if no image could be read."""
    if rows and all(row.error for row in rows):
        problem = f"none of the {len(rows)} images can be read (the first: {rows[0].error})"
        raise UserError(problem, "check that the paths name image files")


def report(work: Work, rows: list[Row], seconds: float) -> str:
    """The result as a table: the first images, and the totals of all."""
    lines = result_rows(rows, work.split)
    lines.append(("seconds", f"{seconds:.2f}, {len(rows) / seconds:.1f} images/s"))
    lines += [("written", path) for path in (work.flags.out, work.flags.html) if path]
    return table(f"Predictions of {work.saved.path}", lines)


if __name__ == "__main__":
    main()
