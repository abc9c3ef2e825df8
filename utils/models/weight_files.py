"""Read weights that others have published: safetensors files, and files of torch.save.

Nothing in them is executed.
"""

import argparse
import re
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file
from torch import Tensor

from utils.config import require
from utils.errors import UserError, one_line
from utils.files import naming_file, open_regular

# Names under which trainers store a model's tensors. Averaged weights come first.
WRAPPERS = (
    "model_ema",
    "state_dict_ema",
    "ema",
    "model_state_dict",
    "state_dict",
    "model",
    "module",
    "teacher",
)
_SAVE = "save only the state dict: torch.save(model.state_dict(), FILE)"


def read_weights(path: Path, fix: str = "use another checkpoint") -> dict[str, Tensor]:
    """The tensors in a safetensors file. Raises UserError with this fix if it is not one."""
    try:
        with suppress(OSError):  # the file system cannot map files into memory
            return load_file(path)
        return load(path.read_bytes())
    except SafetensorError as error:
        problem = f"{path}: is not a safetensors file ({one_line(error)[:80]})"
        raise UserError(problem, fix) from error


def load_pickled(path: Path) -> Any:
    """The tensors, numbers and strings in a file of torch.save, mapped into memory if the file
    system can.
    """
    check_size(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError:
        return torch.load(path, map_location="cpu", weights_only=True)


def read_any(file: Path) -> tuple[dict[str, Tensor], str]:
    """The tensors in a safetensors file or in a file of torch.save, and the keys under which they
    were found.

    The keys are those of `WRAPPERS`, such as `state_dict`, or else of the dictionary with the most
    tensors. Raises UserError if loading the file would execute code, or if it has no state dict.
    """
    with naming_file(file):
        open_regular(file).close()
    if file.suffix == ".safetensors":
        return plain_tensors(file, read_weights(file, "give another file")), ""
    try:
        # in timm's checkpoints; holds only data
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = load_pickled(file)
    except UnpicklingError as error:
        named = re.findall(r"(?:GLOBAL|class) (\S+)", str(error))
        require(named, f"{file}: is not a file of torch.save", "give another file")
        problem = f"{file}: is refused, because loading {named[0]} in it would execute code"
        raise UserError(problem, f"if you trust the file, load it and {_SAVE}") from error
    except UserError:
        raise
    # torch.load raises errors of many classes, such as those of struct and zipfile
    except Exception as error:
        problem = f"{file}: its weights cannot be read ({one_line(error)[:160]})"
        fix = "give a safetensors file, or one of torch.save with a state dict"
        raise UserError(problem, fix) from error
    content, inside = _unwrapped(content)
    return plain_tensors(file, content), ", ".join(inside)


def _unwrapped(content: Any) -> tuple[Any, list[str]]:
    """The state dict in what a file holds, and the keys under which it was found."""
    inside: list[str] = []
    while isinstance(content, dict) and len(inside) < 4:  # a dictionary may contain itself
        names = [*WRAPPERS]
        if not _count(content):  # other names, such as net, only where no tensors are beside them
            names += sorted(content, key=lambda name: -_count(content[name]))
        held = [name for name in names if _count(content.get(name), Tensor | dict)]
        if not held:
            break
        inside.append(f"{held[0]}")
        content = content[held[0]]
    return content, inside


def _count(content: Any, kind: Any = Tensor) -> int:
    """How many values of a dictionary are tensors."""
    if not isinstance(content, dict):
        return 0
    return sum(isinstance(value, kind) for value in content.values())


def check_size(path: Path) -> None:
    """Raise UserError for an archive whose entries are larger than the file. torch.save never
    compresses them.
    """
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        problem = f"{path}: is refused, because it is larger when unpacked ({size:,} bytes)"
        require(size <= path.stat().st_size, problem, "save it again with torch.save")


def plain_tensors(path: Path, content: Any) -> dict[str, Tensor]:
    """The tensors of a state dict by name. Other values are left out."""
    values = content.items() if isinstance(content, Mapping) else ()
    tensors = {
        name: value.detach()
        for name, value in values
        if isinstance(name, str) and isinstance(value, Tensor)
    }
    tensors.pop("n_averaged", None)  # of torch's AveragedModel
    require(tensors, f"{path}: has no state dict with tensors", _SAVE)
    for name, tensor in tensors.items():
        # A view can have more bytes than its storage.
        dense = tensor.layout == torch.strided and tensor.device.type == "cpu"
        plain = not (tensor.is_neg() or tensor.is_quantized or tensor.is_complex())
        fits = dense and plain and tensor.nbytes <= tensor.untyped_storage().nbytes()
        require(fits, f"{path}: {name} is not a plain dense tensor", _SAVE)
    return tensors
