"""A training run: everything that the loop uses, and what is printed at its start and end."""

import json
import math
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from utils.console import printable, say, table
from utils.data import DeviceLoader, Features, describe_place, has_columns, suggest_shrink
from utils.files import size_of, write_file
from utils.launch import (
    begin_status,
    compiler,
    end_status,
    inform_launcher,
    script_command,
    update_status,
)
from utils.memory import bytes_text
from utils.models import OWN_MODELS, WeightAverage
from utils.ranks import EXIT_RESUME, Stopping, search_pays
from utils.runs import CheckpointManager, RunLog, RunTrackers, config_to_save, versions
from utils.settings.train import TrainConfig
from utils.training.building import Setup
from utils.training.defaults import advice, hint_for_few, hint_for_waits, list_changes
from utils.training.evaluation import Evaluator
from utils.training.gradients import make_gradients
from utils.training.meter import Meter
from utils.training.schedule import not_reached
from utils.training.summary import (
    always_answering,
    classes_row,
    describe_parameters,
    differences,
    warn_about_data,
)

# in the run folder: {path or index: reason} of the unreadable images, if any
BAD_IMAGES = "bad_images.json"


@dataclass(eq=False)
class Run:
    """All parts of a training run. No attribute is replaced, but the objects in them change.

    `model` is the network as Accelerate wraps it, for training, and `module` without the wrapper,
    for evaluation; `average` is that of its weights, with --ema_decay; `loaders` are those of
    training and evaluation, as Accelerate wraps them. Collective.
    """

    setup: Setup
    stopping: Stopping
    checkpoints: CheckpointManager
    folder: Path
    model: nn.Module
    module: nn.Module
    optimizer: Optimizer
    average: WeightAverage | None
    loaders: Sequence[DataLoader]

    def __post_init__(self) -> None:
        setup = self.setup
        folder = self.folder
        self.ranks, self.accelerator = ranks, accelerator = setup.ranks, setup.accelerator
        self.config, self.state = config, state = setup.config, setup.state
        self.spec, self.task = spec, task = setup.spec, setup.task
        self.data, self.plan, self.updates = setup.data, setup.plan, setup.updates
        with ranks.agree("opening the log"):
            self.log = RunLog(folder, ranks.is_main, state, self.updates, task)
        self.trackers = RunTrackers(accelerator, config, folder, state.run_id)
        device = accelerator.device
        eval_spec = spec.for_evaluation()
        self.train_batches = DeviceLoader(self.loaders[0], spec, config, device, True, task.outputs)
        self.evaluator = Evaluator(
            ranks, accelerator, self.module, self.loaders[1], eval_spec, task, config
        )
        self.gradients = make_gradients(setup, self.model, self.train_batches)
        self.gradients.searches = search_pays(self.updates - state.step)
        self.meter = Meter(task, device, state.since_log, ranks.is_main, self.optimizer)

    @property
    def is_complete(self) -> bool:
        """Whether neither updates nor an evaluation remain to be done."""
        return bool(self.ended) and not self.state.owes_evaluation

    @property
    def ended(self) -> str:
        """The setting that has ended training after update `state.step`; empty if updates remain.

        It follows from the state, so all ranks agree, and a resumed run with a higher limit
        continues.
        """
        config = self.config
        state = self.state
        if state.step >= self.updates:
            return "max_steps" if config.max_steps else "epochs"
        if state.seconds >= (config.max_seconds or math.inf):
            return "max_seconds"
        patience = config.early_stopping or math.inf
        return "early_stopping" if state.evaluations_since_best >= patience else ""


