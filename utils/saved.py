"""What a checkpoint says besides its tensors, and a run's return to what it said."""

import json
import platform
from dataclasses import asdict, fields, replace
from pathlib import Path

import accelerate
import numpy
import torch
import torchvision
from accelerate import Accelerator
from torch import nn

from utils.checkpoint import files_of, load_model, load_optimizer
from utils.cli import read_config
from utils.config import Launch, TrainConfig, absolute_data, to_yaml
from utils.data.loader import InputSpec
from utils.data.order import Plan
from utils.data.record import FILE, Record, read_record
from utils.data.splits import Data
from utils.distributed import Ranks
from utils.errors import one_line
from utils.files import read_json
from utils.state import TrainState

# Settings of one start, not of the run.
_OF_ONE_START = ("run_name", "resume", "profile", *(f.name for f in fields(Launch)))
# Settings that act on this machine come from its own flags and defaults: a checkpoint may be a stranger's.
_OF_THIS_MACHINE = (*_OF_ONE_START, "cache_dir", "data_dir", "output_dir", "num_workers")


def load_run(
    checkpoint: Path, module: nn.Module, optimizer: torch.optim.Optimizer, accelerator: Accelerator, ranks: Ranks
) -> None:
    """Put a checkpoint's tensors, and in fp16 its loss scale, in place; collective."""
    ranks.together(lambda: load_model(checkpoint, module))
    ranks.together(lambda: load_optimizer(checkpoint, optimizer))
    scale = read_saved(checkpoint).get("scaler")
    if accelerator.scaler is not None and scale:
        ranks.together(lambda: _load_scale(scale, accelerator, checkpoint))


def _load_scale(scale: dict, accelerator: Accelerator, checkpoint: Path) -> None:
    """The loss scale where the run left it: a fresh one would overflow and skip updates."""
    try:
        accelerator.scaler.load_state_dict(scale)
    except (RuntimeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{checkpoint / 'state.json'}: 'scaler' is malformed ({one_line(error)[:120]})") from error


def read_state(checkpoint: Path | None, folder: Path | None, config: TrainConfig, plan: Plan, data: Data) -> TrainState:
    """The state to go on from, a checkpoint's or a fresh one; ValueError when it is of another data set or model."""
    if checkpoint is None:
        return TrainState(batch_size=plan.global_batch_size // plan.pieces)
    saved = read_saved(checkpoint)
    settings = read_settings(checkpoint)
    for what, there, here in (
        ("a model", settings.model, config.model),
        ("an optimizer", settings.optimizer, config.optimizer),
        ("a seed", saved["seed"], plan.seed),
        ("training samples", saved["samples"], plan.samples),
        ("the classes", read_classes(checkpoint), data.class_names),
        ("labels", saved["labels"], data.train.label_fingerprint),
    ):
        if there != here:
            raise ValueError(
                f"{checkpoint}: was trained with {what} of {_short(there)}, not {_short(here)}; give the same settings"
            )
    state = TrainState.from_dict(saved["state"])
    try:
        state.check_place(plan)
    except ValueError as error:
        raise ValueError(f"{checkpoint / 'state.json'}: {error}; take another checkpoint") from None
    if any(position >= plan.samples for position in state.bad_images):
        raise ValueError(f"{checkpoint / 'state.json'}: 'bad_images' is malformed; take another checkpoint")
    if not plan.update_size(state.position):  # --drop_last is new: the epoch ends here
        state.epoch, state.position = state.epoch + 1, 0
    state.batch_size = max(state.batch_size, plan.global_batch_size // plan.pieces)
    if folder is None or checkpoint.parent.parent.resolve() != folder.resolve():
        state.best_accuracy = state.best_step = None  # that checkpoint stays behind in its own run
    return state


def changes(checkpoint: Path, config: TrainConfig, ranks: Ranks) -> list[str]:
    """One line for each setting, and the numbers of processes and threads, that differ from the checkpoint's run."""
    saved, before, now = read_saved(checkpoint), asdict(read_settings(checkpoint)), asdict(config)
    ignored = (*_OF_THIS_MACHINE, "global_batch_size", "batch_size", "grad_accum")
    pairs = [(name, before[name], now[name]) for name in now if name not in ignored]
    pairs += [
        ("processes", saved["processes"], ranks.topology.world_size),
        ("threads", saved["threads"], ranks.threads),
    ]
    lines = [f"{name} was {there} in the checkpoint, now {here}" for name, there, here in pairs if there != here]
    if any(line.startswith(("processes", "threads")) for line in lines):
        lines.append(
            "the same samples follow; sums are added in another order, so that losses agree to rounding, and where "
            "processes x accumulation differ, dropout masks and batch statistics do"
        )
    return lines


def checkpoint_texts(
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


def resolved(config: TrainConfig, plan: Plan, precision: str) -> TrainConfig:
    """The settings to keep: what the environment and the arithmetic decided is written out, the topology left open."""
    once = {name: getattr(TrainConfig, name) for name in _OF_ONE_START}
    batches = {"global_batch_size": plan.global_batch_size, "batch_size": None}
    return replace(config, data=absolute_data(config.data), mixed_precision=precision, **batches, **once)


def read_saved(checkpoint: Path) -> dict:
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


def same_input(checkpoint: Path | None, config: TrainConfig) -> InputSpec | None:
    """The model's input in a checkpoint with the same settings for it; None where it has to be found anew.

    It was found by a look at some images, which may be other ones when files are gone.
    """
    if checkpoint is None:
        return None
    before, names = read_settings(checkpoint), ("model", "pretrained", "image_size", "channels", "mean", "std")
    if any(getattr(before, name) != getattr(config, name) for name in names):
        return None
    return InputSpec.from_dict(read_saved(checkpoint)["input"])


def record_of(checkpoint: Path | None) -> Record | None:
    """The record of the samples of a checkpoint's run; None without a checkpoint, and for old ones without a record."""
    if checkpoint is None or FILE not in files_of(checkpoint):
        return None
    return read_record(checkpoint / FILE)


def read_settings(checkpoint: Path) -> TrainConfig:
    """The settings of the run that wrote a checkpoint; folders, processes and the like are this machine's defaults."""
    defaults = {name: getattr(TrainConfig, name) for name in _OF_THIS_MACHINE}
    return replace(read_config(checkpoint / "config.yaml"), **defaults)


def _short(value) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
