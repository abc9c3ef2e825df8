"""Resume a run from a checkpoint: its batch sizes, state and tensors, and what differs from the earlier run."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import nn

from utils.config.batch import resolve_batch
from utils.config.defaults import NAMES, choose_images, choose_sizes
from utils.config.settings import TrainConfig
from utils.console import Terminal
from utils.data.decode import peek
from utils.data.order import Plan
from utils.data.sampling import make_plan
from utils.data.spec import SMALL, InputSpec, sides
from utils.data.splits import Data, Split
from utils.errors import UserError
from utils.models.zoo import input_spec
from utils.ranks.ranks import Ranks
from utils.runs.checkpoint import delete_after
from utils.runs.folder import Start
from utils.runs.loading import check_fit, load_optimizer, load_parts, read_weights
from utils.runs.metadata import OF_THIS_MACHINE, SavedRun
from utils.runs.parts import Part
from utils.runs.state import TrainState
from utils.tasks.table import make_task
from utils.tasks.task import Task

# What an InputSpec depends on.
_SPEC_SETTINGS = ("model", "pretrained", "image_size", "eval_size", "channels", "mean", "std", "eval_crop")


def batch_of_start(config: TrainConfig, saved: SavedRun | None, processes: int) -> tuple[int, int, int]:
    """(batch_size, grad_accum, global_batch_size) of this start; a resumed run keeps its global batch size.

    The batch size per process does not exceed --batch_size or, if it is not set, the largest one so far. Raises
    ValueError, which lists the numbers of processes that work.
    """
    if saved is None:
        return resolve_batch(config, processes)
    total = saved.values["global_batch_size"]
    if config.global_batch_size not in (None, total):
        problem = f"{saved.path}: was trained with a global batch size of {total}, not {config.global_batch_size}"
        raise UserError(problem, "use the same settings")
    if config.microbatches:
        return resolve_batch(replace(config, global_batch_size=total), processes)
    if config.batch_size or config.grad_accum:
        with suppress(ValueError):
            return resolve_batch(replace(config, global_batch_size=total), processes)
    if total % processes:
        *works, most = [str(number) for number in range(1, 2 * processes) if total % number == 0]
        problem = f"{saved.path}: the global batch of {total} is not divisible by {processes} processes"
        raise UserError(problem, f"resume with {', '.join(works)} or {most} processes")
    share, largest = total // processes, config.batch_size or saved.state.batch_size
    batch_size = next(size for size in range(min(largest, share), 0, -1) if share % size == 0)
    return batch_size, share // batch_size, total


def settings_of_start(config: TrainConfig, saved: SavedRun | None, processes: int) -> TrainConfig:
    """The settings; those that would follow from the data are the checkpoint's, if there is one.

    Raises ValueError if the batch sizes do not fit, before the data is loaded.
    """
    if saved is not None:
        unset = [name for name in (*NAMES, "lr_per", "best") if getattr(config, name) is None]
        unset += ["task"] if config.task == "auto" else []
        config = replace(config, **{name: getattr(saved.settings, name) for name in unset})
    batch_of_start(config, saved, processes)
    return config


def plan_of_start(
    config: TrainConfig, saved: SavedRun | None, train: Split, processes: int
) -> tuple[TrainConfig, list[str], Plan]:
    """The settings with those chosen from the number of training samples, lines about these, and the run's plan."""
    config, lines = (config, []) if saved else choose_sizes(config, len(train), processes)
    _, grad_accum, global_batch_size = batch_of_start(config, saved, processes)
    microbatches = config.microbatches or grad_accum * processes
    return config, lines, make_plan(config, train, global_batch_size, microbatches)


def spec_of_start(
    config: TrainConfig, saved: SavedRun | None, train: Split
) -> tuple[TrainConfig, list[str], InputSpec]:
    """The settings with those chosen from the images, lines about these, and the model's input.

    The input is the checkpoint's if the settings that it depends on are unchanged. It is not derived again, because
    some of the images may no longer exist.
    """
    if saved is not None and all(getattr(saved.settings, name) == getattr(config, name) for name in _SPEC_SETTINGS):
        return config, [], saved.spec
    channels, size = peek(train, skip=config.bad_images == "skip")
    small = size is not None and max(size) <= SMALL
    # mnist_cnn takes images of one size.
    small_input = max(sides(config.image_size or 0)) <= SMALL and config.eval_size is None
    config, lines = choose_images(config, small, small_input)
    return config, lines, input_spec(config, channels, size)


def task_of_start(config: TrainConfig, data: Data) -> tuple[TrainConfig, Task]:
    """The settings with the names of the task and of its best metric, and the task."""
    return make_task(config, data.class_names, data.train.labels, data.class_weights)


