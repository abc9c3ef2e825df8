"""Load the tensors of a verified checkpoint into a model and an optimizer."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from utils.errors import one_line


def load_model(checkpoint: Path, model: nn.Module) -> None:
    """Put the checkpoint's weights into `model`, all or none; ValueError when they are another model's."""
    path = checkpoint / "model.safetensors"
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path}: not readable ({one_line(error)})") from error
    own = model.state_dict()
    for name in [*own, *tensors]:
        here, there = (t[name].shape if name in t else None for t in (own, tensors))
        if here != there:
            there, here = ("nothing" if s is None else f"shape {list(s)}" for s in (there, here))
            raise ValueError(f"{checkpoint}: holds another model ({name}: {there} there, {here} in this one)")
    model.load_state_dict(tensors)


def load_optimizer(checkpoint: Path, optimizer: torch.optim.Optimizer) -> None:
    """Put the checkpoint's optimizer state into `optimizer`; nothing in the file is executed."""
    path = checkpoint / "optimizer.bin"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        own = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
        optimizer.load_state_dict(state)
        _check_shapes(optimizer)
        _lay_out(optimizer)
        for group, settings in zip(optimizer.param_groups, own, strict=True):
            group.update(settings)  # momentum, decay and the like are this run's, not the checkpoint's
    except Exception as error:  # torch.load raises many kinds: of struct, of pickle, AssertionError, IndexError
        raise ValueError(f"{path}: not this run's optimizer ({one_line(error)[:120]})") from error


def _check_shapes(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError where a tensor is neither a number nor like its parameter: the first update would fail."""
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if value is not None and value.shape not in ((), parameter.shape):
                raise ValueError(f"{name} of shape {list(value.shape)} for a parameter of {list(parameter.shape)}")


def _lay_out(optimizer: torch.optim.Optimizer) -> None:
    """Give each tensor its parameter's strides, which --channels_last may have changed: fused kernels do not look."""
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                values[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
