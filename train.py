"""Train an image classifier, the same run on one process or on many.

    python train.py                                                         one process, to debug
    accelerate launch --config_file accelerate_configs/2gpu.yaml train.py   one process per GPU
    torchrun --nproc_per_node 2 train.py --config recipes/mnist.yaml        the same with torchrun

This file is the whole run: `main` starts it, `build` creates its parts, and `train` is the loop.
"""

from utils.entry import guard_output  # must be the first import: see utils/entry.py

import math
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import nullcontext

from accelerate import Accelerator
from torch.profiler import profile
from torch.utils.data import DataLoader

from utils.config import parse_given, require
from utils.console import say
from utils.data import (
    Batch, ImageDataset, UpdateSampler, evaluation_blocks, keep_on_device, make_loaders,
)  # fmt: skip
from utils.launch import resume_command, typed_command
from utils.memory import gc_frozen
from utils.models import build_model
from utils.output import exit_with
from utils.ranks import Ranks, Stopping, distributed_session, make_accelerator
from utils.runs import CheckpointManager, make_average, numbers_to_send
from utils.settings.train import TrainConfig
from utils.training import (
    REGISTRIES, Run, Setup, SyncInterval, adapt_model, build_optimizer, check_settings,
    clip_gradients, due_after, evaluation_record, fill_settings, learning_rate, load_splits,
    log_end, log_start, make_datasets, prepare_save, resolve, set_learning_rate,
    synchronise, training_record, unwrap_optimizer,
)  # fmt: skip
from utils.version import has_package

HAS_EXTRAS = has_package("extras")
if HAS_EXTRAS:
    import extras


def main(argv: Sequence[str] | None = None) -> dict | None:
    """Train and return the last evaluation. Exits with code 75 if a run was stopped early."""
    guard_output()
    config, given = parse_given(TrainConfig, "train.py", argv, REGISTRIES)
    command = typed_command(argv)
    session = distributed_session("train.py", config, config.fixed_order)
    with session as ranks, Stopping(ranks) as stopping:
        if not HAS_EXTRAS:
            say("the folder extras/ is missing: no page, no first_batch.png, no search for copies")
            is_plain = not (config.dry_run or config.profile)
            require(is_plain, "--dry_run and --profile need the folder extras/", "restore it")
        check_settings(config, ranks)  # these errors are reported before the processes connect
        ranks.join()
        ranks.check_same(str(HAS_EXTRAS), "another folder extras/")

        if config.dry_run:
            config = extras.settings_of_dry_run(config)
        run = build(config, ranks, stopping, given)
        continuing = resume_command(command, config.output_dir, config.run_name or run.folder.name)
        copies, lines = extras.find_copies(run) if HAS_EXTRAS else ([], [])
        log_start(run, continuing, copies, lines)
        if config.dry_run:
            extras.compute_one_update(run, train_update)
            return None
        stopping.defer_signals()
        profiling = extras.make_profiler(run) if config.profile else nullcontext()
        with gc_frozen(), profiling as profiler:
            result = train(run, profiler)
        if HAS_EXTRAS and result is None:  # the run was complete; a page may be missing
            extras.report(run)
        code = log_end(run, result, continuing)
    if code:
        exit_with(code)
    return result


def build(config: TrainConfig, ranks: Ranks, stopping: Stopping, given: Set[str] | None) -> Run:
    """Load the data, build the model, and restore the checkpoint of a resumed run; collective.

    `given` has the names of the settings from flags and the --config file; the others are those of
    the checkpoint. With None, all are given.
    """
    checkpoints = CheckpointManager(config, ranks)
    saved = checkpoints.newest()  # None if the run is new
    config, source = fill_settings(config, given, saved, checkpoints.begun, ranks)
    accelerator: Accelerator = make_accelerator(
        ranks, config, fixed_order=config.fixed_order, trackers=config.trackers
    )
    data = load_splits(config, saved, ranks)
    with ranks.agree("resolving the settings"):  # the only place where they follow from the data
        setup = resolve(config, saved, checkpoints.folder, data, source, accelerator, ranks)
    config, images = setup.config, make_datasets(setup)
    with ranks.local_main_first("building the model"):  # a resumed run needs no published weights
        size = saved.weight_bytes if saved else None
        outputs = setup.task.outputs
        model = build_model(config, setup.spec, outputs, size, data.class_names, images[0])
    model, last_part = adapt_model(model, setup, saved)  # with its final weights
    optimizer = build_optimizer(config, model)
    if last_part is not None:  # the outputs of the other layers are computed once
        from utils.training.feature_cache import features_of

        images = features_of(*images, model, last_part, setup)
    train_loader, eval_loader = build_loaders(images, setup)
    if accelerator.is_fsdp2:
        from utils.training.sharding import get_ready_to_shard

        get_ready_to_shard(model, setup)
    module = model  # without the wrapper, for evaluations and checkpoints

    model, optimizer, train_loader, eval_loader = accelerator.prepare(
        model, optimizer, train_loader, eval_loader
    )  # fmt: skip
    optimizer = unwrap_optimizer(optimizer, accelerator)  # without the wrapper, unless fp16
    average = make_average(module, config.ema_decay)  # of `prepare`'s weights
    folder = checkpoints.restore(config, saved, accelerator, module, optimizer, average)
    return Run(
        **vars(setup),  # a Run is a Setup with more parts
        stopping=stopping,
        checkpoints=checkpoints,
        folder=folder,
        model=model,
        module=module,
        optimizer=optimizer,
        average=average,
        loaders=(train_loader, eval_loader),
    )


