"""What is printed and written at the start and at the end of a training run."""

import json
import shlex
import time
from collections.abc import Sequence

from utils.console import printable, say, table
from utils.data import Plan, describe_place, has_columns, suggest_shrink
from utils.files import size_of, write_file
from utils.launch import (
    begin_status,
    compile_backend,
    end_status,
    inform_launcher,
    script_command,
    update_status,
)
from utils.memory import bytes_text
from utils.models import OWN_MODELS
from utils.ranks import EXIT_RESUME
from utils.runs import config_to_save, versions
from utils.settings.train import TrainConfig
from utils.training.defaults import Facts, hint_for_few, list_changes, without_effect
from utils.training.run import Run
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


def log_start(run: Run, continuing: str, copies: Sequence, about_copies: Sequence[str]) -> None:
    """Print what runs where, start the trackers, and write the settings; collective.

    `continuing` is the command that continues the run. `copies` are the images that occur
    twice, for the log, and `about_copies` are lines about them to print.
    """
    config = run.config
    ranks = run.ranks
    data = run.data
    source = run.source
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
    if run.head:
        run.log.write("head", step=run.state.step, **run.head)
    rows = start_rows(run)
    lines = [*warn_about_data(data), *about_copies, *advice_lines(run)]
    title = "Lockstep  dry run" if config.dry_run else f"Lockstep  {run.folder}"
    say("\n".join([*run.changed, table(title, rows), *lines]))
    with ranks.agree():
        if ranks.is_main:
            write_file(run.folder / "config.yaml", config_to_save(config))
            data.table.keep_in(run.folder)
            if data.bad_images:
                write_file(run.folder / BAD_IMAGES, json.dumps(data.bad_images, indent=1) + "\n")
            if source and source.match:
                write_file(run.folder / "init_from.txt", f"{source.name}\n{source.match.text()}")


def advice_lines(run: Run) -> list[str]:
    """Advice below the table at the start."""
    config = run.config
    data = run.data
    images = run.train_batches.dataset
    facts = Facts(
        processes=run.accelerator.num_processes,
        small=run.spec.small,
        small_evaluation=run.spec.for_evaluation().small,
        by_loader=images.in_loader,
        has_columns=has_columns(config.data),
        has_momentum=any("momentum" in group for group in run.optimizer.param_groups),
        cached=images.source is not None,
    )
    lines = without_effect(config, facts)
    if images.in_loader and not config.shrink:
        lines += suggest_shrink(data.train, run.updates * run.plan.global_batch_size)
    if not run.resumed_from and config.model not in OWN_MODELS:
        lines += hint_for_few(config, run.plan.samples)
    return lines + not_reached(config, run.updates)


SHOWN = "optimizer", "lr_schedule"  # always shown in their row