def log_start(run: Run, continuing: str, copies: Sequence, lines: Sequence[str]) -> None:
    """Print what runs where, start the trackers, and write the settings; collective.

    `continuing` is the command that continues the run. `copies` are images that are in the data
    twice, for the log, and `lines` are printed about them.
    """
    config = run.config
    ranks = run.ranks
    data = run.data
    source = run.setup.source
    numbers = run.plan.sizes(run.accelerator.num_processes) | {
        "threads": ranks.threads,
        "precision": run.accelerator.mixed_precision,
        "device": ranks.device.type,
        "rounding": ranks.rounding if config.microbatches else None,
        "input": run.spec.describe_pixels(),
        "init_weights": source and source.weights,
        "max_seconds": config.max_seconds,
        "shrink": config.shrink,
        "versions": versions(),
    }
    numbers = {name: value for name, value in numbers.items() if value is not None}
    ranks.from_main(lambda: run.trackers.start(numbers))
    if ranks.is_main:
        begin_status(run.folder, continuing)
    # not to the trackers, because of the paths
    run.log.write("start", step=run.state.step, **numbers, copies=copies[:24], time=time.time())
    rows = start_rows(run)
    lines = [*warn_about_data(data), *lines, *advice_lines(run)]
    title = "Lockstep  dry run" if config.dry_run else f"Lockstep  {run.folder}"
    say("\n".join([*run.setup.changed, table(title, rows), *lines]))
    with ranks.agree():
        if ranks.is_main:
            write_file(run.folder / "config.yaml", config_to_save(config))
            if data.bad_images:
                write_file(run.folder / BAD_IMAGES, json.dumps(data.bad_images, indent=1) + "\n")
            if source and source.match:
                write_file(run.folder / "init_from.txt", f"{source.name}\n{source.match.text()}")


def advice_lines(run: Run) -> list[str]:
    """Advice below the table at the start."""
    config = run.config
    data = run.data
    images = run.train_batches.dataset
    lines = advice(
        config,
        small=(run.spec.small, run.spec.for_evaluation().small),
        by_loader=images.in_loader,
        has_columns=has_columns(config.data),
        processes=run.accelerator.num_processes,
        has_momentum=any("momentum" in group for group in run.optimizer.param_groups),
        cached=isinstance(images, Features),
    )
    if images.in_loader and not config.shrink:
        lines += suggest_shrink(data.train, run.updates * run.plan.global_batch_size)
    if not run.setup.resumed_from and config.model not in OWN_MODELS:
        lines += hint_for_few(config, run.plan.samples)
    lines += not_reached(config, run.updates)
    return lines + hint_for_waits(config, run.ranks.device.type)


def start_rows(run: Run) -> list[tuple[str, str]]:
    """The rows of the table at the start of a run; collective."""
    plan = run.plan
    data = run.data
    config = run.config
    setup = run.setup
    ranks = run.ranks
    places = ranks.gather(ranks.describe())
    most = plan.microbatches
    per_rank = plan.microbatches // len(places)
    interface = f" on {ranks.interface}" if ranks.interface else ""
    compiled = f", compiled by {compiler()}" if compiler() else ""
    model = [config.model, describe_parameters(run.module), run.spec.describe()]
    # only torchvision's models have the first of these, and models whose head was kept the second
    model += [getattr(run.module, name, "") for name in ("stem_change", "head_change")]
    optimizer = [config.optimizer, f"lr {config.lr:.4g}", f"weight decay {config.weight_decay:g}"]
    optimizer += [
        config.lr_schedule,
        *list_changes(config, "optimizer, schedule and regularisation"),
    ]
    search = "cuDNN searches for the fastest" if run.gradients.searches else "cuDNN does not search"
    recipe = list_changes(config, "augmentation of training images")
    recipe += list_changes(config, "samples, targets and loss")
    batch = "{batch_size} x {processes} processes x {grad_accum} accumulation = {global_batch_size}"
    if config.microbatches:
        batch = (
            f"{{global_batch_size}} in {most} microbatches; the same bits on 1 to {most} processes"
        )
    rows = [
        *((f"rank {rank}", place) for rank, place in enumerate(places)),
        ("backend", f"{ranks.backend}{interface}, precision {config.mixed_precision}{compiled}"),
        ("kernels", search if ranks.device.type == "cuda" else ""),
        ("data", f"{config.data}: {plan.samples} training, {len(data.evaluation)} {data.evaluation.name}"),
        ("classes", classes_row(data)),
        ("images", describe_place([run.train_batches.dataset, run.evaluator.batches.dataset])),
        ("shrink", str(config.shrink or "")),
        ("model", ", ".join(filter(None, model))),
        ("input", run.spec.describe_pixels()),
        ("init_from", setup.source.describe() if setup.source else ""),
        ("sharding", _describe_shards(run)),
        ("batch", batch.format(**plan.sizes(len(places)))),
        ("optimizer", ", ".join(optimizer)),
        ("updates", f"{plan.updates_per_epoch} per epoch, {run.updates} in all, from {run.state.step}"),
        ("task", run.task.describe()),
        ("recipe", ", ".join(recipe)),
        ("mixing", f"training {run.task.when_mixed}" if config.mixes else ""),
        *(("" if number else "defaults", line) for number, line in enumerate(setup.notes)),
        ("depends on topology", differences(config, run.module, per_rank, most)),
    ]  # fmt: skip
    return [(name, text) for name, text in rows if text]


