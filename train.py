"""Train an image classifier, the same run on one process or on many.

    python train.py                                                              one process: debug
    accelerate launch --config_file accelerate_configs/2gpu.yaml train.py        one process for each of two GPUs
    torchrun --nproc_per_node 2 train.py --config recipes/mnist.yaml             the same through torchrun

Parse, start, build, loop, close: this file is the whole run, top to bottom. `python train.py --help` lists settings.
"""

from utils.output import guard_output  # the first import: see its docstring

# isort: split
import math
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer

from utils.config.batch import resolve_batch
from utils.config.cli import parse_args
from utils.config.settings import TrainConfig, advice, to_yaml
from utils.console import Terminal, table
from utils.data.batches import Batch, Batches
from utils.data.colour import remarks
from utils.data.decode import peek
from utils.data.order import BlockSampler, Plan, UpdateSampler, fold_in
from utils.data.pipeline import make_dataset, make_loaders
from utils.data.selection import load_data
from utils.data.sources import check_source
from utils.data.spec import InputSpec
from utils.data.splits import Data
from utils.data.workers import check_workers
from utils.errors import AgreedError, one_line
from utils.files import write_file
from utils.launch.command import resume_command, typed_command
from utils.memory import frozen_garbage
from utils.models.batch_norm import check_batch_norm, has_batch_norm
from utils.models.zoo import build_model, check_model, input_spec, seed_layers
from utils.ranks.accelerator import check_precision, compile_model, make_accelerator, prepare_buckets
from utils.ranks.batchnorm import convert_batch_norm
from utils.ranks.ranks import Ranks
from utils.ranks.session import distributed_session
from utils.ranks.stopping import EXIT_RESUME, Stopping
from utils.runs.checkpoint import delete_after, save_checkpoint, update_pointers
from utils.runs.folder import Start, check_run_folder, find_start, make_run_folder
from utils.runs.log import RunLog
from utils.runs.metadata import metadata_files, read_sample_record, settings_to_save
from utils.runs.resume import changed_settings, read_state, recorded_input, restore_run
from utils.runs.state import Totals, TrainState
from utils.runs.summary import result_rows, start_rows
from utils.training.bad_images import agree_on_bad, still_bad, without_bad, write_list
from utils.training.divergence import check_weights, report_bad_loss
from utils.training.evaluation import evaluate_split
from utils.training.losses import loss_sum
from utils.training.meter import Meter, Pace
from utils.training.optim import begin_momentum, build_optimizer
from utils.training.profiling import Profile
from utils.training.schedule import due_after, learning_rate, set_learning_rate, total_updates


@dataclass
class Run:
    """Everything that the loop works with."""

    config: TrainConfig
    ranks: Ranks
    stopping: Stopping
    accelerator: Accelerator
    start: Start
    data: Data
    spec: InputSpec
    plan: Plan
    updates: int
    state: TrainState
    model: nn.Module  # as Accelerate wraps it, to train
    module: nn.Module  # the bare one, to evaluate
    optimizer: Optimizer
    train_batches: Batches
    eval_batches: Batches
    meter: Meter
    log: RunLog
    profile: Profile
    best: tuple[float | None, int | None]  # accuracy and update of the best checkpoint on the disk


def main(argv: Sequence[str] | None = None) -> dict | None:
    """Train as the arguments say; returns the last evaluation, if any; exits with code 75 when told to stop before."""
    guard_output()
    config, command = parse_args(TrainConfig, "train.py", argv), typed_command(argv)
    with distributed_session("train.py", config) as ranks, Stopping(lambda: ranks.orphaned) as stopping:
        # What needs no other process is checked before they meet.
        check_precision(config, ranks)
        check_model(config)
        check_source(config)
        check_run_folder(config)
        check_workers(config.num_workers)
        if config.resume is None:
            resolve_batch(config, ranks.topology.world_size)
        ranks.join()
        run = build(config, ranks, stopping, make_accelerator(ranks, config))
        announce(run)
        stopping.training_begins()
        with frozen_garbage(), run.profile:
            result = train(run)
        stopped = close(run, result, command)
    if stopped:
        raise SystemExit(EXIT_RESUME)
    return result


