"""Resume a run from a checkpoint: its settings and state, and what differs from the earlier run."""

import uuid
from collections.abc import Set
from dataclasses import replace
from pathlib import Path

import torch

from utils.config import require
from utils.data import DECODERS, Data, Plan
from utils.errors import UserError, shorten
from utils.launch import compile_backend, precision_is_chosen
from utils.runs.metadata import Checkpoint
from utils.runs.state import TrainState
from utils.settings.train import CHOSEN, FIXED, NAMES, OF_THIS_MACHINE, TrainConfig

_OTHER_ORDER = (
    "the samples are the same; floating-point sums have a different order: "
    "losses agree to rounding; if processes x accumulation steps differs, "
    "dropout masks and batch statistics differ too"
)


def keep_settings(
    config: TrainConfig, given: Set[str], before: TrainConfig, begun: bool
) -> TrainConfig:
    """The settings: those that are `given` or belong to this machine, else those of the run
    `before`.

    A run without a checkpoint (`begun`) also keeps its batch sizes. With a checkpoint, they follow
    from the global batch. Raises UserError if the settings contradict each other.
    """
    own = {
        name
        for name in given
        if name not in CHOSEN or getattr(config, name) != getattr(TrainConfig, name)
    }
    own |= {*OF_THIS_MACHINE}
    batch = {"batch_size", "grad_accum"}
    if not begun or given & batch:
        own |= batch
    if "epochs" in given:
        own.add("max_steps")
    if precision_is_chosen():
        own.add("mixed_precision")
    there = vars(before)
    # Arguments belong to the function that has them.
    own |= {f"{name}_args" for name in own if getattr(config, name) != there[name]}
    try:
        return replace(config, **{name: value for name, value in there.items() if name not in own})
    except UserError as error:
        fix = "settings that are not given come from the run; leave out flags that contradict them"
        raise UserError(error.problem, fix) from None


def restore_state(
    saved: Checkpoint | None, folder: Path | None, config: TrainConfig, plan: Plan, data: Data
) -> TrainState:
    """The state to start from: the checkpoint's, or a new one. Raises ValueError if the checkpoint
    does not fit.

    `folder` is the run folder if it exists already.
    """
    batch_size = plan.global_batch_size // plan.microbatches
    if saved is None:
        return TrainState(batch_size=batch_size, run_id=uuid.uuid4().hex)
    check_same_run(saved, config, plan, data)
    state = replace(saved.state)
    state.epoch, state.position = plan.at(state.step)
    state.batch_size = max(state.batch_size, batch_size)
    metric = saved.config.best_metric
    if not saved.is_in(folder):
        state.run_id = uuid.uuid4().hex
        state.best = None  # the best checkpoint belongs to the earlier run
        state.best_step = None
        state.digest = []
        if metric != config.best_metric:
            state.best_value = None
            state.evaluations_since_best = 0
    elif metric != config.best_metric:
        problem = f"{saved.path}: its --best_metric is {metric}, not {config.best_metric}"
        raise UserError(problem, "use the same --best_metric, or give another --run_name")
    return state


def check_same_run(saved: Checkpoint, config: TrainConfig, plan: Plan, data: Data) -> None:
    """Raise ValueError if a run with these settings and this data cannot continue the run of the
    checkpoint.
    """
    there = saved.state_file
    pairs = {
        f"--{name}": (getattr(saved.config, name), getattr(config, name))
        for name in (*FIXED, "seed", "global_batch_size")
    }
    pairs["training samples"] = there.samples, plan.samples
    pairs["the classes"] = saved.class_names, data.class_names
    pairs["labels"] = there.labels, data.train.label_fingerprint
    for what, (old, new) in pairs.items():
        what = f"{what} {shorten(str(old))}, not {shorten(str(new))}"
        fix = "use the same settings, or start a new run"
        require(old == new, f"{saved.path}: was trained with {what}", fix)
    threads = torch.get_num_threads()
    same = not config.microbatches or there.device != "cpu" or there.threads == threads
    needed = f"the same threads per process: {there.threads}, not {threads}"
    problem = f"{saved.path}: --microbatches needs {needed}"
    require(same, problem, f"set --threads {there.threads}")


def resume_lines(
    saved: Checkpoint, config: TrainConfig, resolved: TrainConfig, plan: Plan, processes: int
) -> list[str]:
    """The lines that a resumed run prints: its checkpoint, and what differs from the earlier run.

    `config` has the batch sizes of this start as given.
    """
    there = saved.state_file
    threads = torch.get_num_threads()
    before = vars(saved.config) | {"processes": there.processes, "threads": there.threads}
    before["compiler"] = there.versions.get("compiler", "none")
    now = vars(resolved) | {"processes": processes, "threads": threads}
    now["compiler"] = compile_backend() or "none"
    ignored = {*OF_THIS_MACHINE, "batch_size", "grad_accum"} - {"threads"}
    names = [name for name in (*NAMES, "processes", "compiler") if name not in ignored]
    changed = [name for name in names if before[name] != now[name]]
    lines = [f"resuming from {saved.path}"]
    lines += [f"{name} was {before[name]} in the checkpoint, now {now[name]}" for name in changed]
    for name, version in DECODERS.items():
        old = there.versions.get(name, version)
        if old != version:
            change = f"{name} was {old} in the checkpoint, now {version}"
            lines.append(f"{change}: pixels may differ by a level")
    if {"processes", "threads"} & {*changed} and not config.microbatches:
        lines.append(_OTHER_ORDER)
    for name in ("batch_size", "grad_accum"):
        value = getattr(config, name)
        used = plan.sizes(processes)[name]
        if value not in (None, used):
            lines.append(f"--{name} {value} does not give the run's global batch; using {used}")
    return lines
