"""Load the tensors of a checkpoint into the model, the optimizer, the average and the scaler."""

import math
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import Tensor, nn

from utils.config import require
from utils.console import join_names, say
from utils.errors import UserError, one_line
from utils.models import (
    WeightAverage,
    bad_tensors,
    copy_into,
    load_pickled,
    local_shard,
    read_weights,
    shape_of,
    tied_names,
)
from utils.runs.manifest import EMA_FILE, MANIFEST_FILE, OPTIMIZER, SCALER, files_of
from utils.runs.save_state import unwrapped


def make_average(module: nn.Module, decay: float | None) -> WeightAverage | None:
    """The average of the weights, with --ema_decay."""
    return WeightAverage(module, decay) if decay else None


def parameters_and_optimizer_state(
    module: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:
    """The parameters, and the tensors of the optimizer's state, which are named PARAMETER, KEY."""
    own = unwrapped(optimizer)
    tensors = dict[str, Tensor](module.named_parameters())
    for name, parameter in _by_name(own.param_groups).items():
        state = own.state.get(parameter, {}).items()
        tensors |= {f"{name}, {key}": value for key, value in state if isinstance(value, Tensor)}
    return tensors


def read_optimizer(checkpoint: Path) -> tuple[list[str], dict[str, dict]]:
    """The names of all parameters of a saved optimizer, and the state of those that have one, by
    name.

    With DDP, the state in the file has the numbers of parameters as keys; with FSDP2, their names.
    """
    saved = load_pickled(checkpoint / OPTIMIZER)
    keys = _by_name(saved["param_groups"])
    states = saved["state"]
    return list(keys), {name: states[key] for name, key in keys.items() if key in states}


def load_weights(path: Path, tensors: Mapping[str, Tensor], model: nn.Module) -> None:
    """Copy the weights from a checkpoint or file into a bare model. Raises ValueError if they do
    not fit, or are not finite.

    Tied weights have one name in a checkpoint, see `distinct_state`.
    """
    tied = {name: tensors[first] for name, first in tied_names(model).items() if first in tensors}
    complete = tied | {**tensors}
    _check_weights(path, complete, model.state_dict())
    model.load_state_dict(complete)


def load_average(checkpoint: Path, average: WeightAverage | None) -> None:
    """Load the average of the weights, if both the checkpoint and the run have one.

    Raises ValueError if it does not fit, or is not finite.
    """
    if average is not None and EMA_FILE in files_of(checkpoint):
        tensors = read_weights(checkpoint / EMA_FILE)
        _check_weights(checkpoint / EMA_FILE, tensors, average.state_dict())
        average.load_state_dict(tensors)


def _check_weights(path: Path, tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    difference = _difference(tensors, own)
    problem = f"{path}: holds a different model ({difference} in this model)"
    require(not difference, problem, "use the same --model and --model_args")
    bad = join_names(bad_tensors(tensors), 3)
    require(not bad, f"{path}: weights are NaN or infinite ({bad})", "use another checkpoint")


def load_scale(checkpoint: Path, scaler: torch.amp.GradScaler | None) -> None:
    """Load the loss scale of fp16, if both the checkpoint and the run have one.

    A new one would overflow at first, and updates would be skipped.
    """
    path = checkpoint / SCALER
    if scaler is not None and SCALER in files_of(checkpoint):
        try:
            state = load_pickled(path)
            if _difference(state, scaler.state_dict()) or not 0 < state["scale"] < math.inf:
                raise ValueError(state)
            scaler.load_state_dict(state)
        except Exception as error:  # of any class
            problem = f"{path}: is not a loss scale ({one_line(error)[:160]})"
            raise UserError(problem, "use another checkpoint") from error


def load_optimizer(checkpoint: Path, optimizer: torch.optim.Optimizer) -> None:
    """Load the checkpoint's optimizer state into `optimizer`. Nothing in the file is executed.

    Parameters are matched by name, so their groups may differ. Settings such as the weight decay
    stay as in this run. Raises ValueError if the state does not fit, or if it lacks a parameter
    whose state this optimizer creates before the first gradient.
    """
    # Not `Accelerator.load_state`: it unpickles random states, matches the state by position, and
    # replaces the settings of the groups. With FSDP2 it also needs a state for each parameter.
    path = checkpoint / OPTIMIZER
    problem = f"{checkpoint / MANIFEST_FILE}: does not name {OPTIMIZER}"
    require(OPTIMIZER in files_of(checkpoint), problem, "use another checkpoint")
    try:
        _copy_state(*read_optimizer(checkpoint), unwrapped(optimizer))
    except UnpicklingError as error:
        problem = (
            f"{path}: is refused, because it contains objects whose loading would execute code"
        )
        raise UserError(problem, "use another checkpoint") from error
    # torch.load raises errors of many classes, such as those of struct and zipfile
    except Exception as error:
        problem = f"{path}: not this run's optimizer ({one_line(error)[:160]})"
        raise UserError(
            problem, "use the same --optimizer, with the same arguments, and the same --model"
        ) from error


def _copy_state(
    names: list[str], states: dict[str, dict], optimizer: torch.optim.Optimizer
) -> None:
    """Copy the saved `states` of these parameters. A step with zero gradients first creates the
    tensors for them.
    """
    here = _by_name(optimizer.param_groups)
    early = {*optimizer.state}
    unknown = (here.keys() ^ names) | (states.keys() - here.keys())
    if unknown:
        raise ValueError(f"only one of both has {min(unknown)}")
    _step_with_zeros(optimizer, list(here.values()))
    missing: list[str] = []
    for name, parameter in here.items():
        own = optimizer.state.pop(parameter, {})
        values = states.get(name, {})
        if name not in states and not (states and parameter in early):
            if own:
                missing.append(name)
            continue
        difference = _difference(values, own)
        if difference:
            raise ValueError(f"{difference} in this optimizer")
        for key, value in values.items():
            if isinstance(value, Tensor):
                copy_into(own[key], value)
                values[key] = own[key]
        optimizer.state[parameter] = values
    if missing:
        which = f"of these parameters, which start new: {join_names(missing)}"
        say(f"the checkpoint has no optimizer state {which}")


def _by_name(groups: list[dict]) -> dict:
    """The parameters of an optimizer, or what stands for them in a saved state, by name."""
    pairs = [zip(group["param_names"], group["params"], strict=True) for group in groups]
    return dict(chain.from_iterable(pairs))


@torch.no_grad()
def _step_with_zeros(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    """Take a step with zero gradients, then restore the values of the parameters."""
    before = [local_shard(parameter).clone() for parameter in parameters]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter, values in zip(parameters, before, strict=True):
        local_shard(parameter).copy_(values)
        parameter.grad = None


def _shapes(values: Mapping) -> dict[str, str]:
    """The shape of each tensor, and the type of each other value except None, in words."""
    return {
        name: f"shape {shape_of(value)}" if isinstance(value, Tensor) else type(value).__name__
        for name, value in values.items()
        if value is not None
    }


def _difference(saved: Mapping, own: Mapping) -> str:
    """The first name whose shapes differ, in words; empty if none does."""
    there = _shapes(saved)
    here = _shapes(own)
    for name in [*here, *there]:
        # Files of old versions of PyTorch lack these counters, and loading creates them.
        if here.get(name) != there.get(name) and not name.endswith("num_batches_tracked"):
            kind = there.get(name, "nothing")
            return f"{name}: {kind} in the checkpoint, {here.get(name, 'nothing')}"
    return ""
