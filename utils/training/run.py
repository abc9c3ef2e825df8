"""A training run: everything that the loop uses, and what is printed at its start and end."""

import json
import math
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass

from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer

from utils.config.defaults import advice, hint_for_few, list_changes
from utils.config.recipe import AugmentationSettings, LossSettings, OptimizerSettings
from utils.config.settings import TrainConfig
from utils.console import printable, say, table
from utils.data.batches import Batches
from utils.data.datasets import Features, describe_place
from utils.data.sources import has_columns
from utils.files import size_of, write_file
from utils.launch.command import resume_command, script_command
from utils.launch.exits import inform_launcher
from utils.memory import bytes_text
from utils.models.weight_average import WeightAverage
from utils.models.zoo import OWN_MODELS
from utils.ranks.ranks import Ranks
from utils.ranks.stopping import Stopping
from utils.runs.checkpoint import CheckpointManager
from utils.runs.log import RunLog
from utils.runs.metadata import config_to_save, versions
from utils.runs.trackers import RunTrackers
from utils.training.building import Setup
from utils.training.evaluation import Evaluator
from utils.training.gradients import Gradients
from utils.training.meter import Meter
from utils.training.summary import (
    always_answering,
    classes_row,
    describe_parameters,
    differences,
    warn_about_data,
)

# in the run folder: {path or index: reason} of the unreadable images, if any
BAD_IMAGES = "bad_images.json"


@dataclass(frozen=True, kw_only=True)
class Run:
    """All parts of a training run. No field is replaced, but the objects in them change."""

    setup: Setup
    ranks: Ranks
    stopping: Stopping
    accelerator: Accelerator
    checkpoints: CheckpointManager
    model: nn.Module  # as Accelerate wraps it, for training
    module: nn.Module  # without the wrapper, for evaluation
    optimizer: Optimizer
    gradients: Gradients
    average: WeightAverage | None  # of the weights, with --ema_decay
    train_batches: Batches
    evaluator: Evaluator
    meter: Meter
    log: RunLog
    trackers: RunTrackers
    notes: Sequence[str]  # lines for the start table
    sharding: str  # with FSDP, the bytes before and after it

    folder = property(lambda self: self.checkpoints.folder)
    config = property(lambda self: self.setup.config)
    data = property(lambda self: self.setup.data)
    plan = property(lambda self: self.setup.plan)
    updates = property(lambda self: self.setup.updates)
    spec = property(lambda self: self.setup.spec)
    task = property(lambda self: self.setup.task)
    state = property(lambda self: self.setup.state)

    @property
    def ended(self) -> str:
        """The setting that has ended training after update `state.step`; empty if updates remain.

        It follows from the state, so all ranks agree, and a resumed run with a higher limit
        continues.
        """
        config, state = self.config, self.state
        if state.step >= self.updates:
            return "max_steps" if config.max_steps else "epochs"
        if state.seconds >= (config.max_seconds or math.inf):
            return "max_seconds"
        return (
            "early_stopping"
            if state.evaluations_since_best >= (config.early_stopping or math.inf)
            else ""
        )


def log_start(run: Run) -> None:
    """Print what runs where, start the trackers, and write the settings to the run folder;
    collective.
    """
    config, ranks, folder, processes = (
        run.config,
        run.ranks,
        run.folder,
        run.accelerator.num_processes,
    )
    numbers = run.plan.sizes(processes) | {
        "threads": ranks.threads,
        "precision": run.accelerator.mixed_precision,
    }
    numbers |= {"device": ranks.device.type, "input": run.spec.describe_pixels()}
    source = run.setup.source
    numbers |= {"init_weights": source.weights} if source else {}
    numbers |= {"versions": versions()}
    with ranks.agree("starting the trackers"):
        if ranks.is_main:
            run.trackers.start(numbers)
    run.log.write("start", step=run.state.step, **numbers, time=time.time())
    rows = start_rows(run, ranks.gather(ranks.describe()))
    by_loader = run.train_batches.dataset.in_loader
    small = run.spec.small, run.spec.for_evaluation().small
    has_momentum = any("momentum" in group for group in run.optimizer.param_groups)
    centre = isinstance(run.train_batches.dataset, Features) and not config.feature_views
    lines = [
        *warn_about_data(run.data, config),
        *advice(
            config, small, by_loader, has_columns(config.data), processes, has_momentum, centre
        ),
    ]
    if not run.setup.resumed_from and config.model not in OWN_MODELS:
        lines += hint_for_few(config, run.plan.samples)
    title = "Lockstep  dry run" if config.dry_run else f"Lockstep  {folder}"
    say("\n".join([*run.setup.changed, table(title, rows), *lines]))
    with ranks.agree():
        if ranks.is_main:
            write_file(folder / "config.yaml", config_to_save(config))
            if run.data.bad_images:
                write_file(folder / BAD_IMAGES, json.dumps(run.data.bad_images, indent=1) + "\n")
            if source is not None and source.match is not None:
                write_file(folder / "init_from.txt", f"{source.name}\n{source.match.text()}")