def _describe_shards(run: Run) -> str:
    """For the start table; empty if the model is not sharded; collective."""
    if not run.accelerator.is_fsdp2:
        return ""
    from utils.training.sharding import describe_shards

    return describe_shards(run.module, run.ranks)


def log_end(run: Run, result: dict | None, continuing: str) -> bool:
    """Print the result and the next command; returns whether updates or an evaluation remain to be
    done.

    `continuing` is the command that continues the run.
    """
    state = run.state
    config = run.config
    folder = run.folder
    done = run.is_complete
    if done:
        if state.step < run.updates:
            run.log.write("end", step=state.step, reason=run.ended, seconds=state.seconds)
        trained = result or state.best_step or run.setup.resumed_from is None
        words = [
            *script_command("eval.py", config.plugin),
            "--ckpt",
            folder if trained else run.setup.resumed_from,
        ]
        for name in ("data_dir", "cache_dir"):
            if (value := getattr(config, name)) != getattr(TrainConfig, name):
                words += [f"--{name}", value]
        title = "Done"
        following = f"evaluate it: {shlex.join(map(str, words))}"
    else:
        reason = run.stopping.request or "another rank was asked to stop"
        title = f"Stopped after update {state.step} of {run.updates} ({reason})"
        following = f"resume with: {continuing}"
        if run.ranks.topology.local_rank == 0:  # each machine has its own launcher
            inform_launcher(f"{title}\n{following}")
    say(f"{table(title, result_rows(run, result, done))}\n{following}")
    run.trackers.close("FINISHED" if done else "KILLED")
    run.log.close()
    update_status(update=state.step, time=time.time())
    end_status(0 if done else EXIT_RESUME, title)
    return not done


def result_rows(run: Run, result: dict | None, done: bool) -> list[tuple[str, str]]:
    """The rows of the table at the end of a run."""
    state = run.state
    metric = run.task.metric
    found = result or {}
    rows = []
    if state.best is not None:  # the result, also of report.html and eval.py
        rows.append((metric, f"{state.best:.4f} (best, update {state.best_step})"))
    names = [name for name in dict.fromkeys([metric, "loss"]) if name in found]
    rows += [(f"last {name}", f"{found[name]:.4f}") for name in names]
    if "weights" in found:
        rows.append(("weights", found["weights"]))
    if result and metric == "accuracy" and (always := always_answering(run.data)):
        rows.append((printable(f"always predicting {always[0]}"), f"{always[1]:.4f}"))
    if done and (state.step < run.updates or result is None):
        setting = f"--{run.ended} {getattr(run.config, run.ended)}"
        where = f"after update {state.step} of {run.updates}"
        rows.append(("ended by", f"{setting} {where}; raise it to continue"))
    rate = state.images / max(state.seconds, 1e-9)
    rows.append(("training", f"{state.seconds:.1f} s, {rate:.0f} images/s"))
    if run.ranks.is_main:  # no other rank prints
        rows.append(("checkpoints", bytes_text(size_of(run.folder / "checkpoints"))))
        page = run.folder / "report.html"
        if done and run.config.report and page.exists():
            rows.append(("page", str(page)))
    return rows
