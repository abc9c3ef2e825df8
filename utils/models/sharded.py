"""Tensors of a model, without duplicates. With FSDP2, each rank has some rows of each parameter, as
a DTensor.

`local` and `whole` return plain tensors unchanged.
"""

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 has sharded this model.

    If so, all ranks run it the same number of times, even without samples.
    """
    return isinstance(model, FSDPModule)


def count_units(model: nn.Module) -> int:
    """The number of FSDP units: modules whose parameters are gathered together."""
    return sum(isinstance(module, FSDPModule) for module in model.modules())


@torch.no_grad()
def local_shard(tensor: Tensor) -> Tensor:
    """The rows of this rank, in the memory of `tensor`."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor, with the rows of all ranks; collective if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def copy_into(target: Tensor, tensor: Tensor) -> None:
    """Copy the full `tensor` into `target`: if that is sharded, only the rows of this rank, without
    communication.
    """
    if isinstance(target, DTensor):
        assert target.placements == (Shard(0),)
        mesh = target.device_mesh
        blocks = tensor.chunk(mesh.size())  # as FSDP2 divides the rows
        rank = mesh.get_local_rank()
        tensor = blocks[rank] if rank < len(blocks) else tensor[:0]  # the last ranks may have none
    local_shard(target).copy_(tensor)


def reshard(model: nn.Module) -> None:
    """Free the full parameters that FSDP2 keeps after a forward pass without a backward pass.

    Otherwise the next forward pass would use them, even if the weights have changed meanwhile.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def tied_names(model: nn.Module) -> dict[str, str]:
    """The later names of each tensor that has several, and its first name."""
    first: dict[int, str] = {}
    found = {
        name: first.setdefault(id(tensor), name)
        for name, tensor in model.state_dict(keep_vars=True).items()
    }
    return {name: other for name, other in found.items() if name != other}


def distinct_state(model: nn.Module) -> dict[str, Tensor]:
    """The `state_dict` of the model without the later names of tied tensors."""
    later = tied_names(model)
    return {name: tensor for name, tensor in model.state_dict().items() if name not in later}
