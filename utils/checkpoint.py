"""Checkpoints on disk: folders that appear whole or not at all, are verified before they are read, and pruned last.

RUN/checkpoints/step-00001234/   model.safetensors, optimizer.bin, random_states_RANK.pkl   (Accelerate's save_state)
                                 state.json, config.yaml, labels.json                       (ours)
                                 manifest.json                                              (size and SHA-256 of each)
RUN/checkpoints/latest, best     one line each: the name of such a folder
"""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from pickle import UnpicklingError

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from utils.distributed import Ranks
from utils.errors import one_line
from utils.files import read_json, sync, write_file

MANIFEST = "manifest.json"


def save_checkpoint(
    ranks: Ranks, accelerator: Accelerator, folder: Path, step: int, texts: dict[str, str], is_best: bool
) -> Path:
    """Write `folder`/step-N with Accelerate's state and these small text files, then move `latest` (and `best`).

    Collective; an error on any rank is raised on all, and then nothing that was there before has changed.
    """
    final = folder / f"step-{step:08d}"
    partial = folder / f".{final.name}.partial"

    def prepare() -> None:
        if ranks.is_main:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

    def publish() -> None:
        if ranks.is_main:
            for name, text in texts.items():
                (partial / name).write_text(text)
            _seal(partial)
            shutil.rmtree(final, ignore_errors=True)  # an older one of the same step, from before a resume
            partial.rename(final)
            sync(folder)
            write_file(folder / "latest", final.name + "\n")
            if is_best:
                write_file(folder / "best", final.name + "\n")

    ranks.together(prepare)
    ranks.together(lambda: _save_state(accelerator, partial))
    ranks.together(publish)
    return final


def prune(folder: Path, keep: int) -> None:
    """Delete all but the `keep` newest checkpoints and the best one. Call on one rank, after a save."""
    kept = (_pointer(folder, "best"), _pointer(folder, "latest"))
    for old in checkpoints_of(folder)[:-keep]:
        if old not in kept:
            shutil.rmtree(old, ignore_errors=True)


def forget_after(folder: Path, step: int, best_step: int | None) -> None:
    """Delete the checkpoints after `step`, whose updates are about to be made anew. Call on one rank.

    Does nothing where `step` itself is not there: then the run goes on from another run's checkpoint.
    """
    if not (folder / f"step-{step:08d}").is_dir():
        return
    for path in checkpoints_of(folder):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path, ignore_errors=True)
    best = folder / f"step-{best_step or 0:08d}"
    if best.is_dir():
        write_file(folder / "best", best.name + "\n")
    else:
        (folder / "best").unlink(missing_ok=True)
    write_file(folder / "latest", f"step-{step:08d}\n")


def checkpoints_of(folder: Path) -> list[Path]:
    """The checkpoint folders in `folder`, oldest first."""
    return sorted(path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name) and path.is_dir())


def find_checkpoint(path: Path, prefer: tuple[str, ...] = ("best", "latest")) -> Path:
    """The checkpoint that `path` means: itself, or that of a run folder; raises ValueError when there is none."""
    if (path / MANIFEST).is_file():
        return path
    if not path.exists():
        raise ValueError(f"{path}: no such checkpoint or run folder")
    for folder in (path / "checkpoints", path):
        for name in prefer:
            found = _pointer(folder, name)
            if found is not None and found.is_dir():
                return found
        if checkpoints_of(folder):
            return checkpoints_of(folder)[-1]
    raise ValueError(f"{path}: holds no checkpoint")


def verify(checkpoint: Path) -> None:
    """Raise ValueError unless every file that the manifest names is there with its size and SHA-256."""
    manifest = read_json(checkpoint / MANIFEST)
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict) or not manifest["files"]:
        raise ValueError(f"{checkpoint / MANIFEST}: lists no files; take another checkpoint")
    for name, entry in manifest["files"].items():
        path = checkpoint / name
        if Path(name).name != name or not isinstance(entry, dict):
            raise ValueError(f"{checkpoint / MANIFEST}: has a malformed entry; take another checkpoint")
        if not path.is_file() or path.stat().st_size != entry.get("size") or _sha256(path) != entry.get("sha256"):
            raise ValueError(f"{path}: damaged or missing; take another checkpoint of the run")


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
        for group, settings in zip(optimizer.param_groups, own, strict=True):
            group.update(settings)  # momentum, decay and the like are this run's, not the checkpoint's
    except (RuntimeError, ValueError, EOFError, KeyError, TypeError, AttributeError, UnpicklingError) as error:
        raise ValueError(f"{path}: not this run's optimizer ({one_line(error)[:120]})") from error


def _save_state(accelerator: Accelerator, folder: Path) -> None:
    try:
        accelerator.save_state(str(folder))
    except (RuntimeError, SafetensorError) as error:  # what a full disk looks like from torch and safetensors
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
    write_file(folder / MANIFEST, json.dumps({"files": entries}, indent=1) + "\n")
    sync(folder)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _pointer(folder: Path, name: str) -> Path | None:
    path = folder / name
    if not path.is_file():
        return None
    target = path.read_text().strip()
    return folder / target if re.fullmatch(r"step-\d+", target) else None
