"""What FSDP2 needs around `Accelerator.prepare`, which shards the model and its optimizer.

Each process holds some rows of each parameter, of its gradient and of its optimizer state. The
parameters of a block are gathered when they are needed. The rest of the run is the same as with
DDP.
"""

import os

import torch
from accelerate.utils import convert_outputs_to_fp32
from torch import nn
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from utils.console import say
from utils.memory import bytes_text
from utils.models import count_units, find_blocks, local_shard
from utils.ranks import Ranks
from utils.training.setup import Setup


def get_ready_to_shard(model: nn.Module, setup: Setup) -> None:
    """Prepare the model for FSDP2, before `Accelerator.prepare`.

    If the accelerate config chooses no units, blocks are used.
    """
    accelerator = setup.accelerator
    # FSDP2 needs this; --channels_last still applies to images
    model.to(memory_format=torch.contiguous_format)
    plugin = accelerator.state.fsdp_plugin
    if plugin.auto_wrap_policy in (None, transformer_auto_wrap_policy):
        blocks = {type(block).__name__ for block in find_blocks(model)}
        plugin.auto_wrap_policy = transformer_auto_wrap_policy
        plugin.transformer_cls_names_to_wrap = plugin.transformer_cls_names_to_wrap or list(blocks)
    if os.environ.get("FSDP_AUTO_WRAP_POLICY", "").upper() == "NO_WRAP":
        say("fsdp_auto_wrap_policy: NO_WRAP is ignored: each block is a unit")
    if accelerator.native_amp:  # Accelerate does not do this for FSDP2
        model.forward = convert_outputs_to_fp32(accelerator.autocast()(model.forward))


def describe_shards(model: nn.Module, ranks: Ranks) -> str:
    """The bytes of a sharded model's parameters, in all and on one rank, for the start table;
    collective.
    """
    parameters = list(model.parameters())
    count = count_units(model)
    total = bytes_text(sum(each.numel() * each.element_size() for each in parameters))
    most = bytes_text(max(ranks.gather(sum(local_shard(each).nbytes for each in parameters))))
    units = "1 unit" if count == 1 else f"{count} units"
    return f"FSDP2, {units}; parameters {total}, on each rank at most {most}"
