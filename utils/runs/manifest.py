"""Find checkpoints, write their manifests and verify them."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from utils.config import require
from utils.data import TABLE_FILE, name_of_table
from utils.errors import UserError, split_error
from utils.files import read_json, read_text, sha256_of, write_file

MANIFEST_FILE = "manifest.json"
_OPTIONAL = {"optional": True}  # the entry of the table of samples has it: that file may be absent
# as Accelerate's `save_state` names them
WEIGHTS_FILE = "model.safetensors"
OPTIMIZER = "optimizer.bin"
SCALER = "scaler.pt"
EMA_FILE = "ema.safetensors"  # of the weights, with --ema_decay
ORIGIN = "resumed_from.txt"  # in the run folder
# a resume also needs OPTIMIZER and the table of samples
NEEDED = (WEIGHTS_FILE, "state.json", "config.yaml")


def checkpoint_of(folder: Path, step: int | None) -> Path:
    """The path of the checkpoint of `step`; of step 0, which never has one, if `step` is None."""
    number = 0 if step is None else step
    return folder / f"step-{number:08d}"


def checkpoints_of(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, including damaged ones, oldest first; none if it is missing.

    Raises OSError if it cannot be listed.
    """
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in paths if is_checkpoint_name(path.name)), key=step_of)


def beginnings(run: Path, records: Sequence[Mapping]) -> dict[int, Path]:
    """The checkpoints of a run by their updates, with the one of another run that it started from,
    if any, oldest first; `records` are those of its log.
    """
    found = {}
    origin = run / ORIGIN
    if origin.is_file():
        found[records[0]["step"]] = Path(read_text(origin, 8192))
    return found | {step_of(path): path for path in checkpoints_of(run / "checkpoints")}


def newest_good(run: Path) -> Path | None:
    """The newest undamaged checkpoint of a run, or None if it has none; prints what is wrong with
    newer ones.

    `run` may also be the folder of its checkpoints. Raises UserError if all are damaged.
    """
    damages: list[str] = []
    for checkpoint in reversed(checkpoints_of(run / "checkpoints") or checkpoints_of(run)):
        damage = damage_of(checkpoint)
        if damage is None:
            for damage in damages:
                print(f"{damage}; resuming from {checkpoint} instead")
            return checkpoint
        damages.append(damage)
    problem = f"{'; '.join(damages)}; all checkpoints are damaged"
    require(not damages, problem, "start a new run with another --run_name")
    return None


def find_checkpoint(path: Path) -> Path:
    """The checkpoint at `path`; in a run folder or its folder of checkpoints, the best one, else
    the newest.

    Raises ValueError if there is none.
    """
    require(path.exists(), f"{path}: no such checkpoint or run folder", "correct the path")
    if (path / MANIFEST_FILE).is_file() or is_checkpoint_name(path.name):
        return path
    folder = path if checkpoints_of(path) else path / "checkpoints"
    # a training run may move it and delete its checkpoint
    for name in ("best", "best", "latest", "latest"):
        found = read_pointer(folder, name)
        if found and found.is_dir():
            return found
    found_here = checkpoints_of(folder)
    command = "eval.py --model NAME --weights FILE"
    fix = f"use a run folder that has one, or, for a file of weights, {command}"
    require(found_here, f"{path}: holds no checkpoint", fix)
    return found_here[-1]


def verify(checkpoint: Path) -> None:
    """Raise ValueError unless every file in the manifest exists with the recorded size and SHA-256.

    The manifest must name all NEEDED files, because it protects only the files that it names.
    """
    damage = damage_of(checkpoint)
    require(damage is None, f"{damage}", "use another checkpoint")


def files_of(checkpoint: Path) -> dict[str, dict]:
    """Size and SHA-256 of each file in the manifest.

    Raises ValueError if the manifest is damaged.
    """
    path = checkpoint / MANIFEST_FILE
    manifest = read_json(path)
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict) or path.read_bytes() != manifest_text(files).encode():
        raise UserError(f"{path}: damaged", "use another checkpoint")
    return files


def damage_of(checkpoint: Path) -> str | None:
    """A description of the first file that differs from the manifest; None if there is none."""
    path = checkpoint / MANIFEST_FILE
    try:
        files = files_of(checkpoint)
        left_out = [name for name in NEEDED if name not in files]
        if left_out:
            return f"{path}: does not name {', '.join(left_out)}"
        for name, entry in files.items():
            path = checkpoint / name
            if name == TABLE_FILE and not os.path.lexists(path):
                continue
            if not path.is_file():
                return f"{path}: missing"
            if entry_of(path) != entry:
                return f"{path}: damaged"
    except (ValueError, OSError) as error:
        text, _ = split_error(error)
        # an OSError may lack the file's name
        return text if text.startswith(str(path)) else f"{path}: {text}"
    return None


def write_manifest(folder: Path, known: Mapping[str, str] | None = None) -> None:
    """Write the manifest of all files in `folder`; `known` has the SHA-256 of some."""
    known = known or {}
    entries = {path.name: entry_of(path, known.get(path.name)) for path in sorted(folder.iterdir())}
    write_file(folder / MANIFEST_FILE, manifest_text(entries))


def table_of(checkpoint: Path) -> Path | None:
    """The table of samples of a verified checkpoint, in the run folder or beside its weights; None
    if there is none.
    """
    entry = files_of(checkpoint).get(TABLE_FILE)
    if not isinstance(entry, dict):
        return None
    # a training run may delete the checkpoint, but not the table in its folder
    kept = checkpoint.absolute().parent.parent / name_of_table(f"{entry.get('sha256')}")
    for path in (kept, checkpoint / TABLE_FILE):
        if path.is_file() and (entry_of(path) | _OPTIONAL) == entry:
            return path
    return None


def manifest_text(files: dict) -> str:
    """The text of a manifest.

    Equal entries always give the same text, so any change to a manifest is detected.
    """
    return json.dumps({"files": files}, indent=1) + "\n"


def entry_of(path: Path, sha256: str | None = None) -> dict[str, Any]:
    """What a manifest says about a file, whose SHA-256 may be known."""
    entry = {"size": path.stat().st_size, "sha256": sha256 or sha256_of(path)}
    return entry | _OPTIONAL if path.name == TABLE_FILE else entry


def read_pointer(folder: Path, name: str) -> Path | None:
    """The checkpoint that the pointer `latest` or `best` names; None if there is no such
    checkpoint.
    """
    try:
        target = read_text(folder / name, max_bytes=4096).strip()
    except (OSError, ValueError):
        return None
    return folder / target if is_checkpoint_name(target) else None


def is_checkpoint_name(name: str) -> bool:
    return re.fullmatch(r"step-\d+", name) is not None


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))
