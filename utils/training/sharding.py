"""What FSDP2 needs around `Accelerator.prepare`, which shards the model and its optimizer.

Each process holds some rows of each parameter, of its gradient and of its optimizer state. The
parameters of a block are gathered when they are needed. The rest of the run is the same as with
DDP.
"""

import os
from collections.abc import Callable
from itertools import accumulate

import torch
from accelerate import Accelerator
from accelerate.utils import convert_outputs_to_fp32
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from utils.config.bounds import require
from utils.config.settings import TrainConfig
from utils.memory import bytes_text
from utils.models.layers import find_blocks
from utils.models.sharded import count_units, local
from utils.ranks.ranks import Ranks
from utils.training.building import Setup
from utils.training.optim import state_per_value


def get_ready_to_shard(
    model: nn.Module, setup: Setup, accelerator: Accelerator, ranks: Ranks
) -> list[int]:
    """Prepare the model for FSDP2, before `Accelerator.prepare`; collective. Returns its bytes for
    `describe_shards`.

    If the accelerate config chooses no units, blocks are used. Raises UserError if FSDP2 cannot
    shard the model.
    """
    config = setup.config
    for name, parameter in model.named_parameters():
        problem = (
            f"FSDP cannot shard {config.model}, because its parameter {name} is a single number"
        )
        require(parameter.ndim > 0, problem, "use another model, or train without FSDP")
    # FSDP2 needs this; --channels_last still applies to images
    model.to(memory_format=torch.contiguous_format)
    plugin = accelerator.state.fsdp_plugin
    if plugin.auto_wrap_policy in (None, transformer_auto_wrap_policy):
        blocks = sorted({type(block).__name__ for block in find_blocks(model)})
        chosen = plugin.transformer_cls_names_to_wrap or blocks
        unknown = sorted({*chosen} - {type(layer).__name__ for layer in model.modules()})
        problem = f"fsdp_transformer_layer_cls_to_wrap: {config.model} has no layers of class {', '.join(unknown)}"
        require(not unknown, problem, f"leave it out to use its blocks ({', '.join(blocks)})")
        plugin.auto_wrap_policy, plugin.transformer_cls_names_to_wrap = (
            transformer_auto_wrap_policy,
            chosen,
        )
    if os.environ.get("FSDP_AUTO_WRAP_POLICY", "").upper() == "NO_WRAP" and ranks.is_main:
        print("fsdp_auto_wrap_policy: NO_WRAP is ignored: each block is a unit")
    plugin.set_auto_wrap_policy(model)
    _check_units(model, config.model, fsdp2_prepare_auto_wrap_policy(plugin, model))
    if accelerator.native_amp:  # Accelerate does not do this for FSDP2
        model.forward = convert_outputs_to_fp32(accelerator.autocast()(model.forward))
    return _bytes(model, config)


def describe_shards(model: nn.Module, before: list[int], config: TrainConfig, ranks: Ranks) -> str:
    """The bytes of the whole and of the sharded model, for the start table; collective."""
    most = [max(sizes) for sizes in zip(*ranks.gather(_bytes(model, config)), strict=True)]
    texts = [
        f"{name} {bytes_text(whole)}"
        for name, whole in zip(("parameters", "gradients", "optimizer state"), before, strict=True)
    ]
    on_each, count = ", ".join(map(bytes_text, most)), count_units(model)
    return f"FSDP2, {count} unit{'s' * (count > 1)}; {', '.join(texts)}; on each rank at most {on_each}"


def _check_units(module: nn.Module, name: str, is_unit: Callable[[nn.Module], bool] | None) -> None:
    """Raise UserError if a parameter belongs to two units, because two blocks share a layer."""
    units = {layer for layer in module.modules() if is_unit and is_unit(layer)}
    owners: dict[nn.Parameter, nn.Module] = {}
    for place, parameter in module.named_parameters(remove_duplicate=False):
        parents = accumulate(place.split(".")[:-1], "{}.{}".format)
        layers = [
            module,
            *(layer for parent in parents if (layer := module.get_submodule(parent)) in units),
        ]
        problem = f"FSDP cannot shard {name}, because its parameter {place} belongs to two units"
        fix = "choose other units in fsdp_config, or train without FSDP"
        require(owners.setdefault(parameter, layers[-1]) is layers[-1], problem, fix)


def _bytes(model: nn.Module, config: TrainConfig) -> list[int]:
    """The bytes of this rank's parameters, gradients and optimizer state."""
    trained = sum(_size(parameter) for parameter in model.parameters() if parameter.requires_grad)
    return [sum(map(_size, model.parameters())), trained, trained * state_per_value(config)]


def _size(tensor: Tensor) -> int:
    return local(tensor).nbytes