def build_loaders(sets: Sequence[ImageDataset], setup: Setup) -> list[DataLoader]:
    """The training and evaluation loaders, with the batches of all ranks, for `prepare`."""
    config, state, ranks = setup.config, setup.state, setup.ranks
    with ranks.agree():
        keep_on_device(sets, config, ranks.device)
    train_set, eval_set = sets
    updates = max(1, setup.updates - state.step)  # one, even if the run is complete, for a dry run
    order = UpdateSampler(setup.plan, ranks.topology.world_size, updates, state.step)
    blocks = evaluation_blocks(len(eval_set), config.eval_batch_size)
    parts = [(train_set, order), (eval_set, blocks)]
    return make_loaders(parts, config, ranks.threads, ranks.device)


def train(run: Run, profiler: profile | None) -> dict | None:
    """Train until the run is complete or is asked to stop; returns the last evaluation, if any."""
    config, state, result = run.config, run.state, None
    batches = iter(run.train_batches)
    run.model.train()
    if state.owes_evaluation:
        last = learning_rate(config, max(0, state.step - 1), run.updates)
        set_learning_rate(run.optimizer, last)  # the next checkpoint saves it
        result = evaluate(run)
        save(run)
    run.meter.restart()
    interval, saved = SyncInterval(state.step), state.seconds
    while not run.over:
        train_update(run, batches)
        run.log.advance()
        if profiler:
            profiler.step()

        due = due_after(config, state, run.updates)
        if not (any(due) or interval.due(state.step)):
            continue
        synchronise(run, interval)
        if due.log or run.ended:
            log(run, "train", training_record(run))
        if due.evaluate or run.ended:
            result = evaluate(run)
        is_late = state.seconds - saved >= (config.save_seconds or math.inf)
        if due.save or is_late or run.over or state.best_step == state.step:
            save(run)
            saved = state.seconds
        run.meter.restart()
    if run.paused and state.evaluation.get("step") != state.step:
        result = evaluate(run, "rung")
    return result


def batches_of_update(run: Run, batches: Iterator[Batch]) -> Iterator[Batch]:
    """This rank's microbatches of the next update."""
    state, ranks = run.state, run.ranks
    run.meter.updates += 1
    for step in range(run.gradients.steps):
        ranks.enter(f"update {state.step + 1}, reading a batch")
        start = time.perf_counter()
        batch = next(batches)
        run.meter.totals["wait"] += time.perf_counter() - start
        assert batch.update == state.step, f"a batch of update {batch.update}, not {state.step}"
        if HAS_EXTRAS and state.step == step == 0:
            extras.write_first_batch(run, batch)
        ranks.enter_collective(f"update {state.step + 1}, computing and adding up gradients")
        if batch.number >= 0:  # otherwise another rank has one microbatch more
            yield batch


def train_update(run: Run, batches: Iterator[Batch]) -> None:
    """One update: forward and backward passes of this rank, then one optimizer step."""
    config, state, gradients = run.config, run.state, run.gradients
    # By hand: a prepared scheduler would advance once for each process.
    set_learning_rate(run.optimizer, learning_rate(config, state.step, run.updates))
    for batch in batches_of_update(run, batches):
        with gradients.microbatch(batch):
            outputs = run.model(batch.images)
            loss = run.task.loss(outputs, batch.labels)
            run.accelerator.backward(loss * gradients.loss_scale(state.position))
        run.meter.add(loss, outputs, batch)
    gradients.reduce()
    run.meter.grad_norm = clip_gradients(run.accelerator, run.model, config)
    run.optimizer.step()
    gradients.add_digest()
    run.optimizer.zero_grad()
    if run.average:
        run.average.update(state.step)
    state.count_update(run.plan)


def evaluate(run: Run, kind: str = "eval") -> dict | None:
    """Evaluate the weights, then log and return the metrics; None if asked to stop meanwhile.

    With --ema_decay, their average is evaluated too, and its metrics are returned. With `kind`
    rung, for --stop_after, it only writes a record, which does not count for --best_metric.
    """
    state, average, result = run.state, run.average, {}
    counts = kind == "eval"
    state.owes_evaluation = counts
    if run.stopping.agreed:
        return None
    run.ranks.enter(f"after update {state.step}, evaluating")
    kinds = ["raw", "ema"] if average else ["raw"]
    for weights in kinds:
        keep = HAS_EXTRAS and run.keeps_predictions and weights == kinds[-1] and counts
        with average.applied() if average and weights == "ema" else nullcontext():
            run.ranks.broadcast_buffers(run.module)
            rows = run.evaluator.rows(run.stopping, keep)
        if not rows:
            return None
        metrics = run.evaluator.metrics(run.accelerator.gather(rows))  # each sample once
        result = {"weights": weights, **metrics} if average else metrics
        log(run, kind, evaluation_record(run, result))
    if counts:
        state.add_evaluation(result, run.task.metric, run.task.higher_is_better)
        if HAS_EXTRAS:
            extras.report(run, result)
    return result


def log(run: Run, kind: str, record: Mapping) -> None:
    """Append a record to log.jsonl, then send its numbers to the trackers of --report_to."""
    run.log.write(kind, **record)
    with run.trackers.guarded():
        run.accelerator.log(numbers_to_send(kind, record), step=run.state.step)


def save(run: Run) -> None:
    """Save a checkpoint, then agree on stopping; collective."""
    files = prepare_save(run)
    with run.checkpoints.writing(run.state, files) as folder:
        if folder:  # on the main process; with FSDP2 on all ranks
            run.accelerator.save_state(folder)
    run.stopping.agreed = run.ranks.any_rank(run.stopping.agreed or bool(run.stopping.request))
    if run.over:  # no save follows
        run.checkpoints.wait()


if __name__ == "__main__":
    main()
