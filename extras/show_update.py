"""What replay.py shows of an update: the losses of its microbatches, and the samples of one."""

import math
import pdb
from collections.abc import Iterator

import torch

from extras.first_batch import label_lines, picture
from utils.console import table
from utils.data import Batch
from utils.files import expand, write_file
from utils.models import main_output, restored_buffers
from utils.settings.scripts import ReplayConfig
from utils.training import Run, rounded

_LOGITS = 5  # printed for each sample


def show(run: Run, batches: Iterator[Batch], flags: ReplayConfig) -> dict:
    """Compute the losses of the next update's microbatches, then print the samples of one of them;
    returns the losses.

    By default, that is the first microbatch with a NaN or infinite loss, else number 0.
    """
    losses = list[float]()
    samples = 0
    first_bad = None
    # The other batches are not kept: there may be many.
    with restored_buffers(run.module), torch.no_grad():
        for number in range(run.plan.microbatches):
            microbatch = next(batches)
            samples += len(microbatch.labels)
            loss = rounded(compute_loss(run, microbatch)[0]).item()
            losses.append(loss)
            if number == (flags.microbatch or 0):
                batch = microbatch
            if first_bad is None and not math.isfinite(loss):
                first_bad = microbatch
    run.train_batches.check()
    if flags.microbatch is None and first_bad is not None:
        batch = first_bad
    print(f"update {flags.update}: loss {math.fsum(losses) / max(1, samples)}")
    name = f"microbatch {batch.number} of update {flags.update}"
    loss = losses[batch.number]
    print(f"{name}: sum of losses {loss}; the update has {len(losses)} microbatches")
    path = expand(flags.run) / "replay" / f"{name.replace(' ', '-')}.png"
    path.parent.mkdir(exist_ok=True)
    if len(batch.labels):
        write_file(path, picture(run, batch))
        print(f"up to 64 of its images: {path}")
    print_samples(run, batch, flags.pdb)
    return {"losses": losses}


def print_samples(run: Run, batch: Batch, stop: bool) -> None:
    """Print the samples of a microbatch with their classes and logits.

    With `stop`, opens the debugger before the forward pass.
    """
    if stop:
        names = "batch.images, batch.labels and run.module"
        print(f"next: the forward pass, in compute_loss; look at {names}")
        pdb.set_trace()
    _, outputs = compute_loss(run, batch)
    rows = [("sample", f"class; the first {_LOGITS} logits")]
    columns = batch.indices.tolist(), batch.labels.tolist(), outputs
    for place, label, logits in zip(*columns, strict=True):
        classes = ", ".join(label_lines(label, run.data.class_names))
        numbers = " ".join(f"{logit:.3g}" for logit in logits[:_LOGITS].tolist())
        rows.append((run.data.train.describe(place), f"{classes}; {numbers}"))
    print(table(f"{len(batch.labels)} samples", rows))


def compute_loss(run: Run, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The summed loss of a microbatch and its logits."""
    run.gradients.seed(batch)
    outputs = run.model(batch.images)
    return run.task.loss(outputs, batch.labels), main_output(outputs)
