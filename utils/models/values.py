"""The values of tensors: whether they are finite, their hash, and the sum of their bits."""

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from utils.models.sharded import local_shard


def bad_tensors(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of the tensors with a NaN or infinite value, in the rows of this rank if they are
    sharded.

    Waits for the device.
    """
    floats = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    # with fsdp_offload_params, buffers are on another device
    device = next(iter(floats.values())).device
    good = [_is_finite(local_shard(tensor)).to(device) for tensor in floats.values()]
    waited = torch.stack(good).tolist()  # for the device, only once
    return [name for name, is_good in zip(floats, waited, strict=True) if not is_good]


def _is_finite(tensor: Tensor) -> Tensor:
    if tensor.numel() == 0:  # a rank may have no row of a sharded tensor
        return torch.tensor(True)
    # On a CPU this is several times faster than `isfinite` of all values.
    return torch.stack(tensor.aminmax()).isfinite().all()


def hash_tensors(tensors: Iterable[Tensor]) -> str:
    """The SHA-256 of the values of these tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


_COLUMNS = 4093  # a prime: rows or channels in another order change the sum


def sum_bits(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """A sum of the bits of each tensor, as integers weighted by their position, modulo 2**64.

    Waits once for the device.
    """
    device = next(iter(tensors.values())).device  # an optimizer may count steps on the host
    sums = torch.stack([sum_words(tensor.detach()).to(device) for tensor in tensors.values()])
    return dict(zip(tensors, sums.tolist(), strict=True))


def sum_words(tensor: Tensor) -> Tensor:
    """A sum of the bits of a tensor, int64, as `sum_bits` computes it; does not wait."""
    # The values as they are in memory, which copies nothing.
    as_stored = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    values = tensor.permute(as_stored).reshape(-1).contiguous()
    fits = values.nbytes % 8 == values.storage_offset() * values.itemsize % 8 == 0
    words = values.view(torch.int64 if fits else torch.uint8)  # larger words are faster
    end = len(words) // _COLUMNS * _COLUMNS
    sums = words[:end].view(-1, _COLUMNS).sum(0)
    rest = words[end:]
    sums[: len(rest)] += rest
    sums ^= sums >> 31  # otherwise two changed signs would cancel
    # odd factors: every change of one word changes the sum
    return (sums * torch.arange(1, 2 * _COLUMNS, 2, device=sums.device)).sum()
