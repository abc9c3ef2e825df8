"""Checkpoints on disk: folders that appear whole or not at all, are verified before they are read, and pruned last.

RUN/checkpoints/step-00001234/   model.safetensors, optimizer.bin, random_states_RANK.pkl   (Accelerate's save_state)
                                 state.json, config.yaml, labels.json                       (ours)
                                 manifest.json                                              (size and SHA-256 of each)
RUN/checkpoints/latest, best     one line each: the name of such a folder; a resume takes the newest good one
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from utils.distributed import Ranks
from utils.errors import AgreedError, one_line
from utils.files import named, read_json, read_text, sync, write_file

MANIFEST = "manifest.json"
FOR_EVALUATION = ("model.safetensors", "state.json", "config.yaml", "labels.json")
FOR_RESUME = (*FOR_EVALUATION, "optimizer.bin")


def save_checkpoint(
    ranks: Ranks, accelerator: Accelerator, folder: Path, step: int, texts: dict[str, str | bytes]
) -> None:
    """Write `folder`/step-N with Accelerate's state and these small files; call `settle` after it.

    Collective; an error on any rank, OSError or AgreedError, is raised on all, and the checkpoints that were there
    before are as they were.
    """
    final = folder / f"step-{step:08d}"
    partial = folder / f".{final.name}.partial"

    def prepare() -> None:
        if ranks.is_main:
            if not folder.is_dir():  # not made again: it may be a disk that is away for a while
                raise FileNotFoundError(f"{folder} has vanished")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()

    def publish() -> None:
        if ranks.is_main:
            for name, text in texts.items():
                with named(partial / name):
                    (partial / name).write_bytes(text if isinstance(text, bytes) else text.encode())
            _seal(partial)
            _put_in_place(partial, final)

    try:
        ranks.together(prepare)
        ranks.together(lambda: _save_state(accelerator, partial))
        ranks.together(publish)
    except (OSError, AgreedError):
        if ranks.is_main:
            shutil.rmtree(partial, ignore_errors=True)  # a full disk needs the room
        raise


def settle(folder: Path, step: int, best_step: int | None, keep: int) -> None:
    """Move `latest` and `best` to a checkpoint that was saved, and prune. Call on one rank, after a save.

    Raises OSError if they cannot be moved. The checkpoint is kept and old ones are deleted even then: they would pile
    up, and a full disk needs the room. The next save that succeeds corrects `best`.
    """
    best = folder / f"step-{best_step or 0:08d}"

    def move_pointers() -> None:
        write_file(folder / "latest", f"step-{step:08d}\n")
        if best.is_dir() and _pointer(folder, "best") != best:
            write_file(folder / "best", best.name + "\n")

    try:
        move_pointers()
    except OSError:
        prune(folder, keep, best)
        move_pointers()
    prune(folder, keep, best)


def prune(folder: Path, keep: int, best: Path | None = None) -> None:
    """Delete all but the `keep` newest checkpoints, `best`, and those that `best` and `latest` name; on one rank."""
    kept = (best, _pointer(folder, "best"), _pointer(folder, "latest"))
    for old in checkpoints_of(folder)[:-keep]:
        if old not in kept:
            _remove(old)


def forget_after(folder: Path, step: int, best_step: int | None) -> None:
    """Delete the checkpoints after `step`, whose updates are about to be made anew. Call on one rank.

    Damaged ones are put aside as step-N.damaged: perhaps the disk is what has to be mended. Does nothing where `step`
    itself is not there: then the run goes on from another run's checkpoint.
    """
    if not (folder / f"step-{step:08d}").is_dir():
        return
    best = folder / f"step-{best_step or 0:08d}"
    if best.is_dir():
        write_file(folder / "best", best.name + "\n")
    else:
        (folder / "best").unlink(missing_ok=True)
    write_file(folder / "latest", f"step-{step:08d}\n")
    for path in reversed(checkpoints_of(folder)):  # killed in the middle, it leaves no later one without those before
        if _step_of(path) <= step:
            break
        aside = path.with_name(f"{path.name}.damaged")
        if damage_of(path) and not aside.exists():
            path.rename(aside)
            print(f"{path} is now {aside.name}")
        else:
            _remove(path)
            print(f"{path} is deleted: what follows is trained anew")


def tidy(folder: Path) -> None:
    """Finish or clear away what a kill left half-done. Call on one rank, while no other run writes there."""
    for old in folder.glob(".step-*.old"):
        final = folder / old.name[1 : -len(".old")]
        if not final.exists():  # killed between the two renames
            old.rename(final)
    for leftover in [*folder.glob(".step-*"), *folder.glob(".*.partial")]:
        shutil.rmtree(leftover, ignore_errors=True) if leftover.is_dir() else leftover.unlink(missing_ok=True)


def checkpoints_of(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, whatever is left of them, oldest first; OSError when it cannot be listed."""
    return sorted((path for path in folder.iterdir() if _is_name(path.name)), key=_step_of)


