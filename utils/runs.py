"""The folder of a run: its name, whether it may be used, and where the run starts from."""

import json
import os
import platform
import re
import time
from dataclasses import asdict
from pathlib import Path

import accelerate
import numpy
import torch
import torchvision

from utils.checkpoint import MANIFEST, find_checkpoint, verify
from utils.config import TrainConfig, expand
from utils.data.order import Plan
from utils.distributed import Ranks
from utils.files import read_json
from utils.state import TrainState


def check_run_folder(config: TrainConfig) -> None:
    """Raise ValueError or OSError when the run folder is taken or cannot be made, or the checkpoint is not there."""
    if config.resume not in (None, "auto"):
        find_checkpoint(expand(config.resume), prefer=("latest",))
    parent = expand(config.output_dir)
    if config.run_name and config.resume is None and (parent / config.run_name).exists():
        raise ValueError(
            f"{parent / config.run_name} exists; go on with it by --resume auto, or choose another --run_name"
        )
    existing = next(folder for folder in (parent, *parent.absolute().parents) if folder.exists())
    if not existing.is_dir():
        raise ValueError(f"--output_dir {parent}: {existing} is not a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"--output_dir {parent}: {existing} is not writable")


def make_run_folder(config: TrainConfig, ranks: Ranks) -> Path:
    """Make OUTPUT_DIR/RUN_NAME on the main process and return it on every rank; collective."""

    def make() -> str:
        if not ranks.is_main:
            return ""
        name = config.run_name or re.sub(
            r"[^\w.]+", "-", f"{Path(config.data).name}-{config.model}-{time.strftime('%Y%m%d-%H%M%S')}"
        )
        folder, number = expand(config.output_dir) / name, 2
        while config.run_name is None and folder.exists():
            folder, number = folder.with_name(f"{name}-{number}"), number + 1
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        return str(folder)

    return Path(ranks.share(ranks.together(make)))


def starting_point(config: TrainConfig, folder: Path) -> Path | None:
    """The verified checkpoint to go on from, or None to start afresh."""
    if config.resume is None:
        return None
    if config.resume == "auto" and not any((folder / "checkpoints").glob(f"step-*/{MANIFEST}")):
        return None
    path = folder if config.resume == "auto" else expand(config.resume)
    checkpoint = find_checkpoint(path, prefer=("latest",))
    verify(checkpoint)
    return checkpoint


def read_state(checkpoint: Path, plan: Plan, class_names: list[str]) -> TrainState:
    """The training state in a checkpoint; ValueError when it belongs to a run on other data or batches."""
    saved = read_json(checkpoint / "state.json")
    for what, there, here in (
        ("training samples", saved["samples"], plan.samples),
        ("a global batch size", saved["global_batch_size"], plan.global_batch_size),
        ("a seed", saved["seed"], plan.seed),
    ):
        if there != here:
            raise ValueError(f"{checkpoint}: was trained with {what} of {there}, not {here}; give the same settings")
    if read_json(checkpoint / "labels.json") != class_names:
        raise ValueError(f"{checkpoint}: was trained on other classes; give the same --data")
    return TrainState.from_dict(saved["state"])


def state_json(state: TrainState, plan: Plan, ranks: Ranks, input_shape: dict) -> str:
    """What a checkpoint says about the run besides its tensors and settings."""
    versions = {m.__name__: m.__version__ for m in (torch, torchvision, accelerate, numpy)}
    return json.dumps(
        {
            "state": asdict(state),
            "samples": plan.samples,
            "global_batch_size": plan.global_batch_size,
            "seed": plan.seed,
            "processes": ranks.topology.world_size,
            "threads": ranks.threads,
            "device": ranks.device.type,
            "input": input_shape,
            "versions": versions | {"python": platform.python_version()},
        },
        indent=1,
    )
