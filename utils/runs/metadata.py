"""The contents of a checkpoint besides its tensors: settings, training state, classes, samples and versions."""

import json
import platform
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import torch
import torchvision
from accelerate import Accelerator

from utils.config.cli import read_config
from utils.config.defaults import NAMES
from utils.config.settings import LaunchConfig, TrainConfig, to_yaml
from utils.data.order import Plan
from utils.data.record import FILE, Record, read_record
from utils.data.sources import absolute_data
from utils.data.spec import InputSpec
from utils.data.splits import Data
from utils.errors import UserError
from utils.files import expand, read_json
from utils.ranks.ranks import Ranks
from utils.runs.manifest import files_of
from utils.runs.state import TrainState
from utils.runs.weights import Weights
from utils.version import VERSION, code_commit

# Settings that belong to one start and are not saved with the run.
_OF_ONE_START = ("run_name", "resume", "profile", "dry_run", *(field.name for field in fields(LaunchConfig)))
# Settings that affect this machine come from flags and defaults only: the checkpoint may come from a stranger.
OF_THIS_MACHINE = (*_OF_ONE_START, "cache_dir", "data_dir", "output_dir", "num_workers", "data_on_device")
_OTHER = "use another checkpoint"

FORMAT = 1
"""The format of a checkpoint. A new file or a new field with a default does not change it; see `_upgrade`."""


@dataclass(frozen=True)
class SavedRun:
    """A verified checkpoint and its contents besides its tensors.

    `values` is the contents of state.json. `record` is None for old checkpoints, which do not record their samples.
    `weights` are those to evaluate, which eval.py chooses.
    """

    path: Path
    settings: TrainConfig
    state: TrainState
    spec: InputSpec
    class_names: list[str]
    record: Record | None
    values: dict[str, Any]
    weights: Weights | None = None


def read_checkpoint(path: Path) -> SavedRun:
    """Read the small files of a verified checkpoint. Raises ValueError if one of them is malformed."""
    settings, (values, state, spec) = read_settings(path), _read_values(path / "state.json")
    record = read_record(path / FILE) if FILE in files_of(path) else None
    return SavedRun(path, settings, state, spec, read_classes(path), record, values)


def read_settings(checkpoint: Path) -> TrainConfig:
    """The settings of the run that wrote a checkpoint; settings that affect this machine have their defaults."""
    defaults: dict[str, Any] = {name: getattr(TrainConfig, name) for name in OF_THIS_MACHINE}
    settings = read_config(checkpoint / "config.yaml")
    for name in NAMES:
        if getattr(settings, name) is None:
            raise UserError(f"{checkpoint / 'config.yaml'}: {name!r} is missing", _OTHER)
    if settings.task == "auto":  # from before there were others
        settings = replace(settings, task="classification", best="accuracy")
    return replace(settings, **defaults)


def read_classes(checkpoint: Path) -> list[str]:
    """The class names of a checkpoint."""
    path = checkpoint / "labels.json"
    names = read_json(path)
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise UserError(f"{path}: not a list of class names", _OTHER)
    return names


def _read_values(path: Path) -> tuple[dict[str, Any], TrainState, InputSpec]:
    """The contents of state.json, and its state and input. Raises ValueError if a value is missing or malformed."""
    values = read_json(path)
    if isinstance(values, dict):
        _check_format(path, values)
    needed = {"state": dict, "input": dict, "samples": int, "labels": str, "global_batch_size": int, "seed": int}
    for name, kind in (needed | {"processes": int, "threads": int}).items():
        if not isinstance(values, dict) or type(values.get(name)) is not kind:
            raise UserError(f"{path}: {name!r} is missing or malformed", _OTHER)
    if "format" not in values:
        values = _upgrade(values)
    try:
        state, spec = TrainState.from_dict(values["state"]), InputSpec.from_dict(values["input"])
        if not 1 <= values["global_batch_size"] <= 2**24:  # all of its divisors are tried
            raise ValueError("'global_batch_size' is malformed")
    except ValueError as error:
        raise UserError(f"{path}: {error}", _OTHER) from None
    return values, state, spec