def newest_good(folder: Path, needed: Sequence[str] = FOR_RESUME) -> tuple[Path | None, list[str]]:
    """The newest checkpoint in `folder` that is as it was written, and what is wrong with each newer one."""
    damages = []
    for checkpoint in reversed(checkpoints_of(folder)):
        damage = damage_of(checkpoint, needed)
        if damage is None:
            return checkpoint, damages
        damages.append(damage)
    return None, damages


def find_checkpoint(path: Path, prefer: tuple[str, ...] = ("best", "latest")) -> Path:
    """The checkpoint that `path` means: itself, or that of a run folder; raises ValueError when there is none."""
    if not path.exists():
        raise ValueError(f"{path}: no such checkpoint or run folder")
    if (path / MANIFEST).is_file() or _is_name(path.name):
        return path
    for folder in (path / "checkpoints", path):
        if not folder.is_dir():
            continue
        for name in prefer:
            found = _pointer(folder, name)
            if found is not None and found.is_dir():
                return found
        if checkpoints_of(folder):
            return checkpoints_of(folder)[-1]
    raise ValueError(f"{path}: holds no checkpoint")


def verify(checkpoint: Path, needed: Sequence[str] = FOR_RESUME) -> None:
    """Raise ValueError unless every file that the manifest names is there with its size and SHA-256.

    The manifest must name all `needed` files, as it protects only the files that it names.
    """
    damage = damage_of(checkpoint, needed)
    if damage is None:
        return
    good = None
    with suppress(OSError):
        good, _ = newest_good(checkpoint.parent, needed)
    raise ValueError(f"{damage}; {good or 'no other checkpoint there'} is good")


def files_of(checkpoint: Path) -> dict[str, dict]:
    """Size and SHA-256 of each file that the manifest names; ValueError if the manifest is damaged.

    Files that not every checkpoint has are read only if the manifest names them.
    """
    path = checkpoint / MANIFEST
    manifest = read_json(path)
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict) or not files or path.read_bytes() != _manifest_text(files).encode():
        raise ValueError(f"{path}: damaged")
    return files


def damage_of(checkpoint: Path, needed: Sequence[str] = FOR_RESUME) -> str | None:
    """The first thing that is not as the manifest says, None when all is well."""
    path = checkpoint / MANIFEST
    try:
        if not path.is_file():
            return f"{path}: missing"
        files = files_of(checkpoint)
        left_out = [name for name in needed if name not in files]
        if left_out:
            return f"{path}: does not name {', '.join(left_out)}"
        for name, entry in files.items():
            if Path(name).name != name or not isinstance(entry, dict):
                return f"{checkpoint / MANIFEST}: damaged"
            path = checkpoint / name
            if not path.is_file():
                return f"{path}: missing"
            if path.stat().st_size != entry.get("size") or _sha256(path) != entry.get("sha256"):
                return f"{path}: damaged"
    except (ValueError, OSError) as error:
        text = one_line(error)
        return text if text.startswith(str(path)) else f"{path}: {text}"  # a disk's error names no file
    return None


