"""Train an image classifier, the same run on one process or on many.

    python train.py                                                         one process, to debug
    accelerate launch --config_file accelerate_configs/2gpu.yaml train.py   one process per GPU
    torchrun --nproc_per_node 2 train.py --config recipes/mnist.yaml        the same with torchrun

This file is the whole run: `main` starts it, `build` creates its parts, and `train` is the loop.
"""

from utils.output import guard_output  # the first import: see its docstring

# isort: split
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

from utils.config.cli import parse_args
from utils.config.settings import TrainConfig
from utils.console import Terminal
from utils.data.auto_augment import AUTO_AUGMENTS
from utils.data.batches import Batch, Batches
from utils.data.order import BlockSampler, UpdateSampler, fold_in
from utils.data.pipeline import ImageDataset, make_dataset, make_loaders
from utils.data.resident import keep_on_device
from utils.data.selection import load_data
from utils.data.sources import SOURCES
from utils.data.spec import InputSpec
from utils.data.splits import Data
from utils.launch.command import typed_command
from utils.memory import frozen_garbage
from utils.models.zoo import OWN_MODELS, build_model, seed_layers
from utils.ranks.accelerator import compile_model, make_accelerator
from utils.ranks.ranks import Ranks
from utils.ranks.session import distributed_session
from utils.ranks.stopping import EXIT_RESUME, Stopping
from utils.report.writing import report_training
from utils.runs.checkpoint import CheckpointManager
from utils.runs.log import RunLog
from utils.runs.metadata import SavedRun, settings_to_save
from utils.runs.parts import make_parts
from utils.runs.resume import resolve, resume_lines, settings_of_start
from utils.runs.source import find_source
from utils.runs.trackers import TRACKERS
from utils.tasks.losses import LOSSES
from utils.tasks.table import TASKS
from utils.training.building import check_settings, count_updates, prepare_gradients
from utils.training.divergence import watch_evaluation
from utils.training.dry_run import dry_run, trial
from utils.training.evaluation import Evaluator
from utils.training.first_batch import write_first_batch
from utils.training.gradients import clip_gradients
from utils.training.meter import Meter, Pace
from utils.training.optim import OPTIMIZERS, begin_momentum, build_optimizer, set_learning_rate
from utils.training.profiling import Profile
from utils.training.run import Run, announce, close
from utils.training.schedule import SCHEDULES, due_after, learning_rate, reduce_on_plateau
from utils.training.start_model import check_same_weights, prepare_start
from utils.training.synchronise import log_training, save, synchronise

TABLES = SOURCES, AUTO_AUGMENTS, OWN_MODELS, TASKS, LOSSES, OPTIMIZERS, SCHEDULES, TRACKERS  # of names


def main(argv: Sequence[str] | None = None) -> dict | None:
    """Train and return the last evaluation. Exits with code 75 if the run was stopped early."""
    guard_output()
    config, command = parse_args(TrainConfig, "train.py", argv, TABLES), typed_command(argv)
    with (
        distributed_session("train.py", config) as ranks,
        Stopping(lambda: ranks.orphaned) as stopping,
    ):
        check_settings(config, ranks)  # these errors are reported before the processes connect
        ranks.join()
        run = build(trial(config), ranks, stopping)
        announce(run)
        if config.dry_run:
            return dry_run(run, train_update)
        stopping.training_begins()
        with frozen_garbage(), run.profile:
            result = train(run)
        if result is None:  # else `evaluate` has written the page
            report_training(run)
        stopped = close(run, result, command)
    if stopped:
        raise SystemExit(EXIT_RESUME)
    return result


def build(config: TrainConfig, ranks: Ranks, stopping: Stopping) -> Run:
    """Load the data, build the model, and restore the checkpoint of a resumed run; collective."""
    checkpoints, processes = CheckpointManager(config, ranks), ranks.topology.world_size
    saved = checkpoints.newest()
    before = saved.settings.mixed_precision if saved else None
    accelerator = make_accelerator(ranks, config, before)
    with ranks.agree():
        config = settings_of_start(config, saved, processes)
    config, source = find_source(config, saved, ranks)
    data = find_data(config, saved, ranks)
    with ranks.agree("resolving the settings"):  # the only place where settings follow from the data
        found = resolve(config, saved, checkpoints.folder, data, processes)
    config, plan, spec, task, state = found.config, found.plan, found.spec, found.task, found.state
    train_set, eval_set = make_sets(config, data, spec, ranks)

    with ranks.local_main_first("building the model"):  # a resumed run needs no published weights
        module = build_model(config, spec, task.outputs, saved is None, data.class_names, train_set)
    module = prepare_start(module, config, data.class_names, source, ranks)
    optimizer = build_optimizer(config, module)
    updates = count_updates(config, plan, module, ranks)
    run_folder = checkpoints.open_folder()

    # Accelerate assigns what a sampler emits to the ranks in turn.
    order = UpdateSampler(plan, processes, max(0, updates - state.step), state.place)
    blocks = BlockSampler(len(data.evaluation), config.eval_batch_size)
    loaders = make_loaders([(train_set, order), (eval_set, blocks)], config, ranks.threads, ranks.device)
    compile_model(accelerator, module)
    if config.microbatches in (None, processes):
        model, wrapped, train_loader, eval_loader = accelerator.prepare(module, optimizer, *loaders)
    else:  # DDP exchanges gradients in one backward pass of an update; TreeGradients adds up those of several
        model = accelerator.prepare_model(module, evaluation_mode=True)
        wrapped, train_loader, eval_loader = accelerator.prepare(optimizer, *loaders)
    gradients = prepare_gradients(config, spec, plan, model, module, accelerator)
    optimizer = wrapped if accelerator.scaler else optimizer  # only fp16 needs the slower wrapper
    begin_momentum(optimizer)  # fused SGD fails if a parameter gets its first gradient late

    settings = settings_to_save(config, plan, saved is not None, accelerator)
    parts = make_parts(accelerator, module, config.ema_decay)
    if saved:
        lines = resume_lines(saved, config, settings, plan, ranks)
        checkpoints.load(saved, module, optimizer, parts, lines)
    check_same_weights(config, module, ranks)
    ranks.store_set("started", "yes")  # after a restart, its own checkpoints come before that of --resume
    device = accelerator.device
    with ranks.agree("opening the log"):
        log = RunLog(run_folder, ranks.is_main, state, updates, task, TRACKERS.sinks(settings))
        meter = Meter(task, device, state.since_log, ranks.is_main)
    eval_batches = Batches(eval_loader, spec.for_evaluation(), settings, device, training=False)
    return Run(
        config=settings,
        chosen=found.lines,
        ranks=ranks,
        stopping=stopping,
        accelerator=accelerator,
        checkpoints=checkpoints,
        folder=run_folder,
        resumed_from=saved.path if saved else None,
        source=source,
        data=data,
        spec=spec,
        task=task,
        plan=plan,
        updates=updates,
        state=state,
        model=model,
        gradients=gradients,
        module=module,
        optimizer=optimizer,
        parts=parts,
        train_batches=Batches(train_loader, spec, settings, device, training=True, outputs=task.outputs),
        evaluator=Evaluator(ranks, accelerator, module, eval_batches, task, settings),
        meter=meter,
        log=log,
        profile=Profile(config.profile, run_folder, ranks.topology.rank, log.say),
    )


