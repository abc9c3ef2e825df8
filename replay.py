"""Compute one update of a run again, in one process, and show the samples and layers of one of its microbatches.

    python replay.py --run runs/NAME --update 120
    python replay.py --run runs/NAME --update 120 --microbatch 3 --pdb

It starts from the newest checkpoint before the update, or from the initial weights. It changes nothing in the run
folder, except that it adds pictures in `replay/`. `python replay.py --help` lists the settings.
"""

from utils.output import guard_output  # the first import: see its docstring

# isort: split
import json
import math
import pdb
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import train
from utils.config.bounds import require
from utils.config.cli import parse_args, read_config
from utils.config.scripts import ReplayConfig
from utils.config.settings import TrainConfig
from utils.console import table
from utils.data.datasets import Batch
from utils.files import expand, write_file
from utils.ranks.session import distributed_session
from utils.ranks.stopping import Stopping
from utils.runs.inference import given_settings
from utils.runs.manifest import checkpoints_of, damage_of, step_of
from utils.training.first_batch import label_lines, picture
from utils.training.inspection import Inspection, first_bad_layer
from utils.training.loop import log_training, synchronise
from utils.training.meter import SyncInterval, rounded
from utils.training.run import Run
from utils.training.schedule import due_after, reduce_on_plateau

_ROWS = 12  # of the largest gradients
_LOGITS = 5  # printed for each sample


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Show a microbatch, and return the numbers that were shown."""
    guard_output()
    flags = parse_args(ReplayConfig, "replay.py", argv)
    with (
        TemporaryDirectory() as scratch,
        distributed_session("replay.py", flags) as ranks,
        Stopping(ranks) as stopping,
    ):
        require(ranks.topology.world_size == 1, "replay.py runs in one process", "start it with plain python")
        folder = expand(flags.run)
        records = read_log(folder)
        config = settings_of(flags, folder, records, scratch)
        ranks.threads = config.threads or ranks.threads
        torch.set_num_threads(ranks.threads)
        ranks.join()
        run = train.build(config, ranks, stopping)
        check_initial_weights(run, records)
        number, last = flags.microbatch or 0, run.plan.microbatches - 1
        require(flags.update <= run.updates, f"--update {flags.update}: the last one of the run is {run.updates}")
        require(number <= last, f"--microbatch {number}: the last one of the update is {last}")
        batches = iter(run.train_batches)
        recompute(run, batches, flags.update - 1, records)
        print(compare_losses(run.folder, records), end="")
        return show(run, batches, flags, records, folder)


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The records of a run. Raises ValueError if its folder has no log."""
    path = folder / "log.jsonl"
    require(path.is_file(), f"--run {folder}: has no log.jsonl", "name a run folder, such as runs/NAME")
    lines = path.read_text().split("\n")[:-1]  # a run may be writing the last line
    return [json.loads(line) for line in lines]


def losses_by_update(records: list[dict]) -> dict[int, float | None]:
    """The logged training losses, by the update of their record."""
    return {record["step"]: record["loss"] for record in records if record["kind"] == "train"}


def settings_of(flags: ReplayConfig, folder: Path, records: list[dict], scratch: str) -> TrainConfig:
    """The settings that repeat the run in one process, from the newest checkpoint before the update."""
    starts = [record for record in records if record["kind"] == "start" and record["step"] < flags.update]
    require(bool(starts), f"--run {folder}: the log begins after update {flags.update}", "name a later update")
    start, config = starts[-1], read_config(folder / "config.yaml")
    before = [path for path in checkpoints_of(folder / "checkpoints") if step_of(path) < flags.update]
    checkpoint = next((path for path in reversed(before) if damage_of(path) is None), None)
    first = step_of(checkpoint) if checkpoint else 0
    where = checkpoint or "the initial weights"
    print(f"replaying update {flags.update} of {folder} from {where}")
    print(f"updates to compute before it: {flags.update - 1 - first}")
    return replace(
        config,
        **given_settings(flags),
        cpu=flags.cpu,
        traceback=flags.traceback,
        output_dir=scratch,
        run_name="replay",
        resume=str(checkpoint) if checkpoint else None,
        report_to=None,
        threads=flags.threads or start["threads"],
        grad_accum=None if config.microbatches else start["processes"] * start["grad_accum"],
    )


def check_initial_weights(run: Run, records: list[dict]) -> None:
    """Raise UserError if the run began with other weights than --init_from has now."""
    before = [record["init_weights"] for record in records if "init_weights" in record]
    same = run.source is None or not before or before[0] == run.source.weights
    problem = f"--init_from {run.config.init_from}: has other weights now than when the run began"
    require(same, problem, "restore them, or replay an update after a checkpoint of the run")


def recompute(run: Run, batches: Iterator[Batch], until: int, records: list[dict]) -> None:
    """Train up to update `until` as the run did, and log at the same updates.

    Nothing is evaluated: --lr_schedule plateau uses the evaluations in the log.
    """
    evaluations = {record["step"]: record for record in records if record["kind"] == "eval"}  # the last one counts

    def count_evaluation() -> None:
        if record := evaluations.get(run.state.step):
            run.state.add_evaluation(record, run.task.metric, run.task.higher_is_better)
            reduce_on_plateau(run.config, run.state, run.updates)

    if run.state.owes_evaluation:
        count_evaluation()
    run.model.train()
    run.meter.restart()
    interval = SyncInterval(run.state.step)
    while run.state.step < until:
        train.train_update(run, batches)
        run.log.advance()
        if due_after(run.config, run.state, run.updates).log or interval.due(run.state.step):
            synchronise(run, interval)
            if due_after(run.config, run.state, run.updates).log:
                log_training(run)
            run.meter.restart()
        count_evaluation()