def start_rows(run: Run) -> list[tuple[str, str]]:
    """The rows of the table at the start of a run; collective."""
    plan = run.plan
    data = run.data
    config = run.config
    ranks = run.ranks
    places = ranks.gather(ranks.describe())
    most = plan.microbatches
    per_rank = plan.microbatches // len(places)
    interface = f" on {ranks.interface}" if ranks.interface else ""
    compiled = f", compiled by {compile_backend()}" if compile_backend() else ""
    model = [config.model, describe_parameters(run.module), run.spec.describe()]
    # only torchvision's models have the first of these, and models whose head was kept the second
    model += [getattr(run.module, name, "") for name in ("stem_change", "head_change")]
    optimizer = [config.optimizer, f"lr {config.lr:.4g}", f"weight decay {config.weight_decay:g}"]
    optimizer.append(config.lr_schedule)
    optimizer += list_changes(config, "optimizer, schedule and regularisation", *SHOWN)
    search = "cuDNN searches for the fastest" if run.gradients.searches else "cuDNN does not search"
    recipe = list_changes(config, "augmentation of training images")
    recipe += list_changes(config, "samples, targets and loss")
    evaluated = f"{len(data.evaluation)} {data.evaluation.name}"
    all_updates = f"{run.updates} in all, from {run.state.step}"
    rows = [
        *((f"rank {rank}", place) for rank, place in enumerate(places)),
        ("backend", f"{ranks.backend}{interface}, precision {config.mixed_precision}{compiled}"),
        ("kernels", search if ranks.device.type == "cuda" else ""),
        ("data", f"{config.data}: {plan.samples} training, {evaluated}"),
        ("archives", getattr(data.train.images, "form", "")),
        ("samples", f"{data.table.count:,}, listed on {data.table.listed}"),
        ("classes", classes_row(data)),
        ("images", describe_place([run.train_batches.dataset, run.evaluator.batches.dataset])),
        ("shrink", str(config.shrink or "")),
        ("model", ", ".join(filter(None, model))),
        ("input", run.spec.describe_pixels()),
        ("init_from", run.source.describe() if run.source else ""),
        ("sharding", _describe_shards(run)),
        ("batch", _describe_batch(plan, config.microbatches, len(places))),
        ("optimizer", ", ".join(optimizer)),
        ("updates", f"{plan.updates_per_epoch} per epoch, {all_updates}"),
        ("task", run.task.describe()),
        ("recipe", ", ".join(recipe)),
        ("mixing", f"training {run.task.when_mixed}" if config.mixes else ""),
        *(("" if number else "defaults", line) for number, line in enumerate(run.notes)),
        ("depends on topology", differences(config, run.module, per_rank, most)),
    ]  # fmt: skip
    return [(name, text) for name, text in rows if text]


def _describe_batch(plan: Plan, microbatches: int | None, processes: int) -> str:
    """The global batch as a product, or with --microbatches as a sum of microbatches."""
    if microbatches:
        bits = f"the same bits on 1 to {microbatches} processes"
        return f"{plan.global_batch_size} in {microbatches} microbatches; {bits}"
    text = "{batch_size} x {processes} processes x {grad_accum} accumulation = {global_batch_size}"
    return text.format(**plan.sizes(processes))


def _describe_shards(run: Run) -> str:
    """For the start table; empty if the model is not sharded; collective."""
    if not run.accelerator.is_fsdp2:
        return ""
    from utils.training.sharding import describe_shards

    return describe_shards(run.module, run.ranks)


def log_end(run: Run, result: dict | None, continuing: str) -> int:
    """Print the result and the next command; returns the exit code.

    `continuing` is the command that continues the run.
    """
    state = run.state
    config = run.config
    folder = run.folder
    done = run.is_complete
    paused = run.paused and not run.stopping.agreed
    code = 0 if done or paused else EXIT_RESUME
    if done:
        if state.step < run.updates:
            run.log.write("end", step=state.step, reason=run.ended, seconds=state.seconds)
        trained = result or state.best_step is not None or run.resumed_from is None
        words = [
            *script_command("eval.py", config.plugin),
            "--ckpt",
            folder if trained else run.resumed_from,
        ]
        for name in ("data_dir", "cache_dir"):
            if (value := getattr(config, name)) != getattr(TrainConfig, name):
                words += [f"--{name}", value]
        title = "Done"
        following = f"evaluate it: {shlex.join(map(str, words))}"
    else:
        reason = run.stopping.request or "another rank was asked to stop"
        if paused:
            reason = f"--stop_after {config.stop_after}"
        title = f"Stopped after update {state.step} of {run.updates} ({reason})"
        following = f"resume with: {continuing}"
        if code and run.ranks.topology.local_rank == 0:  # each machine has its own launcher
            inform_launcher(f"{title}\n{following}")
    say(f"{table(title, result_rows(run, result, done))}\n{following}")
    run.trackers.close("FINISHED" if done else "KILLED")
    run.log.close()
    update_status(update=state.step, time=time.time())
    end_status(code, title, "complete" if done else "stopped")
    return code


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
