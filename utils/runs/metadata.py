"""What a checkpoint says besides its tensors, and a run's return to what it said."""

import json
import platform
from dataclasses import asdict, fields, replace
from pathlib import Path

import accelerate
import numpy
import torch
import torchvision

from utils.config.cli import read_config
from utils.config.settings import LaunchConfig, TrainConfig, absolute_data, to_yaml
from utils.data.order import Plan
from utils.data.record import FILE, Record, read_record
from utils.data.spec import InputSpec
from utils.data.splits import Data
from utils.files import read_json
from utils.ranks.ranks import Ranks
from utils.runs.manifest import files_of
from utils.runs.state import TrainState

# Settings of one start, not of the run.
_OF_ONE_START = ("run_name", "resume", "profile", *(f.name for f in fields(LaunchConfig)))
# Settings that act on this machine come from its own flags and defaults: a checkpoint may be a stranger's.
OF_THIS_MACHINE = (*_OF_ONE_START, "cache_dir", "data_dir", "output_dir", "num_workers")


def metadata_files(
    config: TrainConfig, state: TrainState, plan: Plan, ranks: Ranks, data: Data, more: dict
) -> dict[str, str | bytes]:
    """What a checkpoint says besides its tensors, as the contents of small files by name."""
    versions = {m.__name__: m.__version__ for m in (torch, torchvision, accelerate, numpy)}
    saved = {
        "state": asdict(state),
        "samples": plan.samples,
        "labels": data.train.label_fingerprint,
        "global_batch_size": plan.global_batch_size,
        "seed": plan.seed,
        "processes": ranks.topology.world_size,
        "threads": ranks.threads,
        "device": ranks.device.type,
        "versions": versions | {"python": platform.python_version()},
    }
    return {
        "state.json": json.dumps(saved | more, indent=1, allow_nan=False),
        "labels.json": json.dumps(data.class_names),
        "config.yaml": to_yaml(config),
        FILE: data.record.data,
    }


def settings_to_save(config: TrainConfig, plan: Plan, precision: str) -> TrainConfig:
    """The settings to keep: what the environment and the arithmetic decided is written out, the topology left open."""
    once = {name: getattr(TrainConfig, name) for name in _OF_ONE_START}
    batches = {"global_batch_size": plan.global_batch_size, "batch_size": None}
    return replace(config, data=absolute_data(config.data), mixed_precision=precision, **batches, **once)


def read_metadata(checkpoint: Path) -> dict:
    """A checkpoint's state.json; ValueError when something in it is missing or malformed."""
    path = checkpoint / "state.json"
    saved = read_json(path)
    needed = {"state": dict, "input": dict, "samples": int, "labels": str, "global_batch_size": int, "seed": int}
    for name, kind in (needed | {"processes": int, "threads": int}).items():
        if not isinstance(saved, dict) or type(saved.get(name)) is not kind:
            raise ValueError(f"{path}: {name!r} is missing or malformed; take another checkpoint")
    try:
        TrainState.from_dict(saved["state"])
        InputSpec.from_dict(saved["input"])
        if not 1 <= saved["global_batch_size"] <= 2**24:  # all of its divisors are tried
            raise ValueError("'global_batch_size' is malformed")
    except ValueError as error:
        raise ValueError(f"{path}: {error}; take another checkpoint") from None
    return saved


def read_classes(checkpoint: Path) -> list[str]:
    """The names of a checkpoint's classes."""
    path = checkpoint / "labels.json"
    names = read_json(path)
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{path}: not a list of class names; take another checkpoint")
    return names


def read_sample_record(checkpoint: Path | None) -> Record | None:
    """The record of the samples of a checkpoint's run; None without a checkpoint, and for old ones without a record."""
    if checkpoint is None or FILE not in files_of(checkpoint):
        return None
    return read_record(checkpoint / FILE)


def read_settings(checkpoint: Path) -> TrainConfig:
    """The settings of the run that wrote a checkpoint; folders, processes and the like are this machine's defaults."""
    defaults = {name: getattr(TrainConfig, name) for name in OF_THIS_MACHINE}
    return replace(read_config(checkpoint / "config.yaml"), **defaults)