def build(config: TrainConfig, ranks: Ranks, stopping: Stopping, accelerator: Accelerator) -> Run:
    """Make the data, the model, the optimizer and the run folder, and go to the point to start from."""
    config, start = find_start(config, ranks)
    data = find_data(config, start, ranks)
    _, grad_accum, global_batch = resolve_batch(config, ranks.topology.world_size)
    microbatches = grad_accum * ranks.topology.world_size
    plan = Plan(len(data.train), global_batch, microbatches, config.seed, config.drop_last)
    state = ranks.run_on_all(lambda: read_state(start.checkpoint, start.folder, config, plan, data))
    data = replace(data, train=ranks.run_on_all(lambda: without_bad(data.train, state.bad_images, config)))

    known, skip = ranks.run_on_all(lambda: recorded_input(start.checkpoint, config)), config.bad_images == "skip"
    spec = known or ranks.run_on_all(lambda: input_spec(config, *peek(data.train, skip=skip)))
    bar = Terminal(ranks.is_main).progress("decoding")
    train_set = ranks.run_on_all(lambda: make_dataset(data.train, spec, config, True, bar), True, "decoding images")
    eval_set = ranks.run_on_all(
        lambda: make_dataset(data.evaluation, spec, config, False, bar), True, "decoding images"
    )

    torch.manual_seed(fold_in(config.seed, "weights"))
    module = ranks.run_on_all(lambda: build_model(config, spec, len(data.class_names)), True, "building the model")
    module = ranks.run_on_all(lambda: convert_batch_norm(module)) if config.sync_batchnorm else module
    optimizer = build_optimizer(config, module)

    updates = ranks.run_on_all(lambda: total_updates(config, plan))
    sharing = ranks.topology.world_size if config.sync_batchnorm else 1  # processes with common batch statistics
    ranks.run_on_all(lambda: has_batch_norm(module) and check_batch_norm(plan, updates, sharing))
    folder = make_run_folder(config, start, ranks)
    profiled, config = config.profile, settings_to_save(config, plan, accelerator.mixed_precision)

    # Accelerate deals the microbatches of each update, and the blocks of the evaluation split, to the ranks in turn.
    order = UpdateSampler(plan, max(0, updates - state.step), state.epoch, state.position)
    blocks = BlockSampler(len(eval_set), config.eval_batch_size)
    parts = {"training": (train_set, order), "evaluation": (eval_set, blocks)}
    loaders = make_loaders(parts, config, ranks.threads, ranks.device)
    compile_model(accelerator, module)
    model, wrapped, train_loader, eval_loader = accelerator.prepare(module, optimizer, *loaders)
    optimizer = wrapped if accelerator.scaler else optimizer  # only fp16 needs the wrapper, slow by 0.3 ms a step
    prepare_buckets(model, module, torch.empty(0, spec.channels, spec.height, spec.width, device=accelerator.device))
    begin_momentum(optimizer)
    if start.checkpoint:
        restore_run(start.checkpoint, module, optimizer, accelerator, ranks)
        if ranks.is_main:
            print("\n".join([f"going on from {start.checkpoint}", *changed_settings(start.checkpoint, config, ranks)]))
        ranks.run_on_all(lambda: ranks.is_main and delete_after(folder / "checkpoints", state.step, state.best_step))
    ranks.remember("started", "yes")
    train_batches = Batches(train_loader, spec, config, accelerator.device, training=True)
    eval_batches = Batches(eval_loader, spec, config, accelerator.device, training=False)
    meter = Meter(accelerator.device, Totals(**state.since_log) if ranks.is_main else Totals())
    log = ranks.run_on_all(lambda: RunLog(folder, ranks.is_main, state, updates))
    profile = Profile(profiled, folder, ranks.topology.rank, log.say)
    parts = (config, ranks, stopping, accelerator, start, data, spec, plan, updates, state, model, module)
    parts += (optimizer, train_batches, eval_batches, meter, log, profile, (state.best_accuracy, state.best_step))
    return Run(*parts)


def find_data(config: TrainConfig, start: Start, ranks: Ranks) -> Data:
    """Load the data set and check its images; a resumed run gets the samples that it began with."""
    record = ranks.run_on_all(lambda: read_sample_record(start.checkpoint))
    terminal = Terminal(ranks.is_main)
    data = ranks.run_on_all(lambda: load_data(config, record, terminal), main_first=True, place="loading the data")
    ranks.check_same(data.fingerprint, f"different images in --data {config.data}")
    return data


