"""What a checkpoint needs besides `Accelerator.save_state`'s own work: the average of the weights,
tied weights once, enough space, and an optimizer that can be loaded again.
"""

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from safetensors.torch import save_file
from torch import Tensor, nn

from utils.config import require
from utils.models import WeightAverage, distinct_state, full_tensor, is_sharded
from utils.runs.manifest import EMA_FILE


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
        unwrapped(optimizer).register_state_dict_post_hook(
            lambda _, state: send_to_device(state, "cpu")
        )

    def before_saving(_models: Any, weights: list[dict[str, Tensor]], folder: str) -> None:
        if weights:  # empty with FSDP2. Accelerate would drop tensors that share memory with others
            weights[:] = [{name: _plain(tensor) for name, tensor in distinct_state(module).items()}]
        if average is None:
            return
        averages: dict[str, Tensor] = {}
        for name, tensor in average.state_dict().items():
            full = full_tensor(tensor)  # collective
            if accelerator.is_main_process:
                averages[name] = _plain(full)
        if averages:
            save_file(averages, Path(folder) / EMA_FILE)

    accelerator.register_save_state_pre_hook(before_saving)


def _plain(tensor: Tensor) -> Tensor:
    """The tensor as a safetensors file has it: on the host, contiguous, in memory of its own."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def bytes_to_save(
    module: nn.Module, optimizer: torch.optim.Optimizer, average: WeightAverage | None
) -> int:
    """The bytes that a save needs on the disk."""
    copies = 1
    if is_sharded(module):  # the weights are first written in another format
        copies += 1
    if average is not None:
        copies += 1
    states = [value for state in unwrapped(optimizer).state.values() for value in state.values()]
    weights = copies * sum(tensor.nbytes for tensor in distinct_state(module).values())
    return weights + sum(value.nbytes for value in states if isinstance(value, Tensor))


def check_savable(optimizer: torch.optim.Optimizer) -> None:
    """Raise UserError if the optimizer has a value that `load_optimizer` would refuse."""
    own = unwrapped(optimizer)
    for values in (*own.state.values(), *own.param_groups):
        for key, value in values.items():
            fits = key == "params" or isinstance(value, Tensor) or _is_plain(value)
            what = f"{key} is a {type(value).__name__}"
            problem = f"the state of this optimizer cannot be saved: {what}"
            require(fits, problem, "use another --optimizer")


def _is_plain(value: Any) -> bool:
    """Whether a value is None, a number, a string, or a list, tuple or dict of these, which is safe
    to load.
    """
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(map(_is_plain, value.values()))
    return value is None or type(value) in (bool, int, float, str)


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that Accelerate wraps."""
    return getattr(optimizer, "optimizer", optimizer)
