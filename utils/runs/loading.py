"""The tensors of checkpoints: what is added to `Accelerator.save_state`, and how all of them are
read.
"""

import math
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from safetensors.torch import save_file
from torch import Tensor, nn

from utils.config import require
from utils.console import join_names, say
from utils.errors import UserError, one_line
from utils.models import (
    WeightAverage,
    bad_tensors,
    copy_into,
    distinct_state,
    full_tensor,
    is_sharded,
    load_pickled,
    local_shard,
    read_weights,
    shape_of,
    tied_names,
)
from utils.runs.manifest import EMA_FILE, MANIFEST_FILE, OPTIMIZER, SCALER, files_of


def make_average(module: nn.Module, decay: float | None) -> WeightAverage | None:
    """The average of the weights, with --ema_decay."""
    return WeightAverage(module, decay) if decay else None


def extend_save_state(
    accelerator: Accelerator,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: WeightAverage | None,
) -> None:
    """Let `Accelerator.save_state` write the average of the weights, too, and each tied weight of
    `module` once.

    With FSDP2 all ranks send their rows of each tensor, and the main process writes them.
    """
    if not is_sharded(module):  # otherwise torch.load without map_location would need a GPU
        _unwrapped(optimizer).register_state_dict_post_hook(
            lambda _, state: send_to_device(state, "cpu")
        )

    def before_saving(_models: Any, weights: list[dict[str, Tensor]], folder: str) -> None:
        if weights:  # empty with FSDP2. Accelerate would drop tensors that share memory with others
            weights[:] = [{name: _plain(tensor) for name, tensor in distinct_state(module).items()}]
        averages: dict[str, Tensor] = {}
        for name, tensor in (average.state_dict() if average else {}).items():
            full = full_tensor(tensor)
            if accelerator.is_main_process:
                averages[name] = _plain(full)
        if averages:
            save_file(averages, Path(folder) / EMA_FILE)

    accelerator.register_save_state_pre_hook(before_saving)


def _plain(tensor: Tensor) -> Tensor:
    """The tensor as a safetensors file has it: on the host, contiguous, and in memory of its own."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def bytes_to_save(
    module: nn.Module, optimizer: torch.optim.Optimizer, average: WeightAverage | None
) -> int:
    """The bytes that a save needs on the disk. With FSDP2 this includes the weights twice."""
    weights = [distinct_state(module)] * (1 + is_sharded(module) + (average is not None))
    states = [*weights, *_unwrapped(optimizer).state.values()]
    tensors = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    return sum(tensor.nbytes for tensor in tensors)


def check_savable(optimizer: torch.optim.Optimizer) -> None:
    """Raise UserError if the optimizer has a value that `load_optimizer` would refuse."""
    own = _unwrapped(optimizer)
    values = [pair for state in (*own.state.values(), *own.param_groups) for pair in state.items()]
    for key, value in values:
        problem = f"the state of this optimizer cannot be saved: {key} is a {type(value).__name__}"
        require(
            key == "params" or isinstance(value, Tensor) or _is_plain(value),
            problem,
            "use another --optimizer",
        )


def parameters_and_optimizer_state(
    module: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:
    """The parameters, and the tensors of the optimizer's state, which are named PARAMETER, KEY."""
    own = _unwrapped(optimizer)
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
    return list(keys), {
        name: saved["state"][key] for name, key in keys.items() if key in saved["state"]
    }


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
    if difference := _difference(tensors, own):
        problem = f"{path}: holds a different model ({difference} in this model)"
        raise UserError(problem, "use the same --model and --model_args")
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
        _copy_state(*read_optimizer(checkpoint), _unwrapped(optimizer))
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
    """Copy the saved `states` of these parameters. A step with zero gradients creates their places."""
    here = _by_name(optimizer.param_groups)
    early = {*optimizer.state}
    if unknown := sorted((here.keys() ^ names) | (states.keys() - here.keys())):
        raise ValueError(f"only one of both has {unknown[0]}")
    _step_with_zeros(optimizer, list(here.values()))
    missing: list[str] = []
    for name, parameter in here.items():
        own = optimizer.state.pop(parameter, {})
        values = states.get(name, {})
        if name not in states and not (states and parameter in early):
            missing += [name] * bool(own)
            continue
        if difference := _difference(values, own):
            raise ValueError(f"{difference} in this optimizer")
        for key, value in values.items():
            if isinstance(value, Tensor):
                copy_into(own[key], value)
                values[key] = own[key]
        optimizer.state[parameter] = values
    if missing:
        which = f"of these parameters, which start new: {join_names(missing)}"
        say(f"the checkpoint has no optimizer state {which}")


def _unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it


def _is_plain(value: Any) -> bool:
    """Whether a value is None, a number, a string, or a list, tuple or dict of these: safe to load."""
    inner = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
    return value is None or (type(value) in _PLAIN and all(map(_is_plain, inner)))


_PLAIN = (bool, int, float, str, list, tuple, dict)


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
            return f"{name}: {there.get(name, 'nothing')} in the checkpoint, {here.get(name, 'nothing')}"
    return ""
