"""Predict the classes of images with a checkpoint; any number of processes writes the same file.

    python predict.py --ckpt runs/NAME photo.jpg                                       prints the most likely classes
    accelerate launch --config_file accelerate_configs/2gpu.yaml predict.py --ckpt runs/NAME photos --out photos.csv
    python predict.py --ckpt runs/NAME 'photos/**/*.jpg' --out photos.parquet --html photos.html

Images are decoded and resized as in an evaluation. `python predict.py --help` lists the settings.
"""

from utils.output import guard_output  # the first import: see its docstring

# isort: split
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

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
from utils.data.workers import check_workers
from utils.errors import UserError
from utils.files import check_output_file, expand, write_output
from utils.launch.exits import fix_for_memory
from utils.models.views import Views
from utils.models.zoo import build_model, check_model
from utils.predictions.gallery import page
from utils.predictions.inputs import find_images
from utils.predictions.partial import Partial
from utils.predictions.rows import Row, columns_of, make_rows, result_rows
from utils.predictions.tables import check_table_file, encode
from utils.ranks.accelerator import check_precision, compile_model, make_accelerator
from utils.ranks.ranks import Ranks
from utils.ranks.session import distributed_session
from utils.runs.evaluated import evaluated_at, find_saved, given_settings, remarks
from utils.runs.metadata import SavedRun
from utils.runs.weights import find_checkpoints
from utils.tasks.table import make_task
from utils.tasks.task import Task
from utils.training.bad_images import found_by_all
from utils.training.evaluation import gather_rows, same_kernels
from utils.training.predictions import check_outputs, check_predictions, most_likely

BLOCKS = 8  # of each process between two additions to FILE.partial


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
        kept, finished = open_partial(work)
        start, rows = time.perf_counter(), kept.rows if kept else []
        try:
            for new in predict(work, finished):
                ranks.run_on_main(partial(kept.append if kept else rows.extend, new))
        except KeyboardInterrupt:
            if kept:
                print(f"{kept.path} keeps {len(rows)} of {len(work.split)} predictions; the same command goes on")
            raise
        ranks.run_on_main(lambda: write(work, rows))
        if kept:
            kept.delete()
        if ranks.is_main:
            seconds = time.perf_counter() - start
            print(report(work, rows, seconds, (len(rows) - finished) / seconds))
        ranks.run_on_main(lambda: check_any_read(rows))
    return {"count": len(work.split), "rows": rows}


def check_flags(flags: PredictConfig) -> None:
    """Raise ValueError for errors that one process can detect alone."""
    find_checkpoints(expand(flags.ckpt), flags.average)
    check_workers(flags.num_workers)
    if flags.out:
        check_table_file("--out", expand(flags.out))
    if flags.html:
        check_output_file("--html", expand(flags.html))


def prepare(flags: PredictConfig, ranks: Ranks) -> Work:
    """Find the checkpoint and the images; collective."""
    saved = find_saved(flags.ckpt, flags.average, flags.weights, ranks)
    config = replace(saved.settings, **given_settings(flags))
    spec = saved.spec.for_evaluation().cropped(config.eval_crop)
    saved = evaluated_at(saved, spec)

    def check() -> tuple[TrainConfig, Task]:
        check_precision(config, ranks)
        check_model(config)
        resolved, task = make_task(config, saved.class_names, None)
        check_predictions(task)
        return resolved, task

    config, task = ranks.run_on_all(check)
    split = ranks.run_on_all(lambda: find_images(flags.paths), main_first=True, place="listing the images")
    ranks.check_same(split.fingerprint, "different images")
    return Work(
        flags=flags,
        config=config,
        saved=saved,
        task=task,
        split=split,
        ranks=ranks,
        accelerator=make_accelerator(ranks, config),
    )


def open_partial(work: Work) -> tuple[Partial | None, int]:
    """The file of finished rows (on the main process, with --out), and the number of these rows; collective."""
    flags, config, saved = work.flags, work.config, work.saved
    assert saved.weights is not None
    precision = work.accelerator.mixed_precision
    about = {
        "images": work.split.fingerprint,
        "weights": fingerprint_of(json.dumps(saved.weights.manifests), saved.weights.part),
        "settings": f"{config.eval_batch_size} {flags.top} {flags.tta} {config.threshold} {precision}",
    }
    out = expand(flags.out) if flags.out else None
    kept = work.ranks.run_on_main(lambda: Partial(out, about)) if out else None
    finished = int(work.ranks.broadcast_text(str(len(kept.rows)) if kept else "0"))
    if kept and finished:
        print(f"{kept.path}: {finished} of {len(work.split)} images are already predicted")
    return kept, finished


