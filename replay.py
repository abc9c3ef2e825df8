"""Recompute one update of a run in one process, and show the samples and layers of one of its
microbatches. Or, on any number of processes, verify updates of a run, or compare two runs.

    python replay.py --run runs/NAME --update 120
    python replay.py --run runs/NAME --update 120 --microbatch 3 --pdb
    python replay.py --run runs/NAME --verify random:20
    python replay.py --run runs/NAME --against runs/OTHER

It starts from the newest checkpoint before the update, or from the initial weights. It changes
nothing in the run folder, except that it adds pictures in `replay/`. `python replay.py --help`
lists the settings.
"""

from utils.output import guard_output  # the first import: see its docstring

# isort: split
import math
import pdb
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

import train
from extras.first_batch import label_lines, picture
from extras.verify import compare, verify
from utils.config import parse_args, require
from utils.console import table
from utils.data import Batch
from utils.files import expand, write_file
from utils.models import main_output, restored_buffers
from utils.ranks import Stopping, distributed_session
from utils.runs import beginnings, check_log, damage_of, read_log
from utils.runs.digest import differing
from utils.runs.inference import given_settings
from utils.settings.scripts import ReplayConfig
from utils.settings.train import TrainConfig, read_config
from utils.training import Run, SyncInterval, due_after, rounded, synchronise, training_record

_ROWS = 12  # of the largest gradients
_LOGITS = 5  # printed for each sample
_BITS = (
    "Losses of another number of processes repeat only with --microbatches, and those of a GPU "
    "only with that or --deterministic; the weights of --init_from must not have changed"
)
Layers = list[tuple[str, bool, bool]]  # name, and whether the inputs and the outputs are finite


def main(argv: Sequence[str] | None = None) -> dict | None:
    """Show a microbatch, and return the numbers that were shown; or verify or compare."""
    guard_output()
    flags = parse_args(ReplayConfig, "replay.py", argv)
    with (
        TemporaryDirectory() as scratch,
        distributed_session("replay.py", flags) as ranks,
        Stopping(ranks) as stopping,
    ):
        modes = map(bool, [flags.update, flags.verify, flags.against])  # an empty word is none
        require(sum(modes) == 1, "replay.py does one thing", "give --update, --verify or --against")
        alone = not flags.update or ranks.topology.world_size == 1
        require(alone, "--update needs one process", "start it with plain python")
        ranks.join()

        def begin(folder: Path, update: int) -> Run:
            config = make_settings(flags, folder, update, ranks.gather(scratch)[0])
            ranks.threads = config.threads or ranks.threads
            torch.set_num_threads(ranks.threads)
            return train.build(config, ranks, stopping, given=None)

        if flags.against:
            compare(flags, begin)
        if flags.verify:
            verify(flags, ranks, begin, recompute)
        if not flags.update:
            return None
        run = begin(expand(flags.run), flags.update)
        for flag, last in (("update", run.updates), ("microbatch", run.plan.microbatches - 1)):
            given = getattr(flags, flag) or 0
            require(given <= last, f"--{flag} {given}: the last one is {last}")
        start = run.setup.resumed_from or "the initial weights"
        print(f"replaying update {flags.update} of {flags.run} from {start}")
        print(f"updates to compute before it: {flags.update - 1 - run.state.step}")
        batches = iter(run.train_batches)
        for _ in recompute(run, batches, flags.update - 1):
            if due_after(run.config, run.state, run.updates).log:
                train.log(run, "train", training_record(run))
        return show(run, batches, flags)


def make_settings(flags: ReplayConfig, folder: Path, update: int, scratch: str) -> TrainConfig:
    """The settings that repeat a run from its newest checkpoint before an update."""
    records = read_log(folder)
    starts = [each for each in records if each["kind"] == "start" and each["step"] < update]
    config = read_config(folder / "config.yaml")
    saved = reversed(beginnings(folder, records).items())
    good = (f"{path}" for step, path in saved if step < update and not damage_of(path))
    checkpoint = next(good, None)
    problem = f"{folder}: begins after update {update}, or the checkpoints before it are gone"
    require(starts and (checkpoint or not starts[0]["step"]), problem, "name a later update")
    start = starts[-1]
    if checkpoint is None:
        check_log(folder)
    return replace(
        config,
        **given_settings(flags),
        cpu=flags.cpu,
        plugin=flags.plugin,
        traceback=flags.traceback,
        output_dir=scratch,
        run_name=f"replay-{update}",
        resume=checkpoint,
        report_to=None,
        threads=flags.threads or start.get("threads"),
        grad_accum=None
        if config.microbatches
        else start.get("processes", 1) * start.get("grad_accum", 1),
    )


def recompute(run: Run, batches: Iterator[Batch], until: int) -> Iterator[None]:
    """Train up to update `until` as the run did, without evaluations; yields after each update;
    collective.
    """
    run.model.train()
    while run.state.step < until:
        train.train_update(run, batches)
        run.log.advance()
        synchronise(run, SyncInterval())
        yield


