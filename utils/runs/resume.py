"""Continue a run from a checkpoint: its state, tensors, batch sizes, and what differs from the checkpoint's run."""

from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

from utils.config.batch import resolve_batch
from utils.config.settings import TrainConfig
from utils.data.order import Plan
from utils.data.spec import InputSpec
from utils.data.splits import Data
from utils.errors import one_line
from utils.ranks.ranks import Ranks
from utils.runs.loading import load_model, load_optimizer
from utils.runs.metadata import OF_THIS_MACHINE, read_classes, read_metadata, read_settings
from utils.runs.state import TrainState


def batch_of_start(config: TrainConfig, checkpoint: Path | None, processes: int) -> TrainConfig:
    """The settings with batch sizes that keep a checkpoint's global batch on this number of processes.

    The batch size per process grows no larger than it was, or than --batch_size. Raises ValueError with the numbers of
    processes that would work.
    """
    if checkpoint is None:
        resolve_batch(config, processes)
        return config
    saved = read_metadata(checkpoint)
    total = saved["global_batch_size"]
    if config.global_batch_size not in (None, total):
        raise ValueError(
            f"{checkpoint}: was trained with a global batch size of {total}, not {config.global_batch_size}; give the "
            "same settings"
        )
    config = replace(config, global_batch_size=total)
    if config.batch_size or config.grad_accum:
        with suppress(ValueError):
            resolve_batch(config, processes)
            return config
    if total % processes:
        *works, most = [str(number) for number in range(1, 2 * processes) if total % number == 0]
        raise ValueError(
            f"{checkpoint}: the global batch of {total} does not divide by {processes} processes; go on with "
            f"{', '.join(works)} or {most} processes"
        )
    share, largest = total // processes, config.batch_size or TrainState.from_dict(saved["state"]).batch_size
    batch = next(size for size in range(min(largest, share), 0, -1) if share % size == 0)
    return replace(config, batch_size=None, grad_accum=share // batch)


def restore_run(
    checkpoint: Path, module: nn.Module, optimizer: torch.optim.Optimizer, accelerator: Accelerator, ranks: Ranks
) -> None:
    """Put a checkpoint's tensors, and in fp16 its loss scale, in place; collective."""
    ranks.run_on_all(lambda: load_model(checkpoint, module))
    ranks.run_on_all(lambda: load_optimizer(checkpoint, optimizer))
    scale = read_metadata(checkpoint).get("scaler")
    if accelerator.scaler is not None and scale:
        ranks.run_on_all(lambda: _load_scale(scale, accelerator, checkpoint))


def _load_scale(scale: dict, accelerator: Accelerator, checkpoint: Path) -> None:
    """The loss scale where the run left it: a fresh one would overflow and skip updates."""
    try:
        accelerator.scaler.load_state_dict(scale)
    except (RuntimeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{checkpoint / 'state.json'}: 'scaler' is malformed ({one_line(error)[:120]})") from error


def read_state(checkpoint: Path | None, folder: Path | None, config: TrainConfig, plan: Plan, data: Data) -> TrainState:
    """The state to go on from, a checkpoint's or a fresh one; ValueError when it is of another data set or model."""
    if checkpoint is None:
        return TrainState(batch_size=plan.global_batch_size // plan.microbatches)
    saved = read_metadata(checkpoint)
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
    state.batch_size = max(state.batch_size, plan.global_batch_size // plan.microbatches)
    if folder is None or checkpoint.parent.parent.resolve() != folder.resolve():
        state.best_accuracy = state.best_step = None  # that checkpoint stays behind in its own run
    return state


def changed_settings(checkpoint: Path, config: TrainConfig, ranks: Ranks) -> list[str]:
    """One line for each setting, and the numbers of processes and threads, that differ from the checkpoint's run."""
    saved, before, now = read_metadata(checkpoint), asdict(read_settings(checkpoint)), asdict(config)
    ignored = (*OF_THIS_MACHINE, "global_batch_size", "batch_size", "grad_accum")
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


def recorded_input(checkpoint: Path | None, config: TrainConfig) -> InputSpec | None:
    """The model's input in a checkpoint with the same settings for it; None where it has to be found anew.

    It was found by a look at some images, which may be other ones when files are gone.
    """
    if checkpoint is None:
        return None
    before, names = read_settings(checkpoint), ("model", "pretrained", "image_size", "channels", "mean", "std")
    if any(getattr(before, name) != getattr(config, name) for name in names):
        return None
    return InputSpec.from_dict(read_metadata(checkpoint)["input"])


def _short(value) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
