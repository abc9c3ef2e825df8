"""Create, complete and delete the folders of checkpoints.

A folder that is being written is `.step-N.partial`.
"""

import errno
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from utils.errors import UserError, is_lost_rank, one_line
from utils.files import link_or_copy, naming_file, put_in_place, write_file
from utils.launch import is_out_of_memory
from utils.models import load_pickled
from utils.runs.manifest import (
    EMA_FILE,
    OPTIMIZER,
    SCALER,
    WEIGHTS_FILE,
    checkpoint_of,
    checkpoints_of,
    damage_of,
    read_pointer,
    step_of,
    write_manifest,
)

_OF_FSDP = "pytorch_model_fsdp.bin"  # the weights, as `save_state` writes them with FSDP2


def new_partial(folder: Path, step: int, need: int) -> None:
    """Make the folder for the checkpoint of `step`.

    Raises OSError if its disk has no space for `need` bytes.
    """
    partial = partial_of(folder, step)
    shutil.rmtree(partial, ignore_errors=True)
    if shutil.disk_usage(folder).free < need:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(partial))
    partial.mkdir()


def delete_failed(partial: Path, error: Exception) -> Exception:
    """Delete the folder, and return the error to raise: errors of PyTorch and safetensors become a
    UserError.
    """
    shutil.rmtree(partial, ignore_errors=True)  # free the space on a full disk
    of_library = isinstance(error, RuntimeError | SafetensorError)
    if not of_library or is_lost_rank(error) or is_out_of_memory(error):
        return error
    problem = f"{partial}: the checkpoint cannot be written ({one_line(error)[:160]})"
    return UserError(problem, "check the disk, and how much of it is free")


def finish_partial(partial: Path, files: Mapping[str, bytes | Path]) -> None:
    """Delete the files of `save_state` that a checkpoint does not need, then write or link its
    other files.

    Random states are not needed: the random numbers of a run follow from its seed.
    """
    for path in partial.iterdir():
        if path.name not in (WEIGHTS_FILE, OPTIMIZER, SCALER, EMA_FILE, _OF_FSDP):
            path.unlink(missing_ok=True)
    for name, contents in files.items():
        with naming_file(partial / name):
            if isinstance(contents, Path):
                link_or_copy(contents, partial / name)
            else:
                (partial / name).write_bytes(contents)


def publish(
    folder: Path, step: int, known: Mapping[str, str] | None = None, tied: Iterable[str] = ()
) -> None:
    """Complete the checkpoint of `step`: write its manifest, flush it to the disk, rename it.

    `known` has the SHA-256 of some files. With FSDP2, the weights become a safetensors file first,
    without the `tied` names.
    """
    partial = partial_of(folder, step)
    if (partial / _OF_FSDP).exists():
        tensors = load_pickled(partial / _OF_FSDP)
        weights = {name: tensor for name, tensor in tensors.items() if name not in tied}
        save_file(weights, partial / WEIGHTS_FILE, {"format": "pt"})
        (partial / _OF_FSDP).unlink()
    write_manifest(partial, known)
    put_in_place(partial, checkpoint_of(folder, step))


def update_pointers(folder: Path, step: int, best_step: int | None, keep: int | str) -> None:
    """Update `latest` and `best` after a save, then delete old checkpoints.

    Raises OSError if the pointers cannot be updated. Even then the new checkpoint is kept, and old
    ones are deleted so that they do not fill the disk.
    """
    best = checkpoint_of(folder, best_step)
    prune(folder, keep, best)  # before the pointers move, because it makes room on a full disk
    _move_pointers(folder, step, best)
    prune(folder, keep, best)  # what the pointers named


def prune(folder: Path, keep: int | str, best: Path) -> None:
    """Delete all checkpoints except the `keep` newest, `best`, and those that the pointers name.

    "all" deletes none.
    """
    if isinstance(keep, str):
        return
    kept = (best, read_pointer(folder, "best"), read_pointer(folder, "latest"))
    for old in checkpoints_of(folder)[:-keep]:
        if old not in kept:
            _remove(old)


def delete_after(folder: Path, step: int, best_step: int | None) -> None:
    """Delete the checkpoints after `step`, whose updates will be repeated.

    Damaged ones are renamed to step-N.damaged, because the disk may be the cause.
    """
    best = checkpoint_of(folder, best_step)
    if not best.is_dir():
        (folder / "best").unlink(missing_ok=True)
    _move_pointers(folder, step, best)
    for path in reversed(checkpoints_of(folder)):  # newest first: if killed, no gap is left
        if step_of(path) <= step:
            break
        aside = path.with_name(f"{path.name}.damaged")
        if damage_of(path) and not aside.exists():
            path.rename(aside)
            print(f"{path} is damaged and was renamed to {aside.name}")
        else:
            _remove(path)
            print(f"{path} was deleted: its updates will be repeated")


def _move_pointers(folder: Path, step: int, best: Path) -> None:
    if best.is_dir() and read_pointer(folder, "best") != best:
        write_file(folder / "best", best.name + "\n")
    write_file(folder / "latest", f"{checkpoint_of(folder, step).name}\n")


def clean_up(folder: Path) -> None:
    """Finish or delete the partial work of a killed process, while no other run writes there."""
    for old in folder.glob(".step-*.old"):
        final = folder / old.name[1 : -len(".old")]
        if not final.exists():  # killed between the two renames of `put_in_place`
            old.rename(final)
    for leftover in [*folder.glob(".step-*"), *folder.glob(".*.partial")]:
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def partial_of(folder: Path, step: int) -> Path:
    """The folder in which the checkpoint of `step` is written."""
    return folder / f".step-{step:08d}.partial"


def _remove(checkpoint: Path) -> None:
    """Delete a checkpoint. At any time it is either complete or absent."""
    gone = checkpoint.with_name(f".{checkpoint.name}.gone")
    with suppress(OSError):
        checkpoint.rename(gone)
        shutil.rmtree(gone)
