"""The tensors of checkpoints: those that a run saves and loads, or the weights of an evaluation.

A part of a run besides model and optimizer is a safetensors file NAME.safetensors in its checkpoints. To add one, add
an object with the methods of `Part` to `make_parts`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from utils.console import join_names
from utils.errors import UserError, one_line
from utils.models.checking import bad_tensors
from utils.models.matching import shape_of
from utils.models.sharded import copy_into
from utils.models.weight_average import WeightAverage
from utils.models.weight_files import load_safetensors, read_weights
from utils.runs.manifest import OLD_OPTIMIZER, OPTIMIZER, files_of
from utils.runs.tensors import Tensors, check_types, read_metadata

LOSS_SCALE = "loss_scale"
EMA = "ema"


class Part(Protocol):
    """What `run.parts` holds. The state is a flat dict, with the same names, shapes and dtypes during the whole run.

    All ranks call `state_dict`. All ranks call `load_state_dict`, with the same state, or `restart`.
    """

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> object: ...

    def restart(self) -> str:
        """Called after the weights are loaded if the checkpoint lacks this part; returns what it does instead."""
        ...


class LossScale:
    """The loss scale of fp16 as float64 scalars. A new one would overflow at first, and updates would be skipped."""

    def __init__(self, scaler: torch.amp.GradScaler):
        self.scaler = scaler

    def state_dict(self) -> dict[str, Tensor]:
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in self.scaler.state_dict().items()}

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        kinds = {name: type(value) for name, value in self.scaler.state_dict().items()}
        self.scaler.load_state_dict({name: kind(state_dict[name].item()) for name, kind in kinds.items()})

    def restart(self) -> str:
        return "keeps its initial state"


def make_parts(accelerator: Accelerator, module: nn.Module, ema_decay: float | None) -> dict[str, Part]:
    """The parts of a run, by their names."""
    parts: dict[str, Part] = {LOSS_SCALE: LossScale(accelerator.scaler)} if accelerator.scaler else {}
    return parts | ({EMA: WeightAverage(module, ema_decay)} if ema_decay else {})


def load_tensors(
    checkpoint: Path, module: nn.Module, optimizer: torch.optim.Optimizer, parts: Mapping[str, Part]
) -> list[str]:
    """Load all tensors of a checkpoint; returns the lines of `load_parts`. Raises ValueError if they do not fit."""
    # Check the weights first, because their error names the cause best. Load them after the optimizer's state, because
    # `load_optimizer` changes the weights.
    weights, own = read_weights(checkpoint / "model.safetensors"), module.state_dict()
    check_fit(checkpoint, weights, module)
    load_optimizer(checkpoint, optimizer)
    for name in weights.keys() & own.keys():  # one at a time: `load_state_dict` would need all shards twice
        copy_into(own[name], weights[name])
    return load_parts(checkpoint, parts)


def tensors_to_save(module: nn.Module, optimizer: torch.optim.Optimizer, parts: Mapping[str, Part]) -> Tensors:
    """The tensors of a checkpoint, which `load_tensors` reads, and the metadata of each file, by file name.

    Raises UserError if one of them cannot be saved.
    """
    own: Tensors = {f"{name}.safetensors": (part.state_dict(), {}) for name, part in parts.items()}
    of_model = (module.state_dict(), {"format": "pt"})  # as Accelerate's `save_state` writes it
    found: Tensors = {"model.safetensors": of_model, OPTIMIZER: optimizer_state(optimizer), **own}
    for tensors, _ in found.values():
        check_types(tensors)
    return found


def optimizer_state(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of the optimizer's state, named PARAMETER/KEY, and metadata.

    The metadata has the other values and the names of all parameters. Raises ValueError if a value is not a tensor and
    cannot be written as JSON.
    """
    parameters = _by_name(_unwrapped(optimizer).param_groups)
    states = {name: _unwrapped(optimizer).state.get(parameter, {}) for name, parameter in parameters.items()}
    values = {f"{name}/{key}": value for name, state in states.items() for key, value in state.items()}
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    rest = {name: value for name, value in values.items() if name not in tensors}
    try:
        return tensors, {"parameters": json.dumps(list(parameters)), "values": json.dumps(rest)}
    except TypeError as error:  # such as a list of tensors
        problem = f"the state of this optimizer cannot be saved ({one_line(error)})"
        raise UserError(problem, "use another --optimizer") from error


def read_optimizer(checkpoint: Path) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """The names of all parameters of a saved optimizer, and the state of those that have one, by name."""
    path = checkpoint / _optimizer_file(checkpoint)
    if path.name == OLD_OPTIMIZER:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        numbers = _by_name(saved["param_groups"])
        return list(numbers), {name: saved["state"][n] for name, n in numbers.items() if n in saved["state"]}
    tensors, metadata = load_safetensors(path), read_metadata(path)
    states: dict[str, dict[str, Any]] = {}
    for name, value in (tensors | json.loads(metadata["values"])).items():
        parameter, _, key = name.rpartition("/")
        states.setdefault(parameter, {})[key] = value
    return json.loads(metadata["parameters"]), states


def check_fit(checkpoint: Path, tensors: Mapping[str, Tensor], model: nn.Module) -> None:
    """Raise ValueError if the weights of the checkpoint do not fit the model."""
    difference = _difference(tensors, model.state_dict())
    if difference:
        problem = f"{checkpoint}: holds a different model ({difference} in this model)"
        raise UserError(problem, "use the same --model and --model_args")