def load_model(checkpoint: Path, model: nn.Module) -> None:
    """Put the checkpoint's weights into `model`, all or none; ValueError when they are another model's."""
    path = checkpoint / "model.safetensors"
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path}: not readable ({one_line(error)})") from error
    own = model.state_dict()
    for name in [*own, *tensors]:
        here, there = (t[name].shape if name in t else None for t in (own, tensors))
        if here != there:
            there, here = ("nothing" if s is None else f"shape {list(s)}" for s in (there, here))
            raise ValueError(f"{checkpoint}: holds another model ({name}: {there} there, {here} in this one)")
    model.load_state_dict(tensors)


def load_optimizer(checkpoint: Path, optimizer: torch.optim.Optimizer) -> None:
    """Put the checkpoint's optimizer state into `optimizer`; nothing in the file is executed."""
    path = checkpoint / "optimizer.bin"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        own = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
        optimizer.load_state_dict(state)
        _check_shapes(optimizer)
        _lay_out(optimizer)
        for group, settings in zip(optimizer.param_groups, own, strict=True):
            group.update(settings)  # momentum, decay and the like are this run's, not the checkpoint's
    except Exception as error:  # torch.load raises many kinds: of struct, of pickle, AssertionError, IndexError
        raise ValueError(f"{path}: not this run's optimizer ({one_line(error)[:120]})") from error


def _check_shapes(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError where a tensor is neither a number nor like its parameter: the first update would fail."""
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if value is not None and value.shape not in ((), parameter.shape):
                raise ValueError(f"{name} of shape {list(value.shape)} for a parameter of {list(parameter.shape)}")


def _lay_out(optimizer: torch.optim.Optimizer) -> None:
    """Give each tensor its parameter's strides, which --channels_last may have changed: fused kernels do not look."""
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                values[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _save_state(accelerator: Accelerator, folder: Path) -> None:
    try:
        accelerator.save_state(str(folder))
    except (RuntimeError, SafetensorError) as error:  # what a full disk looks like from torch and safetensors
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder.parent} has vanished") from error
        raise OSError(f"{folder}: cannot be written ({one_line(error)[:120]}); is the disk full?") from error


def _seal(folder: Path) -> None:
    """Write the manifest, give all files the ordinary mode, and flush everything to the disk."""
    umask = os.umask(0)
    os.umask(umask)
    entries = {}
    for path in sorted(folder.iterdir()):
        path.chmod(0o666 & ~umask)  # safetensors makes its files private
        entries[path.name] = {"size": path.stat().st_size, "sha256": _sha256(path)}
        sync(path)
    write_file(folder / MANIFEST, _manifest_text(entries))
    sync(folder)


def _manifest_text(files: dict) -> str:
    """The one way to write a manifest, so that any change of its text is seen."""
    return json.dumps({"files": files}, indent=1) + "\n"


def _put_in_place(partial: Path, final: Path) -> None:
    """Give a finished folder its name; one that has it already is there until the new one is, or `tidy` restores it."""
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
    """Delete a checkpoint: at each instant it is there whole or not at all."""
    gone = checkpoint.with_name(f".{checkpoint.name}.gone")
    with suppress(OSError):
        checkpoint.rename(gone)
        shutil.rmtree(gone)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _pointer(folder: Path, name: str) -> Path | None:
    """The checkpoint that `latest` or `best` names; None where it names none."""
    try:
        target = read_text(folder / name, max_bytes=4096).strip()
    except (OSError, ValueError):
        return None
    return folder / target if _is_name(target) else None


def _is_name(name: str) -> bool:
    return re.fullmatch(r"step-\d+", name) is not None


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))
