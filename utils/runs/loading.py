"""Load the tensors of a verified checkpoint into a model and an optimizer."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from utils.errors import UserError, one_line


def load_model(checkpoint: Path, model: nn.Module) -> None:
    """Load all of the checkpoint's weights into `model`. Raises ValueError, and loads none, if they do not fit."""
    path = checkpoint / "model.safetensors"
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path}: not readable ({one_line(error)})", "use another checkpoint") from error
    own = model.state_dict()
    for name in [*own, *tensors]:
        here, there = (t[name].shape if name in t else None for t in (own, tensors))
        if here != there:
            there, here = ("nothing" if s is None else f"shape {list(s)}" for s in (there, here))
            problem = f"{checkpoint}: holds a different model ({name}: {there} in the checkpoint, {here} in this model)"
            raise UserError(problem, "use the same --model and --model_args")
    model.load_state_dict(tensors)


def load_optimizer(checkpoint: Path, optimizer: torch.optim.Optimizer) -> None:
    """Load the checkpoint's optimizer state into `optimizer`. Nothing in the file is executed."""
    path = checkpoint / "optimizer.bin"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        own = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
        optimizer.load_state_dict(state)
        _check_shapes(optimizer)
        _lay_out(optimizer)
        for group, settings in zip(optimizer.param_groups, own, strict=True):
            group.update(settings)  # keep weight decay, momentum etc. of this run
    except Exception as error:  # torch.load raises errors of many classes, such as those of struct and pickle
        problem = f"{path}: not this run's optimizer ({one_line(error)[:120]})"
        raise UserError(problem, "use the same --optimizer and --model") from error


def _check_shapes(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for a tensor that is neither a scalar nor has its parameter's shape: updates would fail."""
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if value is not None and value.shape not in ((), parameter.shape):
                raise ValueError(f"{name} of shape {list(value.shape)} for a parameter of {list(parameter.shape)}")


def _lay_out(optimizer: torch.optim.Optimizer) -> None:
    """Give each tensor its parameter's strides, as fused kernels require; --channels_last may have changed them."""
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                values[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
