"""Compute one update of a run again, in one process, and show what one of its microbatches saw.

    python replay.py --run runs/NAME --update 120
    python replay.py --run runs/NAME --update 120 --microbatch 3 --pdb

It starts from the newest checkpoint before the update, or from the initial weights, and changes nothing in the run but
a folder `replay` with the pictures. `python replay.py --help` lists the settings.
"""

from utils.output import guard_output  # the first import: see its docstring

# isort: split
import json
import math
import pdb
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import train
from utils.config.cli import parse_args, read_config
from utils.config.scripts import ReplayConfig
from utils.config.settings import TrainConfig
from utils.console import table
from utils.data.batches import Batch
from utils.data.order import fold_in
from utils.errors import UserError
from utils.files import expand, write_file
from utils.models.zoo import seed_layers
from utils.ranks.session import distributed_session
from utils.ranks.stopping import Stopping
from utils.runs.manifest import checkpoints_of, damage_of, step_of
from utils.training.first_batch import picture
from utils.training.inspection import Inspection, first_bad_layer
from utils.training.meter import Pace, rounded
from utils.training.run import Run
from utils.training.schedule import due_after
from utils.training.synchronise import log_training, synchronise

_ROWS = 12  # of the largest gradients
_LOGITS = 5  # printed for each sample


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Show a microbatch, and return what was shown."""
    guard_output()
    flags = parse_args(ReplayConfig, "replay.py", argv)
    with (
        ThreadPoolExecutor(1) as saver,
        TemporaryDirectory() as scratch,
        distributed_session("replay.py", flags) as ranks,
        Stopping(lambda: ranks.orphaned) as stopping,
    ):
        if ranks.topology.world_size > 1:
            raise UserError("replay.py runs in one process", "start it with plain python")
        folder = expand(flags.run)
        records = read_log(folder)
        config = settings_of(flags, folder, records, scratch)
        ranks.threads = config.threads or ranks.threads
        torch.set_num_threads(ranks.threads)
        ranks.join()
        run = train.build(config, ranks, stopping, saver)
        if flags.update > run.updates:
            raise UserError(f"--update {flags.update}: the run has {run.updates} updates", "name an earlier one")
        batches = iter(run.train_batches)
        recompute(run, batches, flags.update - 1)
        print(compared(read_log(run.folder.path), records))
        return show(run, batches, flags, records, folder)


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The records of a run. Raises ValueError if its folder has no log."""
    path = folder / "log.jsonl"
    if not path.is_file():
        raise UserError(f"--run {folder}: has no log.jsonl", "name a run folder, such as runs/NAME")
    lines = path.read_text().splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]  # a run may be writing the last line


def losses_by_update(records: list[dict]) -> dict[int, float | None]:
    """The logged training losses, by the update of their record."""
    return {record["step"]: record["loss"] for record in records if record["kind"] == "train"}


def settings_of(flags: ReplayConfig, folder: Path, records: list[dict], scratch: str) -> TrainConfig:
    """The settings that repeat the run in one process, from the newest checkpoint before the update."""
    starts = [record for record in records if record["kind"] == "start" and record["step"] < flags.update]
    if not starts:
        raise UserError(f"--run {folder}: the log does not begin before update {flags.update}", "name a later update")
    start, config = starts[-1], read_config(folder / "config.yaml")
    before = [path for path in checkpoints_of(folder / "checkpoints") if step_of(path) < flags.update]
    checkpoint = next((path for path in reversed(before) if damage_of(path) is None), None)
    first = step_of(checkpoint) if checkpoint else 0
    again = flags.update - 1 - first
    where = checkpoint or "the initial weights"
    print(f"replaying update {flags.update} of {folder} from {where}: {again} update(s) to compute before it")
    own = {name: getattr(flags, name) for name in ("num_workers", "data_dir", "cache_dir", "cpu", "traceback")}
    accumulation = None if config.microbatches else start["processes"] * start["grad_accum"]
    return replace(
        config,
        **own,
        output_dir=scratch,
        run_name="replay",
        resume=str(checkpoint) if checkpoint else None,
        threads=flags.threads or start["threads"],
        grad_accum=accumulation,
    )


def recompute(run: Run, batches: Iterator[Batch], until: int) -> None:
    """Train up to update `until` as the run did, and log at the same updates."""
    run.model.train()
    run.meter.restart()
    pace = Pace(run.state.step)
    while run.state.step < until:
        train.train_update(run, batches)
        run.log.advance()
        if due_after(run.config, run.state, run.updates).log or pace.due(run.state.step):
            synchronise(run, pace)
            if due_after(run.config, run.state, run.updates).log:
                log_training(run)
            run.meter.restart()


