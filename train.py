"""Train an image classifier, the same run on one process or on many.

    python train.py                                                         one process, to debug
    accelerate launch --config_file accelerate_configs/2gpu.yaml train.py   one process per GPU
    torchrun --nproc_per_node 2 train.py --config recipes/mnist.yaml        the same with torchrun

This file is the whole run: `main` starts it, `build` creates its parts, and `train` is the loop.
"""

from utils.output import guard_output, leave  # the first import: see its docstring

# isort: split
import math
from collections.abc import Iterator, Sequence, Set
from contextlib import nullcontext

from torch.profiler import profile
from torch.utils.data import DataLoader

from utils.config.cli import parse_given
from utils.config.settings import TrainConfig
from utils.console import Terminal
from utils.data.auto_augment import AUTO_AUGMENTS
from utils.data.batches import Batches
from utils.data.datasets import AnyDataset, Batch, keep_on_device
from utils.data.order import UpdateSampler, evaluation_blocks
from utils.data.selection import load_data
from utils.data.sources import SOURCES
from utils.data.splits import Data
from utils.data.workers import make_loaders
from utils.launch.command import typed_command
from utils.memory import gc_frozen
from utils.models.zoo import OWN_MODELS, build_model
from utils.ranks.accelerator import make_accelerator
from utils.ranks.ranks import Ranks
from utils.ranks.session import distributed_session
from utils.ranks.stopping import EXIT_RESUME, Stopping
from utils.report.writing import report_training
from utils.runs.checkpoint import CheckpointManager
from utils.runs.loading import make_parts
from utils.runs.log import RunLog
from utils.runs.metadata import SavedRun
from utils.runs.source import find_source
from utils.runs.trackers import TRACKERS
from utils.tasks.losses import LOSSES
from utils.tasks.table import TASKS
from utils.training.building import (
    Resolved,
    change_layers,
    check_settings,
    fill_settings,
    make_datasets,
    resolve,
)
from utils.training.divergence import watch_evaluation
from utils.training.dry_run import dry_run, trial
from utils.training.evaluation import Evaluator
from utils.training.features import replace_by_features
from utils.training.gradients import clip_gradients, make_gradients
from utils.training.loop import batches_of_update, log_training, make_profiler, save, synchronise
from utils.training.meter import Meter, SyncInterval
from utils.training.optim import OPTIMIZERS, build_optimizer, set_learning_rate
from utils.training.run import Run, log_end, log_start
from utils.training.schedule import SCHEDULES, due_after, learning_rate
from utils.training.sharding import prepare_training

# Tables of names, which --help lists
TABLES = SOURCES, AUTO_AUGMENTS, OWN_MODELS, TASKS, LOSSES, OPTIMIZERS, SCHEDULES, TRACKERS


def main(argv: Sequence[str] | None = None) -> dict | None:
    """Train and return the last evaluation. Exits with code 75 if the run was stopped early."""
    guard_output()
    config, given = parse_given(TrainConfig, "train.py", argv, TABLES)
    command = typed_command(argv)
    with (
        distributed_session("train.py", config) as ranks,
        Stopping(ranks) as stopping,
    ):
        check_settings(config, ranks)  # these errors are reported before the processes connect
        ranks.join()
        run = build(trial(config), ranks, stopping, given)
        log_start(run)
        if config.dry_run:
            return dry_run(run, train_update)
        stopping.training_begins()
        with gc_frozen(), make_profiler(run) as profiler:
            result = train(run, profiler)
        if result is None:  # else `evaluate` has written the page
            report_training(run)
        stopped = log_end(run, result, command)
    if stopped:
        leave(EXIT_RESUME)
    return result


def build(config: TrainConfig, ranks: Ranks, stopping: Stopping, given: Set[str] | None) -> Run:
    """Load the data, build the model, and restore the checkpoint of a resumed run; collective.

    Settings that are not `given` are those of the checkpoint; with None, all are given.
    """
    checkpoints = CheckpointManager(config, ranks)
    saved = checkpoints.newest()
    with ranks.agree():
        config = fill_settings(config, given, saved, ranks, TABLES)
    accelerator = make_accelerator(ranks, config)
    config, source = find_source(config, saved, ranks)
    data = find_data(config, saved, ranks)
    with ranks.agree("resolving the settings"):  # the only place where they follow from the data
        resolved = resolve(config, saved, checkpoints.folder, data, source, accelerator)
    config, spec, task = resolved.config, resolved.spec, resolved.task
    images = make_datasets(data, spec, config, ranks)
    with ranks.local_main_first("building the model"):  # a resumed run needs no published weights
        module = build_model(config, spec, task.outputs, saved is None, data.class_names, images[0])
    module = change_layers(module, resolved, accelerator, ranks)
    optimizer = build_optimizer(config, module)
    model, optimizer = prepare_training(module, optimizer, resolved, accelerator, ranks)
    parts = make_parts(accelerator, module, config.ema_decay)
    folder, lines = checkpoints.restore(config, saved, module, optimizer, parts)
    resolved.changed += lines
    sets = replace_by_features(images, resolved, module, accelerator, ranks)  # if only the last part is trained
    train_loader, eval_loader = accelerator.prepare(*make_batches(sets, resolved, ranks))
    gradients = make_gradients(resolved, model, module, accelerator, ranks)
    sinks, device = TRACKERS.sinks(config), accelerator.device
    eval_batches = Batches(eval_loader, spec.for_evaluation(), config, device, training=False)
    with ranks.agree("opening the log"):
        return Run(
            **vars(resolved),
            ranks=ranks,
            stopping=stopping,
            accelerator=accelerator,
            folder=folder,
            checkpoints=checkpoints,
            model=model,
            module=module,
            optimizer=optimizer,
            gradients=gradients,
            parts=parts,
            train_batches=Batches(train_loader, spec, config, device, True, task.outputs),
            evaluator=Evaluator(ranks, accelerator, module, eval_batches, task, config),
            meter=Meter(task, device, resolved.state.since_log, ranks.is_main, optimizer),
            log=RunLog(folder, ranks.is_main, resolved.state, resolved.updates, task, sinks),
        )


