"""Let Accelerate wrap a model and its optimizer for training: with DDP, or with FSDP2, which shards them.

With FSDP2 each process holds some rows of each parameter, of its gradient and of its optimizer state. The parameters of
a block are gathered when they are needed. The rest of the run is the same as with DDP.
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
from torch.optim import Optimizer

from utils.config.bounds import require
from utils.launch.environment import shards_model
from utils.memory import bytes_text
from utils.models.checking import hash_tensors
from utils.models.layers import find_blocks
from utils.models.sharded import count_units, is_sharded, local
from utils.ranks.ranks import Ranks
from utils.training.building import Resolved
from utils.training.optim import init_optimizer, state_per_value

SAME_START = "use the same kind of processor, the same versions and the same files on all machines"


def prepare_training(
    module: nn.Module, optimizer: Optimizer, resolved: Resolved, accelerator: Accelerator, ranks: Ranks
) -> tuple[nn.Module, Optimizer]:
    """The model and the optimizer as the loop uses them; collective.

    Raises UserError if FSDP2 cannot shard the model.
    """
    if resolved.config.microbatches:  # TreeGradients exchanges gradients itself, so the model gets no DDP
        model = accelerator.prepare_model(module, evaluation_mode=True)
        return model, init_optimizer(accelerator.prepare(optimizer), accelerator)
    if accelerator.is_fsdp2:
        before = _bytes(module, resolved)
        _get_ready(module, resolved, accelerator, ranks)
    model, prepared = accelerator.prepare(module, optimizer)
    assert is_sharded(model) or not shards_model() or accelerator.num_processes == 1
    if is_sharded(model):
        most = [max(sizes) for sizes in zip(*ranks.gather(_bytes(model, resolved)), strict=True)]
        texts = [f"{name} {bytes_text(whole)}" for name, whole in zip(_SHARDED, before, strict=True)]
        on_each = ", ".join(map(bytes_text, most))
        units = f"{count_units(model)} unit{'s' * (count_units(model) > 1)}"
        resolved.sharding = f"FSDP2, {units}; {', '.join(texts)}; on each rank at most {on_each}"
    return model, init_optimizer(prepared, accelerator, is_sharded(model))


_SHARDED = ("parameters", "gradients", "optimizer state")


def _get_ready(module: nn.Module, resolved: Resolved, accelerator: Accelerator, ranks: Ranks) -> None:
    """Check that FSDP2 can shard the model. If the accelerate config chooses no units, use the blocks."""
    config = resolved.config
    for name, parameter in module.named_parameters():
        problem = f"FSDP cannot shard {config.model}, because its parameter {name} is a single number"
        require(parameter.ndim > 0, problem, "use another model, or train without FSDP")
    if resolved.resumed_from is None:  # DDP would copy the weights of rank 0; FSDP2 keeps each rank's own values
        weights = hash_tensors([*module.parameters(), *module.buffers()])
        ranks.check_same(weights, "different weights at the start", SAME_START)
    module.to(memory_format=torch.contiguous_format)  # FSDP2 needs this; --channels_last still applies to images
    plugin = accelerator.state.fsdp_plugin
    if plugin.auto_wrap_policy in (None, transformer_auto_wrap_policy):
        blocks = sorted({type(block).__name__ for block in find_blocks(module)})
        chosen = plugin.transformer_cls_names_to_wrap or blocks
        unknown = sorted({*chosen} - {type(layer).__name__ for layer in module.modules()})
        problem = f"fsdp_transformer_layer_cls_to_wrap: {config.model} has no layers of class {', '.join(unknown)}"
        require(not unknown, problem, f"leave it out to use its blocks ({', '.join(blocks)})")
        plugin.auto_wrap_policy, plugin.transformer_cls_names_to_wrap = transformer_auto_wrap_policy, chosen
    if os.environ.get("FSDP_AUTO_WRAP_POLICY", "").upper() == "NO_WRAP" and ranks.is_main:
        print("fsdp_auto_wrap_policy: NO_WRAP is ignored: each block is a unit")
    plugin.set_auto_wrap_policy(module)
    _check_units(module, config.model, fsdp2_prepare_auto_wrap_policy(plugin, module))
    if accelerator.native_amp:  # Accelerate does not do this for FSDP2
        module.forward = convert_outputs_to_fp32(accelerator.autocast()(module.forward))


def _check_units(module: nn.Module, name: str, is_unit: Callable[[nn.Module], bool] | None) -> None:
    """Raise UserError if a parameter belongs to two units, because two blocks share a layer."""
    units = {layer for layer in module.modules() if is_unit and is_unit(layer)}
    owners: dict[nn.Parameter, nn.Module] = {}
    for place, parameter in module.named_parameters(remove_duplicate=False):
        parents = accumulate(place.split(".")[:-1], "{}.{}".format)
        layers = [module, *(layer for parent in parents if (layer := module.get_submodule(parent)) in units)]
        problem = f"FSDP cannot shard {name}, because its parameter {place} belongs to two units"
        fix = "choose other units in fsdp_config, or train without FSDP"
        require(owners.setdefault(parameter, layers[-1]) is layers[-1], problem, fix)


def _bytes(model: nn.Module, resolved: Resolved) -> list[int]:
    """The bytes of this rank's parameters, gradients and optimizer state."""
    trained = sum(_size(parameter) for parameter in model.parameters() if parameter.requires_grad)
    return [sum(map(_size, model.parameters())), trained, trained * state_per_value(resolved.config)]


def _size(tensor: Tensor) -> int:
    return local(tensor).nbytes