def compared(own: list[dict], records: list[dict]) -> str:
    """Whether the recomputed losses are those of the run's log, as a line."""
    logged = losses_by_update(records)
    pairs = [(step, loss, logged[step]) for step, loss in losses_by_update(own).items() if step in logged]
    different = [(step, here, there) for step, here, there in pairs if here != there]
    if not different:
        return f"{len(pairs)} recomputed loss(es) of the log, all equal to the last bit"
    step, here, there = different[0]
    return (
        f"{len(different)} of {len(pairs)} recomputed losses of the log differ, first that of update {step}: {here} "
        f"instead of {there}; only runs with --microbatches, and updates right after a checkpoint, are the same bits"
    )


def show(run: Run, batches: Iterator[Batch], flags: ReplayConfig, records: list[dict], folder: Path) -> dict[str, Any]:
    """Compute the losses of the update's microbatches, then print and return what one of them saw."""
    state, step = run.state, run.state.step
    parts = [next(batches) for _ in range(run.plan.microbatches)]
    run.train_batches.check()
    losses = []
    for batch in parts:
        with Inspection.restored(run.module):
            losses.append(rounded(loss_of(run, batch)[0].detach()).item())
    number = flags.microbatch
    if number is None:
        number = next((place for place, loss in enumerate(losses) if not math.isfinite(loss)), 0)
    if number >= len(parts):
        raise UserError(f"--microbatch {number}: the update has {len(parts)} microbatches", "name a lower number")
    total, count = math.fsum(losses), sum(len(batch.labels) for batch in parts)
    print(f"update {step + 1}: loss {total / count}, {agreement(records, step + 1, total / count)}")
    batch = parts[number]
    samples = [run.data.train.describe(position) for position in batch.indices.tolist()]
    if flags.pdb:
        print("next: the forward pass, in loss_of; batch.images, batch.labels and run.module are at hand")
        pdb.set_trace()
    with Inspection(run.module) as inspection:
        loss, outputs = loss_of(run, batch)
        run.accelerator.backward(loss * run.gradients.scale(state.position))
    found = {
        "update": step + 1,
        "microbatch": number,
        "losses": losses,
        "samples": samples,
        "labels": batch.labels.tolist(),
        "logits": outputs.detach().float().tolist(),
        "gradient_norms": inspection.gradient_norms(),
        "first_bad_layer": first_bad_layer(inspection),
    }
    print(described(found, run))
    path = folder / "replay" / f"update-{step + 1}-microbatch-{number}.png"
    path.parent.mkdir(exist_ok=True)
    write_file(path, picture(run, batch))
    print(f"its images: {path}")
    return found


def loss_of(run: Run, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The summed loss and the outputs of a microbatch."""
    seed_layers(run.accelerator.device, fold_in(run.config.seed, "layers", batch.update, batch.number))
    outputs = run.model(batch.images)
    return run.task.loss(outputs, batch.labels), outputs


def agreement(records: list[dict], step: int, loss: float) -> str:
    """How the loss of an update agrees with the log, if the log has a record of this update alone."""
    trained = losses_by_update(records)
    before = max((other for other in trained if other < step), default=0)
    if step not in trained or before != step - 1:
        return "which the log does not have for this update alone (--log_every 1)"
    logged = trained[step]
    if logged == loss or (logged is None and not math.isfinite(loss)):
        return "as in the log to the last bit"
    return f"not the {logged} of the log"


def described(found: dict[str, Any], run: Run) -> str:
    """The samples, the loss and the layers of a microbatch as text."""
    names, outputs = run.data.class_names, found["logits"]
    rows: list[tuple[str, Any]] = [("sum of losses", found["losses"][found["microbatch"]])]
    for sample, label, logits in zip(found["samples"], found["labels"], outputs, strict=True):
        more = " ..." if len(logits) > _LOGITS else ""
        rows.append((sample, f"{label}, logits {' '.join(f'{value:.3g}' for value in logits[:_LOGITS])}{more}"))
    title = f"Microbatch {found['microbatch']} of update {found['update']}, {len(names)} classes"
    norms = sorted(found["gradient_norms"].items(), key=lambda item: -item[1] if math.isfinite(item[1]) else -math.inf)
    layers = [(name, f"{norm:.4g}") for name, norm in norms[:_ROWS]]
    bad = found["first_bad_layer"] or "no layer has NaN or infinite values"
    return "\n".join([table(title, rows), table("Largest gradient norms", layers), bad])


if __name__ == "__main__":
    main()