def find_data(config: TrainConfig, saved: SavedRun | None, ranks: Ranks) -> Data:
    """Load and check the data. A resumed run keeps its original samples."""
    with ranks.local_main_first("loading the data"):
        data = load_data(config, saved.record if saved else None, Terminal(ranks.is_main))
    ranks.check_same(data.fingerprint, f"different images in --data {config.data}")
    return data


def make_batches(sets: Sequence[AnyDataset], resolved: Resolved, ranks: Ranks) -> list[DataLoader]:
    """The loaders of training and evaluation batches of all ranks."""
    config, state = resolved.config, resolved.state
    with ranks.agree():
        train_set, eval_set = keep_on_device(sets, config, ranks.device)
    updates = max(0, resolved.updates - state.step)
    order = UpdateSampler(resolved.plan, ranks.topology.world_size, updates, state.place)
    blocks = evaluation_blocks(len(eval_set), config.eval_batch_size)
    parts = [(train_set, order), (eval_set, blocks)]
    return make_loaders(parts, config, ranks.threads, ranks.device)


def train(run: Run, profiler: profile | None) -> dict | None:
    """Train until the run is complete or is asked to stop; returns the last evaluation, if any."""
    config, state, result = run.config, run.state, None
    batches = iter(run.train_batches)
    run.model.train()
    if state.owes_evaluation:
        last = learning_rate(config, state.step - 1, run.updates)
        set_learning_rate(run.optimizer, last)  # the next checkpoint saves it
        result = evaluate(run)
        save(run)
    run.meter.restart()
    interval = SyncInterval(state.step)
    while not run.ended and not run.stopping.agreed:
        train_update(run, batches)
        run.log.advance()
        if profiler:
            profiler.step()

        due = due_after(config, state, run.updates)
        if not (any(due) or interval.due(state.step)):
            continue
        since_save = synchronise(run, interval)
        if due.log or run.ended:
            log_training(run)
        if due.evaluate or run.ended:
            result = evaluate(run)
        is_late = since_save >= (config.save_seconds or math.inf)
        is_last = run.ended or run.stopping.agreed
        if due.save or is_late or is_last or state.best_step == state.step:
            save(run)
        run.meter.restart()
    return result


def train_update(run: Run, batches: Iterator[Batch]) -> None:
    """One update: forward and backward passes of this rank, then one optimizer step."""
    config, state, gradients = run.config, run.state, run.gradients
    set_learning_rate(run.optimizer, learning_rate(config, state.step, run.updates))
    for batch in batches_of_update(run, batches):
        with gradients.microbatch(batch):
            outputs = run.model(batch.images)
            loss = run.task.loss(outputs, batch.labels)
            run.accelerator.backward(loss * gradients.loss_scale(state.position))
        run.meter.add(loss, outputs, batch)
    gradients.reduce()
    clip_gradients(run.accelerator, run.model, config)
    run.optimizer.step()
    run.optimizer.zero_grad()
    if run.average:
        run.average.update(state.step)
    state.count_update(run.plan)


def evaluate(run: Run) -> dict | None:
    """Evaluate the weights, then log and return the metrics; None if asked to stop meanwhile.

    With --ema_decay, their average is evaluated too, and its metrics are returned.
    """
    state, split = run.state, run.data.evaluation
    state.owes_evaluation = True
    if run.stopping.agreed:
        return None
    run.ranks.mark(f"after update {state.step}, evaluating")
    for weights in ("raw", "ema") if run.average else ("raw",):
        with run.average.applied() if run.average and weights == "ema" else nullcontext():
            run.ranks.broadcast_buffers(run.module)
            metrics = run.evaluator.evaluate(run.stopping, keep=run.config.report)
        if metrics is None:
            return None
        result = {"weights": weights, **metrics} if run.average else metrics
        run.log.write("eval", step=state.step, epoch=state.epochs_begun, split=split.name, **result)
        if weights == "raw":
            watch_evaluation(run, metrics)
    state.add_evaluation(result, run.task.metric, run.task.higher_is_better)
    report_training(run, result)
    return result


if __name__ == "__main__":
    main()