def restore_state(
    saved: SavedRun | None, folder: Path | None, config: TrainConfig, plan: Plan, data: Data
) -> TrainState:
    """The state to start from: the checkpoint's, or a new one. Raises ValueError if the checkpoint does not fit.

    `folder` is the run folder if it exists already.
    """
    batch_size = plan.global_batch_size // plan.microbatches
    if saved is None:
        return TrainState(batch_size=batch_size)
    for what, there, here in (
        ("a model", saved.settings.model, config.model),
        ("a task", saved.settings.task, config.task),
        ("a --stem", saved.settings.stem, config.stem),
        ("an optimizer", saved.settings.optimizer, config.optimizer),
        ("a --freeze", saved.settings.freeze, config.freeze),
        ("--microbatches", saved.settings.microbatches, config.microbatches),
        ("a seed", saved.values["seed"], plan.seed),
        ("training samples", saved.values["samples"], plan.samples),
        ("the classes", saved.class_names, data.class_names),
        ("labels", saved.values["labels"], data.train.label_fingerprint),
    ):
        if there != here:
            problem = f"{saved.path}: was trained with {what} of {_short(there)}, not {_short(here)}"
            raise UserError(problem, "use the same settings")
    for setting, key, now in (
        ("sampler", "weights", plan.weights_hash),
        ("class_weights", "class_weights", data.class_weights_hash),
    ):
        value = getattr(config, setting)
        if value == getattr(saved.settings, setting) and saved.values.get(key, now) != now:
            problem = f"{saved.path}: the weights of --{setting} {value} have changed since training"
            raise UserError(problem, "restore them, or start a new run")
    before, here = saved.values["threads"], torch.get_num_threads()
    if config.microbatches and saved.values.get("device") == "cpu" and before != here:
        problem = f"{saved.path}: a run with --microbatches keeps its {before} threads per process, not {here}"
        raise UserError(problem, f"set --threads {before}")
    owed = saved.state.step + (not saved.state.owes_evaluation)  # evaluations from this step on are repeated
    done = [evaluation for evaluation in saved.state.evaluations if evaluation["step"] < owed]
    state = replace(saved.state, bad_images=list(saved.state.bad_images), evaluations=done)
    try:
        state.check_place(plan)
        if any(position >= plan.samples for position in state.bad_images):
            raise ValueError("'bad_images' is malformed")
    except ValueError as error:
        raise UserError(f"{saved.path / 'state.json'}: {error}", "use another checkpoint") from None
    if not plan.update_size(state.position):  # --drop_last was not set before: the epoch ends here
        state.epoch, state.position = state.epoch + 1, 0
    state.batch_size = max(state.batch_size, batch_size)
    if folder is None or saved.path.parent.parent.resolve() != folder.resolve():
        state.best = state.best_step = None  # the best checkpoint belongs to the earlier run
        if saved.settings.best != config.best:
            state.best_value, state.evaluations_since_best = None, 0
    elif saved.settings.best != config.best:
        problem = f"{saved.path}: its best checkpoint is by {saved.settings.best}, not {config.best}"
        raise UserError(problem, "use the same --best, or give another --run_name")
    return state


def restore(
    start: Start,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    parts: Mapping[str, Part],
    lines: list[str],
    ranks: Ranks,
) -> None:
    """Load the checkpoint's tensors, print `lines`, and delete later checkpoints; collective.

    Also prints lines about parts that only the checkpoint or only the run has. Raises ValueError, before any file is
    changed, if the tensors do not fit.
    """
    saved, folder = start.saved, start.folder
    assert saved is not None

    def load() -> list[str]:
        # Check the weights first, because their error names the cause best. Load them after the optimizer's state,
        # because `load_optimizer` changes the weights.
        weights = read_weights(saved.path)
        check_fit(saved.path, weights, module)
        load_optimizer(saved.path, optimizer, module)
        module.load_state_dict(weights)
        return load_parts(saved.path, parts, saved.values)

    unmatched = ranks.run_on_all(load)
    Terminal(ranks.is_main).print("\n".join([*lines, *unmatched]))
    if folder is not None:
        state = saved.state
        ranks.run_on_main(lambda: delete_after(folder.checkpoints, state.step, state.best_step))


def resume_lines(saved: SavedRun, config: TrainConfig, settings: TrainConfig, plan: Plan, ranks: Ranks) -> list[str]:
    """The lines that a resumed run prints: its checkpoint, and what differs from the earlier run.

    `config` has the settings of this start as given, and `settings` those that the run will save.
    """
    before, now = asdict(saved.settings), asdict(settings)
    ignored = (*OF_THIS_MACHINE, "global_batch_size", "batch_size", "grad_accum")
    pairs = [(name, before[name], now[name]) for name in now if name not in ignored]
    topology = [
        ("processes", saved.values["processes"], ranks.topology.world_size),
        ("threads", saved.values["threads"], ranks.threads),
    ]
    lines = [f"resuming from {saved.path}"]
    lines += [
        f"{name} was {there} in the checkpoint, now {here}" for name, there, here in pairs + topology if there != here
    ]
    if any(there != here for _, there, here in topology) and not config.microbatches:
        lines.append(
            "the samples are the same; floating-point sums have a different order: losses agree to rounding; "
            "if processes x accumulation steps differs, dropout masks and batch statistics differ too"
        )
    used = plan.sizes(ranks.topology.world_size)
    kept = config.batch_size == used["batch_size"] and config.grad_accum in (None, used["grad_accum"])
    if config.batch_size and not kept:
        given = f"--batch_size {config.batch_size}" + f" --grad_accum {config.grad_accum}" * bool(config.grad_accum)
        lines.append(f"{given} does not give the run's global batch of {plan.global_batch_size}; see the batch below")
    return lines


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
