"""Load the tensors of verified checkpoints: all parts of a run, or the weights of an evaluation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from utils.console import join_names
from utils.errors import UserError, one_line
from utils.models.checking import bad_tensors
from utils.runs.manifest import checkpoints_of, files_of, find_checkpoint, is_checkpoint_name, step_of
from utils.runs.parts import EMA, Part


def load_tensors(
    checkpoint: Path, module: nn.Module, optimizer: torch.optim.Optimizer, parts: Mapping[str, Part]
) -> list[str]:
    """Load all tensors of a checkpoint; returns the lines of `load_parts`. Raises ValueError if they do not fit."""
    # Check the weights first, because their error names the cause best. Load them after the optimizer's state, because
    # `load_optimizer` changes the weights.
    weights = read_weights(checkpoint / "model.safetensors")
    check_fit(checkpoint, weights, module)
    load_optimizer(checkpoint, optimizer)
    module.load_state_dict(weights)
    return load_parts(checkpoint, parts)


def read_weights(path: Path, fix: str = "use another checkpoint") -> dict[str, Tensor]:
    """The tensors in a safetensors file. Raises UserError with this fix if it is not one."""
    try:
        return load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path} is not a safetensors file ({one_line(error)[:80]})", fix) from error


def check_fit(checkpoint: Path, tensors: Mapping[str, Tensor], model: nn.Module) -> None:
    """Raise ValueError if the weights of the checkpoint do not fit the model."""
    difference = _difference(_shapes(tensors), _shapes(model.state_dict()))
    if difference:
        problem = f"{checkpoint}: holds a different model ({difference} in this model)"
        raise UserError(problem, "use the same --model and --model_args")


def load_optimizer(checkpoint: Path, optimizer: torch.optim.Optimizer) -> None:
    """Load the checkpoint's optimizer state into `optimizer`. Nothing in the file is executed.

    Takes one step with zero gradients to learn the names and shapes of the state. It can change the weights, so load
    them afterwards. Parameters are matched by name, so their groups may differ. Settings such as the weight decay stay
    as in this run. Raises ValueError if the state does not fit.
    """
    path, optimizer = checkpoint / "optimizer.bin", getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        expected = _state_after_a_step(optimizer)
        optimizer.load_state_dict(_regroup(saved, optimizer.state_dict()["param_groups"]))
        for parameter, values in optimizer.state.items():
            if difference := _difference(_shapes(values), expected[parameter]):
                raise ValueError(f"{difference} in this optimizer")
        _lay_out(optimizer)
    except Exception as error:  # torch.load raises errors of many classes, such as those of struct and pickle
        problem = f"{path}: not this run's optimizer ({one_line(error)[:160]})"
        raise UserError(problem, "use the same --optimizer, with the same arguments, and the same --model") from error


def load_parts(checkpoint: Path, parts: Mapping[str, Part]) -> list[str]:
    """Load the checkpoint's parts. Returns lines to print about parts that only the checkpoint or only the run has.

    Raises ValueError if the tensors of a part do not fit.
    """
    saved = {Path(name).stem for name in files_of(checkpoint) if name.endswith(".safetensors")} - {"model"}
    unknown = sorted(saved - parts.keys())
    lines = [f"parts of the checkpoint that this run does not have: {join_names(unknown)}"] if unknown else []
    for name, part in parts.items():
        path = checkpoint / f"{name}.safetensors"
        if name not in saved:
            lines.append(f"{path.name} is not in the checkpoint: {name} {part.restart()}")
            continue
        try:
            tensors = load_file(path)
            if difference := _difference(_shapes(tensors), _shapes(part.state_dict())):
                raise ValueError(f"{difference} in this run")
            part.load_state_dict(tensors)
        except Exception as error:  # of any class, if a value is malformed
            problem = f"{path}: does not fit this run's {name} ({one_line(error)[:160]})"
            raise UserError(problem, "use the same settings, or another checkpoint") from error
    return lines


@dataclass(frozen=True)
class Weights:
    """The weights of an evaluation, from verified checkpoints, oldest first.

    They are read at once, because a training run may delete the checkpoints. `part` is "model" or "ema". If
    `is_choice`, the newest checkpoint has both. `tensors` has the weights, or their mean over several checkpoints.
    """

    checkpoints: Sequence[Path]
    part: str
    is_choice: bool
    tensors: Mapping[str, Tensor]

    def load(self, model: nn.Module) -> None:
        """Copy the weights into the model. Raises ValueError if they do not fit, or if one is NaN or infinite."""
        newest = self.checkpoints[-1]
        check_fit(newest, self.tensors, model)
        if bad := bad_tensors(self.tensors):
            raise UserError(f"{newest}: weights are NaN or infinite ({join_names(bad, 3)})", "use another checkpoint")
        model.load_state_dict(self.tensors)

    def describe(self) -> dict[str, Any]:
        """What the record of the evaluation says about them."""
        kind: dict[str, Any] = {"weights": "ema" if self.part == EMA else "raw"} if self.is_choice else {}
        if len(self.checkpoints) > 1:
            kind["averaged"] = [step_of(path) for path in self.checkpoints]
        return kind


def find_checkpoints(path: Path, average: int | None) -> list[Path]:
    """The checkpoint to evaluate or, with `average`, that many, oldest first.

    `path` is a run folder or a checkpoint. The last checkpoint is the newest of the run, or `path` if that is a
    checkpoint. Raises ValueError if there are fewer.
    """
    if average is None:
        return [find_checkpoint(path)]
    last = find_checkpoint(path, prefer=("latest",))
    found = [last]
    if is_checkpoint_name(last.name):
        found = [other for other in checkpoints_of(last.absolute().parent) if step_of(other) <= step_of(last)]
    if len(found) < average:
        problem = f"--average {average}: {last.parent} has {len(found)} checkpoints up to {last.name}"
        raise UserError(problem, "lower it, or train with a higher --keep")
    return found[-average:]


def choose_weights(checkpoints: Sequence[Path], kind: str | None) -> Weights:
    """Read the weights that --weights names, by default the average if the newest checkpoint has one."""
    has_average = [f"{EMA}.safetensors" in files_of(path) for path in checkpoints]
    kind = kind or ("ema" if has_average[-1] else "raw")
    if kind == "ema" and not all(has_average):
        lacking = checkpoints[has_average.index(False)]
        raise UserError(f"{lacking}: has no average of the weights", "use --weights raw, or train with --ema_decay")
    part = EMA if kind == "ema" else "model"
    return Weights(checkpoints, part, has_average[-1], _mean_of(checkpoints, part))


def _mean_of(checkpoints: Sequence[Path], part: str) -> dict[str, Tensor]:
    """The mean of the weights of these checkpoints; integers are those of the last one."""
    sums: dict[str, Tensor] = {}
    for path in checkpoints:
        newest = read_weights(path / f"{part}.safetensors")
        for name, tensor in newest.items():
            sums[name] = sums[name] + tensor.double() if name in sums else tensor.double()
    return {
        name: (sums[name] / len(checkpoints)).to(tensor.dtype) if tensor.is_floating_point() else tensor.clone()
        for name, tensor in newest.items()
    }


def _shapes(values: Mapping[str, Any]) -> dict[str, str]:
    """The shape of each tensor, and the type of each other value except None, in words."""
    return {
        name: f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        for name, value in values.items()
        if value is not None
    }


def _difference(there: dict[str, str], here: dict[str, str]) -> str:
    """The first name whose shapes differ, in words; empty if none does."""
    for name in [*here, *there]:
        if here.get(name) != there.get(name):
            return f"{name}: {there.get(name, 'nothing')} in the checkpoint, {here.get(name, 'nothing')}"
    return ""


def _regroup(saved: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """A saved state of the optimizer, with the parameters in the order of `groups`, and their settings."""
    there, here = (
        {name: number for group in each for name, number in zip(group["param_names"], group["params"], strict=True)}
        for each in (saved["param_groups"], groups)
    )
    if unknown := sorted(there.keys() ^ here.keys()):
        raise ValueError(f"{unknown[0]} is only in {'the checkpoint' if unknown[0] in there else 'this run'}")
    state = {here[name]: saved["state"][number] for name, number in there.items() if number in saved["state"]}
    return {"state": state, "param_groups": groups}


def _state_after_a_step(optimizer: torch.optim.Optimizer) -> dict[Tensor, dict[str, str]]:
    """The `_shapes` of each parameter's state after one step with zero gradients. The state is discarded."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter in parameters:
        parameter.grad = None
    shapes = {parameter: _shapes(optimizer.state[parameter]) for parameter in parameters}
    optimizer.state.clear()
    return shapes


def _lay_out(optimizer: torch.optim.Optimizer) -> None:
    """Give each tensor its parameter's strides, as fused kernels require; --channels_last may have changed them."""
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                values[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
