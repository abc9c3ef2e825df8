"""Write, complete and delete the folders of checkpoints. All functions but `write_partial` run on one rank."""

import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from utils.files import naming_file, put_in_place, write_file
from utils.runs.manifest import checkpoint_of, checkpoints_of, damage_of, read_pointer, step_of, write_manifest
from utils.runs.tensors import Tensors, write_tensors


def write_partial(folder: Path, step: int, tensors: Tensors, files: Mapping[str, bytes], writes: bool) -> None:
    """Write the contents of a checkpoint, which `publish` completes; collective if the model is sharded.

    `writes` is true on one rank. If it cannot write, it raises OSError after all tensors have been sent, and
    deletes the incomplete checkpoint.
    """
    # Accelerate's `save_state` is not used: it gathers a sharded model on one rank. `load_state`, which reads its
    # files, unpickles random states and matches the optimizer's state by position.
    partial, error = _partial(folder, step), None
    try:
        if writes:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
    except OSError as raised:
        error = raised
    for name, (values, metadata) in tensors.items():
        error = write_tensors(partial / name if writes and not error else None, values, metadata) or error
    try:
        if error is not None:
            raise error
        for name, contents in files.items() if writes else ():
            with naming_file(partial / name):
                (partial / name).write_bytes(contents)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)  # free the space on a full disk
        raise


def publish(folder: Path, step: int) -> None:
    """Complete the checkpoint of `step`: write its manifest, flush it to the disk, rename it.

    If this fails, deletes what was written and raises OSError.
    """
    partial = _partial(folder, step)
    try:
        write_manifest(partial)
        put_in_place(partial, checkpoint_of(folder, step))
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def update_pointers(folder: Path, step: int, best_step: int | None, keep: int | str) -> None:
    """Update `latest` and `best` after a save, then delete old checkpoints.

    Raises OSError if the pointers cannot be updated. Even then the new checkpoint is kept, and old ones are deleted so
    that they do not fill the disk.
    """
    best = checkpoint_of(folder, best_step)
    prune(folder, keep, best)  # before the pointers move, because it makes room on a full disk
    _move_pointers(folder, step, best)
    prune(folder, keep, best)  # what the pointers named


def prune(folder: Path, keep: int | str, best: Path | None = None) -> None:
    """Delete all checkpoints except the `keep` newest, `best`, and those that the pointers name. "all" deletes none."""
    if isinstance(keep, str):
        return
    kept = (best, read_pointer(folder, "best"), read_pointer(folder, "latest"))
    for old in checkpoints_of(folder)[:-keep]:
        if old not in kept:
            _remove(old)


def delete_after(folder: Path, step: int, best_step: int | None) -> None:
    """Delete the checkpoints after `step`, whose updates will be repeated.

    Damaged ones are renamed to step-N.damaged, because the disk may be the cause. Does nothing if the checkpoint of
    `step` is not in this folder: then the run resumes from a checkpoint of another run.
    """
    if not checkpoint_of(folder, step).is_dir():
        return
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
        shutil.rmtree(leftover, ignore_errors=True) if leftover.is_dir() else leftover.unlink(missing_ok=True)


def _partial(folder: Path, step: int) -> Path:
    return folder / f".step-{step:08d}.partial"


def _remove(checkpoint: Path) -> None:
    """Delete a checkpoint. At any time it is either complete or absent."""
    gone = checkpoint.with_name(f".{checkpoint.name}.gone")
    with suppress(OSError):
        checkpoint.rename(gone)
        shutil.rmtree(gone)
