"""Write tensors to a safetensors file, the rows of one rank at a time: a sharded model never has to fit on one rank."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from utils.config.bounds import require
from utils.files import naming_file
from utils.models.sharded import local, row_blocks

Tensors = Mapping[str, tuple[Mapping[str, Tensor], Mapping[str, str]]]  # file name -> (tensors by name, metadata)

# Names of the dtypes in the file. Tensors are written in this order, largest items first, so that all are aligned.
_TYPES = {
    torch.uint64: "U64", torch.int64: "I64", torch.float64: "F64", torch.complex64: "C64", torch.float32: "F32",
    torch.uint32: "U32", torch.int32: "I32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint16: "U16",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def check_types(tensors: Mapping[str, Tensor]) -> None:
    """Raise UserError if a tensor has a dtype that these files do not have."""
    for name, tensor in tensors.items():
        require(tensor.dtype in _TYPES, f"{name} has dtype {tensor.dtype}, which cannot be saved", "use another dtype")


def write_tensors(path: Path | None, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> OSError | None:
    """Write a safetensors file; collective if a tensor is sharded.

    Its bytes are those of `safetensors.torch.save_file`, except that the order of metadata is fixed. Ranks with `path`
    None send and receive the same rows, but write nothing. Returns an OSError instead of raising it, after all rows
    have been sent. Otherwise the other ranks would hang.
    """
    types = list(_TYPES)
    order = sorted(tensors, key=lambda name: (types.index(tensors[name].dtype), name))
    blocks, error = (rows for name in order for rows in _blocks(tensors[name])), None
    try:
        if path is not None:
            with naming_file(path), path.open("wb") as file:
                file.write(_header(tensors, order, metadata))
                for rows in blocks:
                    file.write(rows.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    except OSError as raised:
        error = raised
    for _ in blocks:  # take part in the remaining broadcasts
        pass
    return error


def _blocks(tensor: Tensor) -> Iterator[Tensor]:
    """The rows of each rank, in their order in the tensor; collective. All of them at once if it is not sharded."""
    if not isinstance(tensor, DTensor):
        yield tensor
        return
    own, mesh = local(tensor), tensor.device_mesh
    for rank, shape in enumerate(rows.shape for rows in row_blocks(torch.empty(tensor.shape, device="meta"), tensor)):
        rows = own if rank == mesh.get_local_rank() else own.new_empty(shape)
        dist.broadcast(rows, group=mesh.get_group(), group_src=rank)
        yield rows


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata in the header of a safetensors file whose header was already checked."""
    with path.open("rb") as file:
        return json.loads(file.read(int.from_bytes(file.read(8), "little"))).get("__metadata__", {})


def _header(tensors: Mapping[str, Tensor], order: list[str], metadata: Mapping[str, str]) -> bytes:
    """The header of a safetensors file: the length of the header, then names, dtypes, shapes and offsets as JSON."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        start, end = end, end + tensors[name].numel() * tensors[name].itemsize
        shape = list(tensors[name].shape)
        entries[name] = {"dtype": _TYPES[tensors[name].dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