def start_rows(run: Run, places: list[str]) -> list[tuple[str, str]]:
    """The rows of the table at the start of a run; `places` describes where each rank runs."""
    plan, data, config, processes = run.plan, run.data, run.config, len(places)
    interface = f" on {run.ranks.interface}" if run.ranks.interface else ""
    # Only torchvision's models have the first of these, and models whose head was kept the second.
    changes = filter(
        None, [getattr(run.module, name, "") for name in ("stem_change", "head_change")]
    )
    model = [config.model, describe_parameters(run.module), run.spec.describe(), *changes]
    optimizer = [
        config.optimizer,
        f"lr {config.lr:.4g}",
        f"weight decay {config.weight_decay:g}",
        config.lr_schedule,
    ]
    chosen = [
        ("" if number else "defaults", line)
        for number, line in enumerate([*run.setup.chosen, *run.notes])
    ]
    text = "{batch_size} x {processes} processes x {grad_accum} accumulation = {global_batch_size}"
    batch = text.format(**plan.sizes(processes))
    if config.microbatches:
        most = plan.microbatches
        batch = f"{plan.global_batch_size} in {most} microbatches; the same bits on 1 to {most} processes"
    rows = [
        *((f"rank {rank}", place) for rank, place in enumerate(places)),
        ("backend", f"{run.ranks.backend}{interface}, precision {run.accelerator.mixed_precision}"),
        (
            "data",
            f"{config.data}: {plan.samples} training, {len(data.evaluation)} {data.evaluation.name}",
        ),
        ("classes", classes_row(data)),
        ("images", describe_place([run.train_batches.dataset, run.evaluator.batches.dataset])),
        ("model", ", ".join(model)),
        ("input", run.spec.describe_pixels()),
        ("init_from", run.setup.source.describe() if run.setup.source else ""),
        ("sharding", run.sharding),
        ("batch", batch),
        ("optimizer", ", ".join(optimizer + list_changes(config, OptimizerSettings))),
        (
            "updates",
            f"{plan.updates_per_epoch} per epoch, {run.updates} in all, from {run.state.step}",
        ),
        ("task", run.task.describe()),
        (
            "recipe",
            ", ".join(
                list_changes(config, AugmentationSettings) + list_changes(config, LossSettings)
            ),
        ),
        ("mixing", f"training {run.task.when_mixed}" if config.mixes else ""),
        *chosen,
        (
            "depends on topology",
            differences(config, run.module, plan.microbatches // processes, plan.microbatches),
        ),
    ]
    return [(name, text) for name, text in rows if text]


def log_end(run: Run, result: dict | None, command: Sequence[str]) -> bool:
    """Print the result and the next command; returns whether updates or an evaluation remain to be
    done.

    `command` is the command that started the run.
    """
    state, config, folder = run.state, run.config, run.folder
    done = bool(run.ended) and not state.owes_evaluation
    if done:
        if state.step < run.updates:
            run.log.write("end", step=state.step, reason=run.ended, seconds=state.seconds)
        trained = result or state.best_step or run.setup.resumed_from is None
        checkpoint = folder if trained else run.setup.resumed_from
        words = [*script_command("eval.py", config.plugin), "--ckpt", str(checkpoint)]
        words += ["--data_dir", config.data_dir] if config.data_dir else []
        words += (
            ["--cache_dir", config.cache_dir] if config.cache_dir != TrainConfig.cache_dir else []
        )
        title, following = "Done", f"evaluate it: {shlex.join(words)}"
    else:
        reason = run.stopping.request or "another rank was asked to stop"
        title = f"Stopped after update {state.step} of {run.updates} ({reason})"
        following = f"resume with: {resume_command(command, config.output_dir, folder.name)}"
        if run.ranks.topology.local_rank == 0:  # each machine has its own launcher
            inform_launcher(f"{title}\n{following}")
    say(f"{table(title, result_rows(run, result, done))}\n{following}")
    run.trackers.close()
    run.log.close()
    return not done


def result_rows(run: Run, result: dict | None, done: bool) -> list[tuple[str, str]]:
    """The rows of the table at the end of a run."""
    state, names = run.state, dict.fromkeys([run.task.metric, "loss"])
    rows = [(name, f"{result[name]:.4f}") for name in names if name in result] if result else []
    if result and "weights" in result:
        rows.append(("weights", result["weights"]))
    if result and run.task.metric == "accuracy" and (always := always_answering(run.data)):
        rows.append((printable(f"always predicting {always[0]}"), f"{always[1]:.4f}"))
    if done and state.step < run.updates:
        setting = f"--{run.ended} {getattr(run.config, run.ended)}"
        rows.append(
            (
                "ended by",
                f"{setting} after update {state.step} of {run.updates}; raise it to continue",
            )
        )
    elif done and result is None:
        rows = [
            (
                "finished",
                f"all {state.step} updates were already done; raise --epochs or --max_steps to continue",
            )
        ]
    if state.best is not None:
        rows.append(("best", f"{state.best:.4f} at update {state.best_step}"))
    rows.append(
        (
            "training",
            f"{state.seconds:.1f} s, {state.images / max(state.seconds, 1e-9):.0f} images/s",
        )
    )
    if run.ranks.is_main:  # no other rank prints
        rows.append(("checkpoints", bytes_text(size_of(run.folder / "checkpoints"))))
        page = run.folder / "report.html"
        rows += [("page", str(page))] if done and run.config.report and page.exists() else []
    return rows