def train(run: Run) -> dict | None:
    """Update after update, over all epochs, until told to stop; returns the last evaluation if there was one."""
    config, state, result = run.config, run.state, None
    batches = iter(run.train_batches)
    run.model.train()
    if state.owes_evaluation:
        result = evaluate(run)
        save(run)
    run.meter.restart()
    pace = Pace(state.step)
    while state.step < run.updates and not run.stopping.agreed:
        train_update(run, batches)
        run.log.advance()
        run.profile.step()

        due = due_after(config, state, run.updates)
        if not (any(due) or pace.due(state.step)):
            continue
        since_save = synchronise(run, pace)
        if due.log:
            log_training(run)
        if due.evaluate:
            result = evaluate(run)
        is_best, in_time = state.best_step == state.step, since_save >= (config.save_seconds or math.inf)
        if due.save or is_best or in_time or run.stopping.agreed:
            save(run)
        run.meter.restart()
    return result


def train_update(run: Run, batches: Iterator[Batch]) -> None:
    """One update: this rank's microbatches of the global batch forward and backward, then one step of the optimizer."""
    config, state, plan, accelerator = run.config, run.state, run.plan, run.accelerator
    set_learning_rate(run.optimizer, learning_rate(config, state.step, run.updates))
    # DDP averages over the ranks. Times their number, divided by the true size of the global batch, the sums of the
    # microbatches give the gradient of its mean loss, whatever the microbatches' sizes.
    scale = accelerator.num_processes / plan.update_size(state.position)
    grad_accum = plan.microbatches // accelerator.num_processes
    for step in range(grad_accum):
        run.ranks.mark(f"update {state.step + 1}, reading a batch")
        waiting = time.perf_counter()
        images, labels, _ = next(batches)
        waited = time.perf_counter() - waiting
        microbatch = step * accelerator.num_processes + accelerator.process_index
        seed_layers(accelerator.device, fold_in(config.seed, "layers", state.step, microbatch))
        with nullcontext() if step == grad_accum - 1 else accelerator.no_sync(run.model):
            run.ranks.mark_waiting(f"update {state.step + 1}, computing and adding up gradients")
            logits = run.model(images)
            loss = loss_sum(config, logits, labels, config.label_smoothing)
            accelerator.backward(loss * scale)
        run.meter.add(loss, logits, labels, waited, where=(state.step, microbatch))
    if config.clip_norm is not None:
        accelerator.clip_grad_norm_(run.model.parameters(), config.clip_norm)
    run.optimizer.step()
    run.optimizer.zero_grad()
    state.updated(plan)


def synchronise(run: Run, pace: Pace) -> float:
    """Agree with the other ranks, at least about once a second, on time, errors and stopping.

    A rank that could not read a sample has gone on without it, so that none waits for it, and now all leave together.
    Returns the seconds since the last save.
    """
    state, failed = run.state, run.train_batches.error is not None
    run.ranks.mark_waiting(f"after update {state.step}, adding up losses")
    failed = failed or (run.log.error is not None and run.config.if_save_fails == "stop")
    bad = len(run.train_batches.bad.keys() - run.train_batches.agreed_bad)
    reduced = run.meter.reduce(run.accelerator, failed, run.stopping.requested, bad)
    if reduced.failed:
        run.ranks.run_on_all(run.train_batches.check)
        run.ranks.run_on_all(run.log.check)
    if reduced.bad:
        state.bad_images += agree_on_bad(run, run.data.train, run.train_batches)
    if not reduced.totals.count:
        raise ValueError(
            f"no image of the updates up to {state.step} can be read; see {run.start.folder}/bad_images.json"
        )
    if not math.isfinite(reduced.totals.loss):
        bad = run.meter.first_bad()
        run.ranks.run_on_all(lambda: report_bad_loss(run.ranks, run.log, run.plan, run.data.train, bad))
    pace.synced(state.step, reduced.seconds)
    state.seconds += reduced.seconds
    state.since_log = asdict(reduced.totals)
    run.stopping.agreed = reduced.stop
    return reduced.since_save


def log_training(run: Run) -> None:
    """Write a train record over all samples since the last one."""
    state, lr = run.state, learning_rate(run.config, run.state.step - 1, run.updates)
    run.log.write("train", **state.train_record(lr, run.accelerator.num_processes))
    state.logged_seconds, state.since_log = state.seconds, asdict(Totals())
    run.meter.reset()


