"""What replay.py shows of an update: its microbatches, layers and gradients."""

import math
import pdb
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from extras.digest import differing
from extras.first_batch import label_lines, picture
from utils.console import table
from utils.data import Batch
from utils.files import expand, write_file
from utils.models import main_output, restored_buffers
from utils.runs import read_log
from utils.settings.scripts import ReplayConfig
from utils.training import Run, rounded

_ROWS = 12  # of the largest gradients
_LOGITS = 5  # printed for each sample
_BITS = (
    "Losses of another number of processes repeat only with --microbatches, and those of a GPU "
    "only with that or --deterministic; the weights of --init_from must not have changed"
)
Layers = list[tuple[str, bool, bool]]  # name, and whether the inputs and the outputs are finite


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
