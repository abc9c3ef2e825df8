"""Tensors of a model that FSDP2 has sharded: each rank holds some rows of each parameter, as a DTensor.

`local`, `whole`, `shard_like` and `wrap_like` return plain tensors unchanged.
"""

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 has sharded this model. If so, all ranks run it the same number of times, even without samples."""
    return isinstance(model, FSDPModule)


def count_units(model: nn.Module) -> int:
    """The number of FSDP units: modules whose parameters are gathered together."""
    return sum(isinstance(module, FSDPModule) for module in model.modules())


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """The rows of this rank, in the memory of `tensor`."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """The full tensor, with the rows of all ranks; collective if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """The full `tensor`, sharded like `like`, without communication."""
    if not isinstance(like, DTensor):
        return tensor
    rows = tensor.chunk(like.device_mesh.size())  # as FSDP2 divides them; the last ranks may have none
    rank = like.device_mesh.get_local_rank()
    return wrap_like(rows[rank] if rank < len(rows) else tensor[:0], like)


def wrap_like(rows: Tensor, like: Tensor) -> Tensor:
    """A DTensor like `like`, with `rows` as this rank's shard; `rows` if `like` is not sharded."""
    if not isinstance(like, DTensor):
        return rows
    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(rows.to(like.device), mesh, placements, shape=like.shape, stride=like.stride())


def forget_whole_weights(model: nn.Module) -> None:
    """Free the full parameters that FSDP2 keeps after a forward pass without a backward pass.

    Otherwise the next forward pass would use them, even if the weights have changed meanwhile.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