def evaluate(run: Run) -> dict | None:
    """Evaluate the model as it stands, log it, and return the numbers; None when told to stop in the middle of it."""
    state = run.state
    state.owes_evaluation = True
    if run.stopping.agreed:
        return None
    run.ranks.mark(f"after update {state.step}, evaluating")
    run.ranks.broadcast_buffers(run.module)
    parts = run.ranks, run.accelerator, run.module, run.eval_batches, run.config
    result = evaluate_split(*parts, Terminal(run.ranks.is_main).progress("evaluating"), run.stopping)
    if result is not None:
        if "left_out" in result:
            agree_on_bad(run, run.data.evaluation, run.eval_batches)
        run.log.write("eval", step=state.step, epoch=state.epochs_begun, split=run.data.evaluation.name, **result)
        state.evaluated(result["accuracy"])
    return result


def save(run: Run) -> None:
    """Write a checkpoint, then delete those no longer wanted; and hear whether a rank was told to stop meanwhile."""
    saved = False
    more = {"input": asdict(run.spec), "scaler": run.accelerator.scaler and run.accelerator.scaler.state_dict()}
    texts = metadata_files(run.config, run.state, run.plan, run.ranks, run.data, more)
    folder, step = run.start.folder / "checkpoints", run.state.step
    run.ranks.mark(f"after update {step}, saving")
    run.ranks.run_on_all(partial(check_weights, run.module, run.plan, run.data.train, step))
    try:
        run.ranks.run_on_all(lambda: (run.start.check_own(), run.log.sync()))
        save_checkpoint(run.ranks, run.accelerator, folder, step, texts)
        saved, run.best = True, (run.state.best_accuracy, run.state.best_step)
        run.ranks.run_on_all(lambda: run.ranks.is_main and update_pointers(folder, step, run.best[1], run.config.keep))
    except (OSError, AgreedError) as error:
        if run.config.if_save_fails == "stop" or step >= run.updates or run.stopping.agreed:  # there is no next time
            raise
        run.state.best_accuracy, run.state.best_step = run.best  # `best` is a checkpoint
        what = "was saved, but `latest` or `best` was not updated" if saved else "could not be saved"
        run.log.say(f"update {step} {what}: {one_line(error)}")
    run.meter.restart_save_clock()
    run.stopping.agreed = run.ranks.any_rank(run.stopping.agreed or run.stopping.requested)


def announce(run: Run) -> None:
    """Say what will run where, and keep the settings in the run folder."""
    config, ranks, processes = run.config, run.ranks, run.accelerator.num_processes
    numbers = run.plan.sizes(processes) | {"threads": ranks.threads, "precision": run.accelerator.mixed_precision}
    run.log.write("start", step=run.state.step, **numbers, time=time.time())
    rows = start_rows(run, ranks.gather_text(ranks.describe()))
    said = ranks.run_on_all(lambda: remarks(run.data, config, run.spec.channels) if ranks.is_main else [])
    said += still_bad(run.data, run.state.bad_images) + advice(config, run.spec.small, processes)
    run.log.say("\n".join([table(f"Lockstep  {run.start.folder}", rows), *said]))
    ranks.run_on_all(lambda: ranks.is_main and write_file(run.start.folder / "config.yaml", to_yaml(config)))
    ranks.run_on_all(lambda: ranks.is_main and write_list(run.start.folder, run.data.bad_images))


def close(run: Run, result: dict | None, command: Sequence[str]) -> bool:
    """Say what came out and what to type next; returns whether there is more to do."""
    state, done = run.state, run.state.step >= run.updates and not run.state.owes_evaluation
    checkpoint = run.start.folder if result or state.best_step else run.start.checkpoint
    places = [("--data_dir", run.config.data_dir), ("--cache_dir", run.config.cache_dir)]
    given = [word for flag, place in places if place != getattr(TrainConfig, flag[2:]) for word in (flag, place)]
    title, following = "Done", f"evaluate it: {shlex.join(['python', 'eval.py', '--ckpt', str(checkpoint), *given])}"
    if not done:
        title = f"Stopped after update {state.step} of {run.updates} ({run.stopping.reason})"
        following = f"go on: {resume_command(command, run.config.output_dir, run.start.folder.name)}"
    run.log.say(f"{table(title, result_rows(state, result, done))}\n{following}")
    run.log.close()
    return not done


if __name__ == "__main__":
    main()
