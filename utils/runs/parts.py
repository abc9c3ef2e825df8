"""Parts of a run besides model and optimizer, each a safetensors file NAME.safetensors in its checkpoints.

To add a part, such as averaged weights, add an object with `state_dict` and `load_state_dict` to `make_parts`.
"""

from typing import Protocol

import torch
from accelerate import Accelerator
from torch import Tensor

LOSS_SCALE = "loss_scale"


class Part(Protocol):
    """What `run.parts` holds. The state is a flat dict, with the same names, shapes and dtypes during the whole run.

    Only the main process calls `state_dict`; all ranks call `load_state_dict` with the same state.
    """

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> object: ...


class LossScale:
    """The loss scale of fp16 as float64 scalars. A new one would overflow at first, and updates would be skipped."""

    def __init__(self, scaler: torch.amp.GradScaler):
        self.scaler = scaler

    def state_dict(self) -> dict[str, Tensor]:
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in self.scaler.state_dict().items()}

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        kinds = {name: type(value) for name, value in self.scaler.state_dict().items()}
        self.scaler.load_state_dict({name: kind(state_dict[name].item()) for name, kind in kinds.items()})


def make_parts(accelerator: Accelerator) -> dict[str, Part]:
    """The parts of a run, by their names."""
    return {LOSS_SCALE: LossScale(accelerator.scaler)} if accelerator.scaler else {}
