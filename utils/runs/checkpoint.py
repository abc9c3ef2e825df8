"""Write and delete checkpoints. A checkpoint is a folder that is complete or does not exist.

RUN/checkpoints/step-00001234/   model.safetensors, optimizer.bin, random_states_RANK.pkl   (Accelerate's save_state)
                                 NAME.safetensors of each part                              (parts.py)
                                 state.json, config.yaml, labels.json, samples.json.gz      (metadata.py)
                                 manifest.json                                              (size and SHA-256 of each)
RUN/checkpoints/latest, best     one line each: the name of such a folder
"""

import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import save_file

from utils.errors import AgreedError, one_line
from utils.files import naming_file, sync, write_file
from utils.ranks.ranks import Ranks
from utils.runs.manifest import MANIFEST, checkpoints_of, damage_of, manifest_text, read_pointer, sha256_of, step_of
from utils.runs.parts import Part


def write_checkpoint(
    ranks: Ranks,
    accelerator: Accelerator,
    partial: Path,
    texts: Mapping[str, str | bytes],
    parts: Mapping[str, Part],
) -> None:
    """Write Accelerate's state, the parts and the small files `texts` to `partial`.

    Collective. Call `publish` to complete the checkpoint. Older checkpoints do not change. An error on any rank
    (OSError or AgreedError) is raised on all ranks.
    """

    def prepare() -> None:
        if not partial.parent.is_dir():  # not created again: its disk may be unmounted for a while
            raise FileNotFoundError(f"{partial.parent} no longer exists")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()

    def write() -> None:
        _save_state(accelerator, partial, parts if ranks.is_main else {})
        for name, text in texts.items() if ranks.is_main else ():
            with naming_file(partial / name):
                (partial / name).write_bytes(text if isinstance(text, bytes) else text.encode())

    try:
        ranks.run_on_main(prepare)
        ranks.run_on_all(write)
    except (OSError, AgreedError):
        if ranks.is_main:
            shutil.rmtree(partial, ignore_errors=True)  # free the space on a full disk
        raise


def partial_of(folder: Path, step: int) -> Path:
    """The folder in which the checkpoint of `step` is written."""
    return folder / f".step-{step:08d}.partial"


def publish(partial: Path) -> None:
    """Complete the checkpoint in `partial`: write its manifest, flush it to the disk, rename it. Call on one rank.

    If this fails, deletes the folder and raises OSError.
    """
    try:
        _write_manifest(partial)
        _put_in_place(partial, partial.with_name(partial.name[1 : -len(".partial")]))
    except OSError:
        if not partial.parent.is_dir():
            raise FileNotFoundError(f"{partial.parent} no longer exists") from None
        shutil.rmtree(partial, ignore_errors=True)
        raise


def update_pointers(folder: Path, step: int, best_step: int | None, keep: int) -> None:
    """Update `latest` and `best` after a save, then delete old checkpoints. Call on one rank.

    Raises OSError if the pointers cannot be updated. Even then the new checkpoint is kept, and old ones
    are deleted so that they do not fill the disk. The next successful save corrects `best`.
    """
    best = folder / f"step-{best_step or 0:08d}"

    def move_pointers() -> None:
        write_file(folder / "latest", f"step-{step:08d}\n")
        if best.is_dir() and read_pointer(folder, "best") != best:
            write_file(folder / "best", best.name + "\n")

    try:
        move_pointers()
    except OSError:
        prune(folder, keep, best)
        move_pointers()
    prune(folder, keep, best)


def prune(folder: Path, keep: int, best: Path | None = None) -> None:
    """Delete all checkpoints except the `keep` newest, `best`, and those that the pointers name. Call on one rank."""
    kept = (best, read_pointer(folder, "best"), read_pointer(folder, "latest"))
    for old in checkpoints_of(folder)[:-keep]:
        if old not in kept:
            _remove(old)


def delete_after(folder: Path, step: int, best_step: int | None) -> None:
    """Delete the checkpoints after `step`, whose updates will be repeated. Call on one rank.

    Damaged ones are renamed to step-N.damaged, because the disk may be the cause. Does nothing if the checkpoint of
    `step` is not in this folder: then the run resumes from a checkpoint of another run.
    """
    if not (folder / f"step-{step:08d}").is_dir():
        return
    best = folder / f"step-{best_step or 0:08d}"
    if best.is_dir():
        write_file(folder / "best", best.name + "\n")
    else:
        (folder / "best").unlink(missing_ok=True)
    write_file(folder / "latest", f"step-{step:08d}\n")
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


def clean_up(folder: Path) -> None:
    """Finish or delete the partial work of a killed process. Call on one rank, while no other run writes there."""
    for old in folder.glob(".step-*.old"):
        final = folder / old.name[1 : -len(".old")]
        if not final.exists():  # killed between the two renames
            old.rename(final)
    for leftover in [*folder.glob(".step-*"), *folder.glob(".*.partial")]:
        shutil.rmtree(leftover, ignore_errors=True) if leftover.is_dir() else leftover.unlink(missing_ok=True)


def _save_state(accelerator: Accelerator, folder: Path, parts: Mapping[str, Part]) -> None:
    try:
        accelerator.save_state(str(folder))
        for name, part in parts.items():
            tensors = {key: tensor.contiguous() for key, tensor in part.state_dict().items()}
            save_file(tensors, folder / f"{name}.safetensors")
    except (RuntimeError, SafetensorError) as error:  # how torch and safetensors report a full disk
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder.parent} no longer exists") from error
        raise OSError(f"{folder}: cannot be written ({one_line(error)[:120]}); is the disk full?") from error


def _write_manifest(folder: Path) -> None:
    """Write the manifest, give all files the default mode, and flush everything to the disk."""
    mode, entries = folder.stat().st_mode & 0o666, {}  # the umask of the process could only be read by changing it
    for path in sorted(folder.iterdir()):
        path.chmod(mode)  # safetensors makes its files readable by the owner only
        entries[path.name] = {"size": path.stat().st_size, "sha256": sha256_of(path)}
        sync(path)
    write_file(folder / MANIFEST, manifest_text(entries))
    sync(folder)


def _put_in_place(partial: Path, final: Path) -> None:
    """Rename a finished folder to `final`, which may exist. After a kill, `clean_up` restores the older folder."""
    old = final.with_name(f".{final.name}.old")
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    try:
        partial.rename(final)
        sync(final.parent)
    finally:
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
        elif old.exists():
            old.rename(final)


def _remove(checkpoint: Path) -> None:
    """Delete a checkpoint. At any time it is either complete or absent."""
    gone = checkpoint.with_name(f".{checkpoint.name}.gone")
    with suppress(OSError):
        checkpoint.rename(gone)
        shutil.rmtree(gone)
