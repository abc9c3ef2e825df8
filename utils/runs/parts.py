"""Parts of a run besides model and optimizer, each a safetensors file NAME.safetensors in its checkpoints.

To add a part, add an object with the methods of `Part` to `make_parts`.
"""

from typing import Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from utils.models.weight_average import WeightAverage

LOSS_SCALE = "loss_scale"
EMA = "ema"


class Part(Protocol):
    """What `run.parts` holds. The state is a flat dict, with the same names, shapes and dtypes during the whole run.

    Only the main process calls `state_dict`; all ranks call `load_state_dict` with the same state, or `restart`.
    """

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> object: ...

    def restart(self) -> str:
        """Called if the checkpoint lacks this part, when the weights are loaded; returns what the part then does."""
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