@torch.no_grad()
def predict(work: Work, finished: int) -> Iterator[list[Row]]:
    """The rows of the images from number `finished` on, several blocks at a time; empty on all ranks but rank 0.

    A block has the same images on any number of processes, so its predictions are the same, too. Collective.
    """
    config, ranks, accelerator = work.config, work.ranks, work.accelerator
    spec, block = work.saved.spec.for_evaluation(), config.eval_batch_size
    blocks = BlockSampler(len(work.split), block, -(-finished // block))
    if not len(blocks):
        return
    dataset = ImagesToPredict(work.split, spec, make_augmentation(config, spec, training=False))
    if len(blocks) == 1:  # a loader process decodes whole blocks, so it would save no time
        config = replace(config, num_workers=0)
    loader = accelerator.prepare(make_loader(dataset, blocks, config, ranks.threads, ranks.device))
    batches = Batches(loader, spec, config, accelerator.device, training=False)
    model, together = load_model(work), BLOCKS * accelerator.num_processes
    own = iter(Terminal(ranks.is_main).progress("predicting")(batches))
    with same_kernels(), fix_for_memory("lower --eval_batch_size"):
        for begin in range(finished, len(work.split), together * block):
            ranks.mark("predicting")
            parts = [predict_batch(work, model, batch) for batch in islice(own, BLOCKS)]
            ranks.mark_waiting(f"the predictions from image {begin} on")
            yield gather(work, parts, found_by_all(ranks, batches), begin)


def load_model(work: Work) -> nn.Module:
    """The model on the device, in evaluation mode; collective."""
    saved, flags = work.saved, work.flags
    model = work.ranks.run_on_all(lambda: build_model(work.config, saved.spec, work.task.outputs, load=False))
    assert saved.weights is not None
    work.ranks.run_on_all(partial(saved.weights.load, model), place="loading the weights")
    compile_model(work.accelerator, model)
    return (Views(model, flags.tta) if flags.tta else model).to(work.accelerator.device).eval()


def predict_batch(work: Work, model: nn.Module, batch: Batch) -> tuple[Tensor, ...]:
    """The indices int64 [n], and `top` and `scores` of `Predictions`."""
    with work.accelerator.autocast():
        outputs = model(batch.images)
    return batch.indices, *most_likely(work.task, outputs.float(), work.flags.top)


def gather(work: Work, parts: list[tuple[Tensor, ...]], bad: dict[int, str], begin: int) -> list[Row]:
    """The rows of all ranks' batches in the order of the images, on the main process; collective.

    The images are consecutive from number `begin` on; those in `bad` have an error instead of a prediction.
    """
    device, ranks = work.accelerator.device, work.ranks
    # A rank without images needs the shapes and types, too.
    nothing = most_likely(work.task, torch.zeros(0, work.task.outputs, device=device), work.flags.top)
    parts = [(torch.zeros(0, dtype=torch.int64), *nothing), *parts]
    own = [torch.cat(column).to(device) for column in zip(*parts, strict=True)]
    counts = [int(text) for text in ranks.gather_text(str(len(own[0])))]
    indices, top, scores = (gather_rows(work.accelerator, each, counts).cpu().numpy() for each in own)
    check_outputs(scores, work.saved.path)
    if not ranks.is_main:
        return []
    made = make_rows(work.task, work.saved.class_names, top, scores, work.flags.top)
    rows = dict(zip(indices.tolist(), made, strict=True))
    rows |= {position: Row(None, [], [], reason) for position, reason in bad.items()}
    if sorted(rows) != list(range(begin, begin + len(rows))) or len(rows) < len(indices) + len(bad):
        raise RuntimeError(f"the images from number {begin} on were not predicted once each; please report this")
    return [rows[position] for position in sorted(rows)]


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


def report(work: Work, rows: list[Row], seconds: float, speed: float) -> str:
    """The result as a table: the first images, and the totals of all."""
    lines = result_rows(rows, work.split)
    lines.append(("seconds", f"{seconds:.2f}, {speed:.1f} images/s"))
    lines += [("written", path) for path in (work.flags.out, work.flags.html) if path]
    return table(f"Predictions of {work.saved.path}", lines)


if __name__ == "__main__":
    main()