def find_data(config: TrainConfig, saved: SavedRun | None, ranks: Ranks) -> Data:
    """Load and check the data. A resumed run keeps its original samples."""
    record = saved.record if saved else None
    with ranks.local_main_first("loading the data"):
        data = load_data(config, record, Terminal(ranks.is_main))
    ranks.check_same(data.fingerprint, f"different images in --data {config.data}")
    return data


def make_sets(config: TrainConfig, data: Data, spec: InputSpec, ranks: Ranks) -> list[ImageDataset]:
    """The training and the evaluation set. Small images are decoded here, others by the loaders."""
    bar, made = Terminal(ranks.is_main).progress("decoding"), []
    parts = (data.train, spec, True), (data.evaluation, spec.for_evaluation(), False)
    for split, size, training in parts:
        with ranks.local_main_first("decoding images"):
            made.append(make_dataset(split, size, config, training, bar))
    with ranks.agree():
        return keep_on_device(made, config, ranks.device)


def train(run: Run) -> dict | None:
    """Train until the run is complete or is asked to stop; returns the last evaluation, if any."""
    config, state, result = run.config, run.state, None
    batches = iter(run.train_batches)
    run.model.train()
    if state.owes_evaluation:
        last = learning_rate(config, state.step - 1, run.updates, state.lr_factor)
        set_learning_rate(run.optimizer, last)  # the next checkpoint saves it
        result = evaluate(run)
        save(run)
    run.meter.restart()
    pace = Pace(state.step)
    while not run.ended and not run.stopping.agreed:
        train_update(run, batches)
        run.log.advance()
        run.profile.step()

        due = due_after(config, state, run.updates)
        if not (any(due) or pace.due(state.step)):
            continue
        since_save = synchronise(run, pace)
        if due.log or run.ended:
            log_training(run)
        if due.evaluate or run.ended:
            result = evaluate(run)
        in_time = since_save >= (config.save_seconds or math.inf)
        leaves = run.ended or run.stopping.agreed
        if due.save or in_time or state.best_step == state.step or leaves:
            save(run)
        run.meter.restart()
    return result


def train_update(run: Run, batches: Iterator[Batch]) -> None:
    """One update: forward and backward passes of this rank, then one optimizer step."""
    config, state, plan, accelerator = run.config, run.state, run.plan, run.accelerator
    set_learning_rate(run.optimizer, learning_rate(config, state.step, run.updates, state.lr_factor))
    gradients, scale = run.gradients, run.gradients.scale(state.position)
    for step in range(gradients.steps):
        run.ranks.mark(f"update {state.step + 1}, reading a batch")
        waiting = time.perf_counter()
        batch = next(batches)
        waited = time.perf_counter() - waiting
        if state.step == 0 and step == 0:
            write_first_batch(run, batch)
        run.ranks.mark_waiting(f"update {state.step + 1}, computing and adding up gradients")
        if batch.number < 0:  # another rank has one microbatch more
            continue
        where = batch.update, batch.number
        assert batch.update == state.step, f"a batch of update {batch.update}, not {state.step}"
        seed_layers(accelerator.device, fold_in(config.seed, "layers", *where))
        with gradients.microbatch(step, batch):
            outputs = run.model(batch.images)
            loss = run.task.loss(outputs, batch.labels)
            accelerator.backward(loss * scale)
        run.meter.add(loss, outputs, batch.labels, waited, where)
    gradients.finish()
    clip_gradients(accelerator, run.model, config)
    run.optimizer.step()
    run.optimizer.zero_grad()
    if run.average:
        run.average.update(state.step)
    state.count_update(plan)


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
            metrics = run.evaluator.evaluate(run.stopping, keep=run.may_end)
        if metrics is None:
            return None
        result = {"weights": weights, **metrics} if run.average else metrics
        run.log.write("eval", step=state.step, epoch=state.epochs_begun, split=split.name, **result)
        if weights == "raw":
            watch_evaluation(run, metrics)
    state.add_evaluation(result, run.task.metric, run.task.higher_is_better)
    reduce_on_plateau(run.config, state, run.updates, run.log.say)
    report_training(run, result)
    return result


if __name__ == "__main__":
    main()
