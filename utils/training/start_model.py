"""The model that a run starts with."""

import hashlib

import torch
from torch import nn

from utils.config.settings import TrainConfig
from utils.console import join_names
from utils.errors import UserError
from utils.models.checking import bad_tensors
from utils.models.freezing import freeze
from utils.models.matching import copy_matching
from utils.models.recomputing import checkpoint_blocks
from utils.ranks.batchnorm import convert_batch_norm
from utils.ranks.ranks import Ranks
from utils.runs.source import InitialWeights


def prepare_start(
    module: nn.Module, config: TrainConfig, class_names: list[str], source: InitialWeights | None, ranks: Ranks
) -> nn.Module:
    """The model with the weights of `source`, if there is one; collective.

    --freeze, --grad_checkpointing and --sync_batchnorm change its layers.
    """
    with ranks.agree():
        if source is not None:
            load_source(module, source, class_names, config.model)
        if config.freeze:
            freeze(module, config.freeze, source.match.new if source and source.match else {})
        if config.grad_checkpointing:
            checkpoint_blocks(module, config.model)
        return convert_batch_norm(module) if config.sync_batchnorm else module


def check_same_weights(config: TrainConfig, module: nn.Module, ranks: Ranks) -> None:
    """Raise UserError if ranks start with different weights. Without DDP, nothing makes them equal. Collective."""
    if not config.microbatches or ranks.topology.world_size == 1:
        return
    digest = hashlib.sha256()
    for tensor in (*module.parameters(), *module.buffers()):
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    fix = "use the same kind of processor, the same versions and the same files on all machines"
    ranks.check_same(digest.hexdigest(), "different weights at the start", fix)


def load_source(module: nn.Module, source: InitialWeights, class_names: list[str], name: str) -> None:
    """Copy the weights that fit into the model, and note in `source` which they are.

    Raises UserError if no parameter fits, or if a copied tensor is NaN or infinite.
    """
    tensors = source.tensors()
    source.match = copy_matching(module, tensors, source.class_names, class_names)
    if bad := bad_tensors(module.state_dict()):
        raise UserError(f"--init_from {source.name}: {join_names(bad, 3)} is NaN or infinite", "use other weights")
    if not {key for key, _ in module.named_parameters()} & set(source.match.kept):
        theirs, own = join_names(tensors, 3), join_names(module.state_dict(), 3)
        problem = f"--init_from {source.name}: none of its tensors ({theirs}) fits {name}, which has {own}"
        raise UserError(problem, "set --model to the model of these weights")