def show(run: Run, batches: Iterator[Batch], flags: ReplayConfig) -> dict:
    """Compute the losses of the next update's microbatches, then print and return the details of
    one of them.

    By default, this is the first one with a NaN or infinite loss, else number 0.
    """
    losses = list[float]()
    samples = 0
    with restored_buffers(run.module), torch.no_grad():
        for number in range(run.plan.microbatches):
            microbatch = next(batches)
            samples += len(microbatch.labels)
            losses.append(rounded(compute_loss(run, microbatch)[0]).item())
            is_first_bad = math.isfinite(sum(losses[:-1])) and not math.isfinite(losses[-1])
            if number == (flags.microbatch or 0) or (flags.microbatch is None and is_first_bad):
                batch = microbatch  # the others are not kept: they may be many
    run.train_batches.check()
    loss = math.fsum(losses) / max(1, samples)
    print(f"update {flags.update}: loss {loss}")
    print(compare_losses(run, loss, flags))
    name = f"microbatch {batch.number} of update {flags.update}"
    print(
        f"{name}: sum of losses {losses[batch.number]}; the update has {len(losses)} microbatches"
    )
    path = expand(flags.run) / "replay" / f"{name.replace(' ', '-')}.png"
    path.parent.mkdir(exist_ok=True)
    if len(batch.labels):
        write_file(path, picture(run, batch))
        print(f"up to 64 of its images: {path}")
    return {"losses": losses, "first_bad_layer": inspect(run, batch, flags.pdb)}


def compare_losses(run: Run, loss: float, flags: ReplayConfig) -> str:
    """Whether the computed losses are those in the log; `loss` is that of the update to show."""
    ours, logged = (
        {each["step"]: each["loss"] for each in read_log(folder) if each["kind"] == "train"}
        for folder in (run.folder, expand(flags.run))
    )
    assert flags.update
    if flags.update - 1 in (0, *logged):  # the log may have a record of this update alone
        ours[flags.update] = loss if math.isfinite(loss) else None
    again = ours.keys() & logged.keys()
    if not again:
        problem = "no loss to compare: the log has no record of this update alone"
        return f"{problem}; train with --log_every 1"
    different = differing(ours, logged)
    count = f"logged losses recomputed: {len(again)}"
    if not different:
        return f"{count}, all bit-identical"
    first = different[0]
    values = f"the first at update {first}: {ours[first]} instead of {logged[first]}"
    return f"{count}; {len(different)} differ, {values}. {_BITS}"


def inspect(run: Run, batch: Batch, stop: bool) -> str:
    """Print the samples of a microbatch and its largest gradients; returns where NaN or infinite
    values begin.

    With `stop`, opens the debugger before the forward pass.
    """
    if stop:
        names = "batch.images, batch.labels and run.module"
        print(f"next: the forward pass, in compute_loss; look at {names}")
        pdb.set_trace()
    layers = observe_layers(run.module)
    loss, outputs = compute_loss(run, batch)
    run.accelerator.backward(loss * run.gradients.loss_scale(run.state.position))
    rows = [("sample", f"class; the first {_LOGITS} logits")]
    for place, label, logits in zip(
        batch.indices.tolist(), batch.labels.tolist(), outputs, strict=True
    ):
        classes = ", ".join(label_lines(label, run.data.class_names))
        numbers = " ".join(f"{logit:.3g}" for logit in logits[:_LOGITS].tolist())
        rows.append((run.data.train.describe(place), f"{classes}; {numbers}"))
    print(table(f"{len(batch.labels)} samples", rows))
    norms = gradient_norms(run.module)
    largest = sorted(norms.items(), key=lambda item: -math.inf if math.isnan(item[1]) else -item[1])
    shown = [(name, f"{norm:.4g}") for name, norm in largest[:_ROWS]]
    print(table("Largest gradient norms", shown))
    bad_layer = first_bad_layer(run.module, layers)
    print(bad_layer or "no layer has NaN or infinite values")
    return bad_layer


def compute_loss(run: Run, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The summed loss of a microbatch and its logits."""
    run.gradients.seed(batch)
    outputs = run.model(batch.images)
    return run.task.loss(outputs, batch.labels), main_output(outputs)


def observe_layers(module: nn.Module) -> Layers:
    """A list. Each layer without sub-layers is added to it when it runs."""
    layers: Layers = []

    def observe(name: str, _layer: nn.Module, inputs: Any, outputs: Any) -> None:
        layers.append((name, _finite(inputs), _finite(outputs)))

    for name, layer in module.named_modules():
        if not list(layer.children()):
            layer.register_forward_hook(partial(observe, name or type(layer).__name__))
    return layers


def gradient_norms(module: nn.Module) -> dict[str, float]:
    """The norm of the gradient of each parameter that has one."""
    return {
        name: p.grad.float().norm().item()
        for name, p in module.named_parameters()
        if p.grad is not None
    }


def first_bad_layer(module: nn.Module, layers: Layers) -> str:
    """Where NaN or infinite values begin, in words; empty if all are finite."""
    parameters = [name for name, parameter in module.named_parameters() if not _finite(parameter)]
    if parameters:
        return f"weights are NaN or infinite before this update: {', '.join(parameters[:3])}"
    for name, inputs, outputs in layers:
        if not inputs:
            return f"the input of layer {name} is NaN or infinite"
        if not outputs:
            first = f"the output of layer {name} is the first with NaN or infinite values"
            return f"{first}; its input is finite"
    bad = [name for name, norm in gradient_norms(module).items() if not math.isfinite(norm)]
    return (
        f"the gradient of {bad[-1]} is NaN or infinite; all layers' outputs are finite"
        if bad
        else ""
    )


def _finite(value: Any) -> bool:
    """Whether all floating-point tensors in a value are finite."""
    if isinstance(value, Tensor):
        value = value.to_dense() if value.is_mkldnn else value  # oneDNN's layout
        return not value.is_floating_point() or bool(value.isfinite().all())
    return all(map(_finite, value)) if isinstance(value, list | tuple) else True


if __name__ == "__main__":
    main()
