"""The contents of a checkpoint besides its tensors: settings, training state, classes, samples and
versions.
"""

import json
import math
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import accelerate
import numpy as np
import torch
import torchvision

from utils.config.bounds import PositiveInt, at_least, at_most, read_fields, require
from utils.config.cli import read_config
from utils.config.plugin import PLUGIN, check_plugin
from utils.config.recipe import BatchSize
from utils.config.settings import (
    CHOSEN,
    FORMAT,
    OF_ONE_START,
    OF_THIS_MACHINE,
    OTHER_FORMAT,
    TrainConfig,
    to_yaml,
)
from utils.data.order import Plan
from utils.data.samples import FILE, SampleList, read_samples
from utils.data.spec import InputSpec
from utils.data.splits import Data
from utils.errors import UserError
from utils.files import read_json
from utils.ranks.ranks import Ranks
from utils.runs.loading import Weights
from utils.runs.manifest import MODEL, checkpoint_of, checkpoints_of, damage_of
from utils.runs.state import TrainState
from utils.version import VERSION, code_commit

_OTHER = "use another checkpoint"


@dataclass(kw_only=True)
class SavedState:
    """The contents of state.json: the training state, and the samples and processes that it belongs
    to.
    """

    format: Annotated[PositiveInt, at_least(FORMAT), at_most(FORMAT)] = FORMAT
    state: TrainState
    samples: int = 0
    labels: str = ""  # fingerprint
    global_batch_size: BatchSize = 1
    seed: int = 0
    processes: int = 1
    threads: int = 1
    device: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    input: InputSpec

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, path: Path) -> "SavedState":
        """Read the file of a verified checkpoint.

        Raises ValueError, which names it, if a value is malformed.
        """
        values = read_json(path)
        try:
            return read_fields(cls, values)
        except ValueError as error:
            found, wrote = (
                values.get(name) if isinstance(values, dict) else None
                for name in ("format", "versions")
            )
            if type(found) is not int or found == FORMAT:
                raise UserError(f"{path}: {error}", _OTHER) from None
            version = str(wrote.get("lockstep"))[:40] if isinstance(wrote, dict) else "?"
            problem = f"{path}: has format {found}, of Lockstep {version}; this version reads format {FORMAT}"
            raise UserError(problem, OTHER_FORMAT) from None


@dataclass(frozen=True)
class Begun:
    """A run folder, or a checkpoint, and the settings in it."""

    path: Path
    settings: TrainConfig


@dataclass(frozen=True)
class SavedRun(Begun):
    """A verified checkpoint and its contents besides its tensors; `samples` is None for published
    weights.

    `weights` are those to evaluate, which eval.py chooses.
    """

    values: SavedState
    class_names: list[str]
    samples: SampleList | None
    weights: Weights | None = None
    weight_bytes: float = math.inf

    def is_in(self, run: Path | None) -> bool:
        """Whether this is a checkpoint of the folder of a run."""
        return run is not None and self.path.parent.parent.resolve() == run.resolve()

    @property
    def state(self) -> TrainState:
        return self.values.state

    @property
    def spec(self) -> InputSpec:
        return self.values.input


def read_checkpoint(path: Path, is_main: bool = True) -> SavedRun:
    """Read the small files of a verified checkpoint.

    Raises ValueError if one of them is malformed, or if the run had a plug-in that is not loaded.
    The main process prints a line if the plug-in has changed.
    """
    values = SavedState.from_json(path / "state.json")
    check_plugin(path, values.versions, is_main)
    run = SavedRun(path, read_settings(path), values, read_classes(path), read_samples(path / FILE))
    return replace(run, weight_bytes=(path / MODEL).stat().st_size)


def check_identity(saved: SavedRun) -> None:
    """Raise UserError if a good checkpoint in the folder of this one was renamed, or is of another
    run.

    Resumes and saves delete checkpoints by their names.
    """
    for path in checkpoints_of(saved.path.parent):
        try:
            state = SavedState.from_json(path / "state.json").state
        except (OSError, ValueError):  # it is damaged
            continue
        name = checkpoint_of(path, state.step).name
        if (name, state.run_id) != (path.name, saved.state.run_id) and not damage_of(path):
            require(name == path.name, f"{path}: holds {name}", f"rename it to {name}")
            raise UserError(
                f"{path}: belongs to another run than {saved.path.name}",
                "move one of them to another folder",
            )


def make_files(
    config: TrainConfig, state: TrainState, plan: Plan, data: Data, spec: InputSpec, ranks: Ranks
) -> dict[str, bytes]:
    """The small files of a checkpoint, which `read_checkpoint` reads, as {file name: contents}."""
    values = SavedState(
        state=state,
        samples=plan.samples,
        labels=data.train.label_fingerprint,
        global_batch_size=plan.global_batch_size,
        seed=plan.seed,
        processes=ranks.topology.world_size,
        threads=ranks.threads,
        device=ranks.device.type,
        versions=versions(),
        input=spec,
    )
    texts = {
        "state.json": values.to_json(),
        "labels.json": json.dumps(data.class_names),
        "config.yaml": config_to_save(config),
    }
    return {name: text.encode() for name, text in texts.items()} | {FILE: data.samples.data}


def read_settings(checkpoint: Path) -> TrainConfig:
    """The settings of the run that wrote a checkpoint; settings that affect this machine have their
    defaults.
    """
    settings = read_config(checkpoint / "config.yaml")
    for name in CHOSEN:
        if getattr(settings, name) is None:
            raise UserError(f"{checkpoint / 'config.yaml'}: {name!r} is missing", _OTHER)
    return replace(settings, **_defaults(OF_THIS_MACHINE))


def _defaults(names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(TrainConfig, name) for name in names}


def read_classes(checkpoint: Path) -> list[str]:
    """The class names of a checkpoint."""
    path = checkpoint / "labels.json"
    names = read_json(path)
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise UserError(f"{path}: not a list of class names", _OTHER)
    return names


@cache
def versions() -> dict[str, str]:
    """The versions of Lockstep, its commit, Python, the main packages and the plug-in."""
    packages = {
        module.__name__: module.__version__ for module in (torch, torchvision, accelerate, np)
    }
    return {
        "lockstep": VERSION,
        "commit": code_commit(),
        **packages,
        "python": platform.python_version(),
        **PLUGIN,
    }


def config_to_save(config: TrainConfig) -> str:
    """config.yaml: the settings of a run, without those of one start."""
    return to_yaml(replace(config, **_defaults(OF_ONE_START)))