def compare_losses(replayed: Path, records: list[dict]) -> str:
    """A line on whether the losses in the replay's log are those of the run; empty if there are none."""
    ours, logged = losses_by_update(read_log(replayed)), losses_by_update(records)
    again = [step for step in ours if step in logged]
    different = [step for step in again if ours[step] != logged[step]]
    if not different:
        return f"logged losses computed again: {len(again)}, all with the same bits\n" * bool(again)
    first = different[0]
    return (
        f"logged losses computed again: {len(again)}; {len(different)} differ, the first at update {first}: "
        f"{ours[first]} instead of {logged[first]}. On another number of processes, only runs with --microbatches "
        "repeat every bit\n"
    )


def show(run: Run, batches: Iterator[Batch], flags: ReplayConfig, records: list[dict], folder: Path) -> dict[str, Any]:
    """Compute the losses of the next update's microbatches, then print and return the details of one of them."""
    update = run.state.step + 1
    losses, samples, batch = losses_of(run, batches, flags.microbatch)
    loss = math.fsum(losses) / max(1, samples)
    print(f"update {update}: loss {loss}, {compare_loss(records, update, loss)}")
    found = {"update": update, "microbatch": batch.number, "losses": losses, **inspect(run, batch, flags.pdb)}
    print(describe(found, run))
    path = folder / "replay" / f"update-{update}-microbatch-{batch.number}.png"
    path.parent.mkdir(exist_ok=True)
    if len(batch.labels):
        write_file(path, picture(run, batch))
        print(f"up to 64 of its images: {path}")
    return found


def losses_of(run: Run, batches: Iterator[Batch], number: int | None) -> tuple[list[float], int, Batch]:
    """The sum of losses of each microbatch of the next update, their number of samples, and the microbatch to show.

    This is the microbatch with the given number; by default the first one with a NaN or infinite loss, else number 0.
    """
    losses: list[float] = []
    samples, shown = 0, next(batches)
    for place in range(run.plan.microbatches):
        batch = next(batches) if place else shown
        with Inspection.restored(run.module):
            loss, _ = loss_of(run, batch)
        is_first_bad = number is None and not loss.isfinite() and all(map(math.isfinite, losses))
        if place == number or is_first_bad:
            shown = batch
        losses.append(rounded(loss).item())
        samples += len(batch.labels)
    run.train_batches.check()
    return losses, samples, shown


def inspect(run: Run, batch: Batch, stop: bool) -> dict[str, Any]:
    """The samples and outputs of a microbatch, and what its forward and backward pass does in each layer.

    With `stop`, opens the debugger before the forward pass.
    """
    if stop:
        print("next: the forward pass, in loss_of; look at batch.images, batch.labels and run.module")
        pdb.set_trace()
    with Inspection(run.module) as inspection:
        loss, outputs = loss_of(run, batch)
        run.accelerator.backward(loss * run.gradients.loss_scale(run.state.position))
    return {
        "samples": [run.data.train.describe(position) for position in batch.indices.tolist()],
        "labels": batch.labels.tolist(),
        "logits": outputs.detach().float().tolist(),
        "gradient_norms": inspection.gradient_norms(),
        "first_bad_layer": first_bad_layer(inspection),
    }


def loss_of(run: Run, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The summed loss and the outputs of a microbatch."""
    run.gradients.seed(batch)
    outputs = run.model(batch.images)
    return run.task.loss(outputs, batch.labels), outputs


def compare_loss(records: list[dict], step: int, loss: float) -> str:
    """Whether the loss of an update is that of the log, if the log has a record of this update alone."""
    trained = losses_by_update(records)
    if step not in trained or step - 1 not in (0, *trained):
        return "not compared: the log has no record of this update alone (--log_every 1 writes one)"
    logged = trained[step]
    if logged == loss or (logged is None and not math.isfinite(loss)):
        return "the same bits as in the log"
    return f"but {logged} in the log"


def describe(found: dict[str, Any], run: Run) -> str:
    """The samples, the loss and the largest gradients of a microbatch as text."""
    number, rows = found["microbatch"], []
    for sample, label, logits in zip(found["samples"], found["labels"], found["logits"], strict=True):
        more = " ..." if len(logits) > _LOGITS else ""
        classes = ", ".join(label_lines(label, run.data.class_names))
        rows.append((sample, f"{classes}; logits {' '.join(f'{value:.3g}' for value in logits[:_LOGITS])}{more}"))
    title = f"Microbatch {number} of update {found['update']}, which has {run.plan.microbatches}; {len(rows)} samples"
    rows.append(("sum of losses", found["losses"][number]))
    norms = sorted(found["gradient_norms"].items(), key=lambda item: -item[1] if math.isfinite(item[1]) else -math.inf)
    layers = [(name, f"{norm:.4g}") for name, norm in norms[:_ROWS]]
    tables = [table(title, rows), table("Largest gradient norms", layers)]
    return "\n".join([*tables, found["first_bad_layer"] or "no layer has NaN or infinite values"])


if __name__ == "__main__":
    main()