def load_optimizer(checkpoint: Path, optimizer: torch.optim.Optimizer) -> None:
    """Load the checkpoint's optimizer state into `optimizer`. Nothing in the file is executed.

    Takes one step with zero gradients, which creates the state, and copies the saved values into it. The step can
    change the weights, so load them afterwards. Parameters are matched by name, so their groups may differ. Settings
    such as the weight decay stay as in this run. Raises ValueError if the state does not fit.
    """
    path, optimizer = checkpoint / _optimizer_file(checkpoint), _unwrapped(optimizer)
    try:
        names, states = read_optimizer(checkpoint)
        here = _by_name(optimizer.param_groups)
        if unknown := sorted((here.keys() ^ names) | (states.keys() - here.keys())):
            raise ValueError(f"only one of both has {unknown[0]}")
        _step_with_zeros(optimizer, list(here.values()))
        for name, parameter in here.items():
            values, own = states.get(name), optimizer.state.pop(parameter, {})
            if values is None:  # the parameter had no gradient so far
                continue
            if difference := _difference(values, own):
                raise ValueError(f"{difference} in this optimizer")
            if nested := [key for key, value in values.items() if _holds_tensors(value)]:
                raise ValueError(f"{nested[0]} has tensors inside a list, tuple or dict")
            for key, value in values.items():
                if isinstance(value, Tensor):
                    copy_into(own[key], value)
                    values[key] = own[key]
            optimizer.state[parameter] = values
    except UnpicklingError as error:
        problem = f"{path}: is refused, because it contains objects whose loading would execute code"
        raise UserError(problem, "use another checkpoint") from error
    except Exception as error:  # torch.load raises errors of many classes, such as those of struct and zipfile
        problem = f"{path}: not this run's optimizer ({one_line(error)[:160]})"
        raise UserError(problem, "use the same --optimizer, with the same arguments, and the same --model") from error


def _optimizer_file(checkpoint: Path) -> str:
    return OPTIMIZER if OPTIMIZER in files_of(checkpoint) else OLD_OPTIMIZER  # other files are not verified


def _unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it


def _holds_tensors(value: Any) -> bool:
    """Whether a value is a list, tuple or dict with a tensor in it."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return any(isinstance(each, Tensor) or _holds_tensors(each) for each in inner)


def _by_name(groups: list[dict[str, Any]]) -> dict[str, Any]:
    """The parameters of an optimizer, or their numbers in a saved state, by name."""
    pairs = [zip(group["param_names"], group["params"], strict=True) for group in groups]
    return dict(chain.from_iterable(pairs))


def _step_with_zeros(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter in parameters:
        parameter.grad = None


def load_parts(checkpoint: Path, parts: Mapping[str, Part]) -> list[str]:
    """Load the checkpoint's parts. Returns lines to print about parts that only the checkpoint or only the run has.

    Raises ValueError if the tensors of a part do not fit.
    """
    saved = {Path(name).stem for name in files_of(checkpoint) if name.endswith(".safetensors")}
    saved -= {"model", Path(OPTIMIZER).stem}
    unknown = sorted(saved - parts.keys())
    lines = [f"parts of the checkpoint that this run does not have: {join_names(unknown)}"] if unknown else []
    for name, part in parts.items():
        path = checkpoint / f"{name}.safetensors"
        if name not in saved:
            lines.append(f"{path.name} is not in the checkpoint: {name} {part.restart()}")
            continue
        try:
            tensors = load_safetensors(path)
            if difference := _difference(tensors, part.state_dict()):
                raise ValueError(f"{difference} in this run")
            part.load_state_dict(tensors)
        except Exception as error:  # of any class, if a value is malformed
            problem = f"{path}: does not fit this run's {name} ({one_line(error)[:160]})"
            raise UserError(problem, "use the same settings, or another checkpoint") from error
    return lines


@dataclass(frozen=True)
class Weights:
    """The weights of an evaluation, from a verified checkpoint.

    They are read at once, because a training run may delete the checkpoint. `part` is "model" or "ema". If `is_choice`,
    the checkpoint has both.
    """

    checkpoint: Path
    part: str
    is_choice: bool
    tensors: Mapping[str, Tensor]

    def load(self, model: nn.Module) -> None:
        """Copy the weights into the model. Raises ValueError if they do not fit, or if one is NaN or infinite."""
        check_fit(self.checkpoint, self.tensors, model)
        if bad := bad_tensors(self.tensors):
            problem = f"{self.checkpoint}: weights are NaN or infinite ({join_names(bad, 3)})"
            raise UserError(problem, "use another checkpoint")
        model.load_state_dict(self.tensors)

    def describe(self) -> dict[str, str]:
        """What the record of the evaluation says about them."""
        return {"weights": "ema" if self.part == EMA else "raw"} if self.is_choice else {}


def choose_weights(checkpoint: Path, kind: str | None) -> Weights:
    """Read the weights that --weights names, by default the average if the checkpoint has one."""
    has_average = f"{EMA}.safetensors" in files_of(checkpoint)
    if kind == "ema" and not has_average:
        raise UserError(f"{checkpoint}: has no average of the weights", "use --weights raw, or train with --ema_decay")
    part = EMA if has_average and kind != "raw" else "model"
    return Weights(checkpoint, part, has_average, read_weights(checkpoint / f"{part}.safetensors"))


def _shapes(values: Mapping[str, Any]) -> dict[str, str]:
    """The shape of each tensor, and the type of each other value except None, in words."""
    return {
        name: f"shape {shape_of(value)}" if isinstance(value, Tensor) else type(value).__name__
        for name, value in values.items()
        if value is not None
    }


def _difference(saved: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """The first name whose shapes differ, in words; empty if none does."""
    there, here = _shapes(saved), _shapes(own)
    for name in [*here, *there]:
        # Files of old versions of PyTorch lack these counters, and loading creates them.
        if here.get(name) != there.get(name) and not name.endswith("num_batches_tracked"):
            return f"{name}: {there.get(name, 'nothing')} in the checkpoint, {here.get(name, 'nothing')}"
    return ""