def _check_format(path: Path, values: dict[str, Any]) -> None:
    """Raise ValueError if this version of Lockstep cannot read the format. State files without one are older."""
    found, wrote = values.get("format", FORMAT), values.get("versions")
    if type(found) is not int or found < 1:
        raise UserError(f"{path}: 'format' is malformed", _OTHER)
    if found > FORMAT:
        version = wrote.get("lockstep") if isinstance(wrote, dict) else None
        writer = f"Lockstep {' '.join(str(version).split())[:40]}" if version else "a newer Lockstep"
        problem = f"format {found}, written by {writer}, is newer than format {FORMAT}, which this version reads"
        raise UserError(f"{path}: {problem}", "update Lockstep")


def _upgrade(values: dict[str, Any]) -> dict[str, Any]:
    """Convert the contents of a state.json from before format 1 to format 1.

    Such a checkpoint has the loss scale of fp16 in `scaler` instead of in a file of its own; see `load_parts`.
    """
    state = {"bad_images": [], "evaluations": []} | values["state"]
    if "best_accuracy" in state:
        state["best"] = state.pop("best_accuracy")
    sums = state.get("since_log")
    if isinstance(sums, dict) and "correct" in sums:
        state["since_log"] = {"accuracy" if name == "correct" else name: value for name, value in sums.items()}
    return values | {"format": 1, "state": state}


@cache
def versions() -> dict[str, str]:
    """The versions of Lockstep, its commit, Python and the main packages."""
    packages = {module.__name__: module.__version__ for module in (torch, torchvision, accelerate, np)}
    return {"lockstep": VERSION, "commit": code_commit(), **packages, "python": platform.python_version()}


def metadata_files(
    config: TrainConfig, state: TrainState, plan: Plan, ranks: Ranks, data: Data, more: dict[str, Any]
) -> dict[str, str | bytes]:
    """The small files of a checkpoint, as {file name: contents}; `more` is added to state.json."""
    values = {
        "format": FORMAT,
        "state": asdict(state),
        "samples": plan.samples,
        "labels": data.train.label_fingerprint,
        "global_batch_size": plan.global_batch_size,
        "seed": plan.seed,
        "weights": plan.weights_hash,
        "class_weights": data.class_weights_hash,
        "processes": ranks.topology.world_size,
        "threads": ranks.threads,
        "device": ranks.device.type,
        "versions": versions(),
    }
    files: dict[str, str | bytes] = {
        "state.json": json.dumps(values | more, indent=1, allow_nan=False),
        "labels.json": json.dumps(data.class_names),
        "config.yaml": to_yaml(config),
        FILE: data.record.data,
    }
    if config.sampler != "shuffle" or config.class_weights:  # to correct predictions for the true frequencies
        labels = data.train.labels
        classes = labels if labels.ndim == 1 else np.nonzero(labels)[1]  # multi-hot
        counts = np.bincount(classes, minlength=len(data.class_names)).tolist()
        files["class_counts.json"] = json.dumps(dict(zip(data.class_names, counts, strict=True)))
    return files


def settings_to_save(config: TrainConfig, plan: Plan, resumed: bool, accelerator: Accelerator) -> TrainConfig:
    """The settings to save with the run: batch sizes and precision are resolved; settings of one start are reset."""
    kept = resumed and not config.microbatches
    grad_accum = plan.microbatches // accelerator.num_processes if kept else config.grad_accum
    once: dict[str, Any] = {name: getattr(TrainConfig, name) for name in _OF_ONE_START}
    once |= {"global_batch_size": plan.global_batch_size, "batch_size": None, "grad_accum": grad_accum}
    once |= {"data": absolute_data(config.data), "mixed_precision": accelerator.mixed_precision}
    return replace(config, init_from=absolute_source(config.init_from), **once)


def absolute_source(where: str | None) -> str | None:
    """--init_from with an absolute path, if it is one and not on the Hub."""
    is_path = where is not None and expand(where).parent.is_dir()
    return str(expand(where).absolute()) if where is not None and is_path else where
