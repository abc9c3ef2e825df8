"""The contents of a checkpoint besides its tensors: settings, training state, classes, samples and
versions.
"""

import json
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import accelerate
import numpy as np
import torch
import torchvision

from utils.config import FORMAT_FIX, PLUGIN_HASHES, Bound, check_plugin, read_fields, require
from utils.data import DECODERS, TABLE_FILE, Data, InputSpec, Plan, SampleTable, read_table
from utils.errors import UserError
from utils.files import read_json
from utils.launch import compile_backend
from utils.ranks import Ranks
from utils.runs.manifest import (
    WEIGHTS_FILE,
    checkpoint_of,
    checkpoints_of,
    damage_of,
    table_of,
)
from utils.runs.state import TrainState
from utils.settings.train import (
    FORMAT,
    OF_ONE_START,
    OF_THIS_MACHINE,
    OLDER_FORMAT,
    TrainConfig,
    read_config,
    to_yaml,
)
from utils.version import VERSION, code_commit

_OTHER = "use another checkpoint"


@dataclass(kw_only=True)
class StateFile:
    """The contents of state.json: the training state, the classes, and the samples and processes
    that it belongs to.
    """

    format: int = FORMAT
    state: TrainState
    class_names: Annotated[list[str], Bound("class names", bool)]
    samples: int = 0
    labels: str = ""  # fingerprint
    # the split; 0.2 and unreleased versions did not write it
    evaluated_on: str = field(default="", metadata={"optional": True})
    processes: int = 1
    threads: int = 1
    device: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    input: InputSpec

    @classmethod
    def read(cls, path: Path) -> "StateFile":
        """Read the file of a verified checkpoint.

        Raises ValueError, which names it, if a value is malformed.
        """
        values = read_json(path)
        found = values.get("format") if isinstance(values, dict) else None
        problem = f"{path}: has format {found}, but this version reads format {FORMAT}"
        require(found in (FORMAT, OLDER_FORMAT), problem, FORMAT_FIX)
        try:
            if found == OLDER_FORMAT:
                values |= _new_fields(path, values)
            return read_fields(cls, values)
        except (ValueError, TypeError, LookupError) as error:
            raise UserError(f"{path}: {error}", _OTHER) from None


def _new_fields(path: Path, values: dict) -> dict:
    """The fields of state.json that OLDER_FORMAT kept elsewhere, or did not have."""
    state = values["state"]
    state |= {"evaluation": [{}, *state["evaluations"]][-1], "rounding_said": False}
    return {"state": state, "class_names": read_json(path.with_name("labels.json"))}


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint and its contents besides its tensors."""

    path: Path
    config: TrainConfig
    state_file: StateFile
    table_file: Path | None  # of the samples; missing in older checkpoints and in some copies

    @cached_property
    def table(self) -> SampleTable | None:
        """The table of the run's samples. Raises UserError if it is malformed."""
        return read_table(self.table_file) if self.table_file else None

    @property
    def state(self) -> TrainState:
        return self.state_file.state

    @property
    def spec(self) -> InputSpec:
        return self.state_file.input

    @property
    def class_names(self) -> list[str]:
        return self.state_file.class_names

    @property
    def weight_bytes(self) -> int:
        return (self.path / WEIGHTS_FILE).stat().st_size

    def is_in(self, run: Path | None) -> bool:
        """Whether this is a checkpoint of the folder of a run."""
        return run is not None and self.path.parent.parent.resolve() == run.resolve()


def read_checkpoint(path: Path) -> Checkpoint:
    """Read the small files of a verified checkpoint.

    Raises ValueError if one of them is malformed, or if the run had a plug-in that is not loaded.
    The main process prints a line if the plug-in has changed.
    """
    state_file = StateFile.read(path / "state.json")
    check_plugin(path, state_file.versions)
    return Checkpoint(path, read_settings(path), state_file, table_of(path))


def check_identity(saved: Checkpoint) -> None:
    """Raise UserError if a good checkpoint in the folder of this one was renamed, or is of another
    run.

    Resumes and saves delete checkpoints by their names.
    """
    for path in checkpoints_of(saved.path.parent):
        try:
            state = StateFile.read(path / "state.json").state
        except (OSError, ValueError):  # it is damaged
            continue
        own = path == checkpoint_of(path.parent, state.step) and state.run_id == saved.state.run_id
        problem = f"{path}: is not update {state.step} of this run"
        require(own or damage_of(path) is not None, problem, "move it to another folder")


def make_files(
    config: TrainConfig, state: TrainState, plan: Plan, data: Data, spec: InputSpec, ranks: Ranks
) -> dict[str, bytes | Path]:
    """The files of a checkpoint besides its tensors, which `read_checkpoint` reads, as {file name:
    contents, or the file to link}.
    """
    state_file = StateFile(
        state=state,
        samples=plan.samples,
        labels=data.train.label_fingerprint,
        evaluated_on=data.evaluation.name,
        processes=ranks.topology.world_size,
        threads=ranks.threads,
        device=ranks.device.type,
        versions=versions(),
        input=spec,
        class_names=data.class_names,
    )
    return {
        "state.json": json.dumps(asdict(state_file), indent=1, allow_nan=False).encode(),
        "config.yaml": config_to_save(config).encode(),
        TABLE_FILE: data.table.file,
    }


def read_settings(checkpoint: Path) -> TrainConfig:
    """The settings of the run that wrote a checkpoint; settings that affect this machine have their
    defaults.
    """
    saved = read_config(checkpoint / "config.yaml", older=[OLDER_FORMAT])
    return replace(saved, **_defaults(OF_THIS_MACHINE))


def _defaults(names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(TrainConfig, name) for name in names}


def versions() -> dict[str, str]:
    """The versions of Lockstep, its commit, Python, the main packages, decoders and the plug-in,
    and the compiler of the model, if any.
    """
    found = {
        "lockstep": VERSION,
        "commit": code_commit(),
        **{each.__name__: each.__version__ for each in (torch, torchvision, accelerate, np)},
        **DECODERS,
        "python": platform.python_version(),
    }
    compiler = compile_backend()
    if compiler:
        found["compiler"] = compiler
    return found | PLUGIN_HASHES


def config_to_save(config: TrainConfig) -> str:
    """config.yaml: the settings of a run, without those of one start."""
    return to_yaml(replace(config, **_defaults(OF_ONE_START)))
