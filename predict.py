"""Predict the classes of images with a checkpoint; any number of processes writes the same file.

    python predict.py --ckpt runs/NAME photo.jpg        prints the most likely classes
    python predict.py --ckpt runs/NAME 'photos/**/*.jpg' --out photos.parquet --html photos.html
    accelerate launch --config_file accelerate_configs/2gpu.yaml predict.py --ckpt runs/NAME photos

Images are decoded and resized as in an evaluation. `python predict.py --help` lists the settings.
"""

from utils.entry import guard_output  # the first import, see there

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from extras.images import find_images
from extras.page.html import gallery
from extras.page.predictions import Row, encode, make_rows, result_rows
from utils.config import parse_args
from utils.console import printable, say, table
from utils.data import PhotoDataset, Split, check_images, fingerprint_of, shrink
from utils.errors import UserError
from utils.files import expand, write_file
from utils.ranks import Ranks, Stopping, distributed_session, make_accelerator
from utils.replacing import HTML, TABLE, check_output
from utils.runs import find_checkpoint
from utils.runs.inference import Inference, load_model, open_inference, place_model
from utils.settings.scripts import PredictConfig
from utils.settings.train import TrainConfig
from utils.tasks import Task, make_task
from utils.training import Evaluator, check_finite, make_eval_loader


def main(argv: Sequence[str] | None = None) -> dict:
    """Predict with these arguments; returns the number of images and, on the main process, their
    rows.
    """
    guard_output()
    flags = parse_args(PredictConfig, "predict.py", argv)
    with distributed_session("predict.py", flags) as ranks, Stopping(ranks) as stopping:
        # Errors that one process can detect alone are reported before the processes connect.
        find_checkpoint(expand(flags.ckpt))
        check_output(flags, "out", TABLE)
        check_output(flags, "html", HTML)
        ranks.join()
        found = open_inference(flags, ranks)
        with ranks.agree():
            _, task = make_task(found.config, found.class_names)
            task.check_predictions()
        split = load_images(flags, found.config, ranks)
        for note in split.notes:
            say(printable(note))
        start = time.perf_counter()
        rows = predict(flags, found, task, split, ranks)
        stopping.defer_signals()  # what is finished is written
        ranks.from_main(lambda: write(flags, found, task, rows, split))
        if ranks.is_main:
            seconds = time.perf_counter() - start
            lines = [
                *result_rows(rows, split),
                ("seconds", f"{seconds:.2f}, {len(rows) / seconds:.1f} images/s"),
            ]
            lines += [("written", path) for path in (flags.out, flags.html) if path]
            print(table(f"Predictions of {found.path}", lines))
        with ranks.agree():
            if rows and all(row.error for row in rows):
                problem = f"none of the {len(rows)} images can be read (the first: {rows[0].error})"
                raise UserError(problem, "check that the paths name image files")
    return {"count": len(split), "rows": rows}


def load_images(flags: PredictConfig, config: TrainConfig, ranks: Ranks) -> Split:
    """The images to predict, the same on all ranks; collective."""
    with ranks.local_main_first("checking the images"):
        split = replace(find_images(flags.paths, config.cache_dir), bits=config.image_bits)
        split = check_images(split, True, config.cache_dir)
    fingerprint = fingerprint_of(split.fingerprint, split.content, *sorted(split.errors))
    ranks.check_same(fingerprint, "different images")
    return split


def predict(
    flags: PredictConfig, found: Inference, task: Task, split: Split, ranks: Ranks
) -> list[Row]:
    """The rows of all images, in their order; empty on all ranks but rank 0; collective.

    A block has the same images on any number of processes, so its predictions are the same, too.
    """
    config = found.config
    spec = found.spec.for_evaluation()
    readable = split.select(np.flatnonzero(split.readable))
    # without a cache, because each image is read once
    dataset = PhotoDataset(shrink(readable, spec, config.shrink), spec)
    # A loader process decodes whole blocks, so for a single block it would save no time.
    if len(dataset) <= config.eval_batch_size:
        config = replace(config, num_workers=0)
    accelerator = make_accelerator(ranks, config, fixed_order=config.fixed_order)
    model = place_model(load_model(found, task, ranks), flags.tta, accelerator)
    loader = make_eval_loader(dataset, config, ranks)
    # Not the model: ranks may have different numbers of batches, which DDP does not allow.
    loader = accelerator.prepare(loader)
    evaluator = Evaluator(ranks, accelerator, model, loader, spec, task, config)

    def step(outputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        top, scores = task.most_likely(outputs, flags.top)
        return {"top": top, "scores": scores}

    columns = evaluator.in_order(accelerator.gather(evaluator.collect(step)))
    top, scores = columns["top"], columns["scores"]
    check_finite(scores, found.path)
    if not ranks.is_main:
        return []
    good = iter(make_rows(task, top, scores, flags.top))
    bad = split.errors
    return [Row(None, [], bad[n]) if n in bad else next(good) for n in range(len(split))]


def write(
    flags: PredictConfig, found: Inference, task: Task, rows: list[Row], split: Split
) -> None:
    """Write the files of --out and --html."""
    if flags.out:
        out = expand(flags.out)
        count = min(flags.top, len(task.class_names))
        cells = [
            {"path": split.describe(number), **row.cells(count), "error": row.error}
            for number, row in enumerate(rows)
        ]
        write_file(out, encode(cells, out))
    if flags.html:
        title = f"Predictions of {found.config.model}, update {found.origin['step']}"
        write_file(expand(flags.html), gallery(title, rows, split))


if __name__ == "__main__":
    main()
