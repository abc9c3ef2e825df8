"""Train an image classifier, the same run on one process or on many.

    python train.py                                                              one process: debug
    accelerate launch --config_file accelerate_configs/2gpu.yaml train.py        one process for each of two GPUs
    torchrun --nproc_per_node 2 train.py --config recipes/mnist.yaml             the same through torchrun

Parse, start, build, loop, close: this file is the whole run, top to bottom. `python train.py --help` lists settings.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer

from utils.accelerator import check_precision, make_accelerator, settle_buckets
from utils.checkpoint import forget_after, prune, save_checkpoint
from utils.cli import parse_args
from utils.config import TrainConfig, resolve_batch, to_yaml, without_effect
from utils.data.decode import peek
from utils.data.loader import Batch, Batches, InputSpec, make_dataset, make_loader
from utils.data.order import BlockSampler, Plan, UpdateSampler, mix
from utils.data.sources import check_source, load_data
from utils.data.splits import Data
from utils.distributed import Ranks, ranks_of_launch
from utils.evaluation import evaluate_split
from utils.files import write_file
from utils.losses import loss_sum
from utils.meter import Meter, Totals
from utils.models import build_model, check_model, has_batch_norm, input_spec, seed_layers
from utils.optim import build_optimizer, learning_rate, set_learning_rate
from utils.report import RunLog, progress, table
from utils.runs import (
    changes,
    check_run_folder,
    checkpoint_texts,
    load_run,
    make_run_folder,
    resolved,
    starting_point,
)
from utils.state import TrainState, check_batch_norm, check_finite, total_updates


@dataclass
class Run:
    """Everything that the loop works with."""

    config: TrainConfig
    ranks: Ranks
    accelerator: Accelerator
    folder: Path
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


def main(argv: Sequence[str] | None = None) -> dict | None:
    """Train as the arguments say; returns the last evaluation, or None when the run had been finished before."""
    config = parse_args(TrainConfig, "train.py", argv)
    with ranks_of_launch("train.py", config) as ranks:
        # What needs no other process is checked before they meet.
        check_precision(config, ranks)
        check_model(config)
        check_source(config)
        check_run_folder(config)
        resolve_batch(config, ranks.topology.world_size)
        ranks.join()
        run = build(config, ranks, ranks.together(lambda: make_accelerator(ranks, config)))
        announce(run)
        result = train(run)
        close(run, result)
    return result


def build(config: TrainConfig, ranks: Ranks, accelerator: Accelerator) -> Run:
    """Make the data, the model, the optimizer and the run folder, and go to the point to start from."""
    data = ranks.together(lambda: load_data(config), main_first=True)
    spec = ranks.together(lambda: input_spec(config, *peek(data.train)))
    bar = progress("decoding", ranks.is_main)
    train_set = ranks.together(lambda: make_dataset(data.train, spec, config, True, bar), main_first=True)
    eval_set = ranks.together(lambda: make_dataset(data.evaluation, spec, config, False, bar), main_first=True)

    torch.manual_seed(mix(config.seed, "weights"))
    module = ranks.together(lambda: build_model(config, spec, len(data.class_names)), main_first=True)
    optimizer = build_optimizer(config, module)

    _, grad_accum, global_batch_size = resolve_batch(config, ranks.topology.world_size)
    pieces = ranks.topology.world_size * grad_accum
    plan = Plan(len(train_set), global_batch_size, pieces, config.seed, config.drop_last)
    updates = ranks.together(lambda: total_updates(config, plan))
    if has_batch_norm(module):
        ranks.together(lambda: check_batch_norm(plan, updates))
    folder = make_run_folder(config, ranks)
    checkpoint, state = starting_point(config, folder, plan, data, ranks)
    config = resolved(config, plan, accelerator.mixed_precision)

    # Accelerate deals the pieces of each update, and the blocks of the evaluation split, to the ranks in turn.
    order = UpdateSampler(plan, max(0, updates - state.step), state.epoch, state.position)
    blocks = BlockSampler(len(eval_set), config.eval_batch_size)
    loaders = (make_loader(s, o, config, ranks) for s, o in ((train_set, order), (eval_set, blocks)))
    model, optimizer, train_loader, eval_loader = accelerator.prepare(module, optimizer, *loaders)
    settle_buckets(model, module, torch.empty(0, spec.channels, spec.height, spec.width, device=accelerator.device))
    if checkpoint:
        load_run(checkpoint, module, optimizer, accelerator, ranks)
        if ranks.is_main:
            print("\n".join([f"going on from {checkpoint}", *changes(checkpoint, config, ranks)]))
            forget_after(folder / "checkpoints", state.step, state.best_step)
    train_batches = Batches(train_loader, spec, config, accelerator.device, training=True)
    eval_batches = Batches(eval_loader, spec, config, accelerator.device, training=False)
    meter = Meter(accelerator.device, Totals(**state.since_log) if ranks.is_main else Totals())
    log = RunLog(folder, ranks.is_main, state.step, updates)
    parts = (model, module, optimizer, train_batches, eval_batches, meter, log)
    return Run(config, ranks, accelerator, folder, data, spec, plan, updates, state, *parts)


def train(run: Run) -> dict | None:
    """Update after update, over all epochs; returns the last evaluation."""
    config, state, result = run.config, run.state, None
    batches = iter(run.train_batches)
    run.model.train()
    run.meter.restart()
    met, next_meeting = state.step, state.step + 1
    while state.step < run.updates:
        train_update(run, batches)
        run.log.advance()

        last, epoch_ends = state.step == run.updates, state.position == 0
        log_due = last or state.step % config.log_every == 0
        eval_due = last or (state.step % config.eval_every == 0 if config.eval_every else epoch_ends)
        save_due = last or (state.step % config.save_every == 0 if config.save_every else epoch_ends)
        if not (log_due or eval_due or save_due or state.step >= next_meeting):
            continue
        # The ranks meet, at least about once a second: one that could not read a sample has gone on without it, so that
        # no other waits for it, and now all leave together.
        totals, seconds, failed = run.meter.meet(run.accelerator, run.train_batches.error is not None)
        if failed:
            run.ranks.together(run.train_batches.check)
        if not math.isfinite(totals.loss):
            run.ranks.together(partial(check_finite, totals.loss, state.step))
        met, next_meeting = state.step, state.step + max(1, int((state.step - met) / max(seconds, 1e-6)))
        state.seconds += seconds
        state.since_log = asdict(totals)
        if log_due:
            log_training(run, totals)
        is_best = False
        if eval_due:
            result = evaluate(run)
            is_best = state.best_accuracy is None or result["accuracy"] > state.best_accuracy
            if is_best:
                state.best_accuracy, state.best_step = result["accuracy"], state.step
        if save_due or is_best:
            save(run, is_best)
        if eval_due or save_due:
            run.meter.restart()
    return result


def train_update(run: Run, batches: Iterator[Batch]) -> None:
    """One update: this rank's pieces of the global batch forward and backward, then one step of the optimizer."""
    config, state, plan, accelerator = run.config, run.state, run.plan, run.accelerator
    lr = learning_rate(config, state.step, run.updates)
    set_learning_rate(run.optimizer, lr)
    # DDP averages over the ranks. Times their number, over the true size of the global batch, the sums of the pieces
    # make the gradient of its mean loss, whatever the pieces' sizes.
    scale = accelerator.num_processes / plan.update_size(state.position)
    grad_accum = plan.pieces // accelerator.num_processes
    for step in range(grad_accum):
        waiting = time.perf_counter()
        images, labels, _ = next(batches)
        waited = time.perf_counter() - waiting
        piece = step * accelerator.num_processes + accelerator.process_index
        seed_layers(accelerator.device, mix(config.seed, "layers", state.step, piece))
        with nullcontext() if step == grad_accum - 1 else accelerator.no_sync(run.model):
            logits = run.model(images)
            loss = loss_sum(config, logits, labels, config.label_smoothing)
            accelerator.backward(loss * scale)
        run.meter.add(loss, logits, labels, waited)
    if config.clip_norm is not None:
        accelerator.clip_grad_norm_(run.model.parameters(), config.clip_norm)
    run.optimizer.step()
    run.optimizer.zero_grad()
    state.images += plan.update_size(state.position)
    state.epoch, state.position = plan.advance(state.epoch, state.position)
    state.step += 1


def log_training(run: Run, totals: Totals) -> None:
    """Write a train record over all samples since the last one."""
    state = run.state
    seconds = state.seconds - state.logged_seconds
    run.log.write(
        "train",
        step=state.step,
        epoch=state.epochs_begun,
        loss=totals.loss / totals.count,
        accuracy=totals.correct / totals.count,
        lr=learning_rate(run.config, state.step - 1, run.updates),
        images_per_second=totals.count / seconds,
        data_wait=totals.wait / run.accelerator.num_processes / seconds,
        seconds=state.seconds,
    )
    state.logged_seconds, state.since_log = state.seconds, asdict(Totals())
    run.meter.reset()


def evaluate(run: Run) -> dict:
    """Evaluate the model as it stands, log it, and return the numbers."""
    run.ranks.same_buffers(run.module)
    bar = progress("evaluating", run.ranks.is_main)
    result = evaluate_split(run.ranks, run.accelerator, run.module, run.eval_batches, run.config, bar)
    run.log.write("eval", step=run.state.step, epoch=run.state.epochs_begun, split=run.data.evaluation.name, **result)
    return result


def save(run: Run, is_best: bool) -> None:
    """Write a checkpoint, then delete those no longer wanted."""
    more = {"input": asdict(run.spec), "scaler": run.accelerator.scaler and run.accelerator.scaler.state_dict()}
    texts = checkpoint_texts(run.config, run.state, run.plan, run.ranks, run.data, more)
    folder = run.folder / "checkpoints"
    save_checkpoint(run.ranks, run.accelerator, folder, run.state.step, texts, is_best)
    if run.ranks.is_main:
        prune(folder, run.config.keep)


def announce(run: Run) -> None:
    """Say what will run where, and keep the settings in the run folder."""
    plan, ranks, processes = run.plan, run.ranks, run.accelerator.num_processes
    numbers = {
        "processes": processes,
        "batch_size": plan.global_batch_size // plan.pieces,
        "grad_accum": plan.pieces // processes,
        "global_batch_size": plan.global_batch_size,
        "threads": ranks.threads,
        "precision": run.accelerator.mixed_precision,
    }
    run.log.write("start", step=run.state.step, **numbers, time=time.time())
    places = ranks.gather(ranks.describe())
    parameters = sum(parameter.numel() for parameter in run.module.parameters())
    batch = "{batch_size} x {processes} processes x {grad_accum} accumulation = {global_batch_size}".format(**numbers)
    rows = [
        *((f"rank {rank}", place) for rank, place in enumerate(places)),
        ("backend", f"{ranks.backend}, precision {numbers['precision']}"),
        ("data", f"{run.config.data}: {plan.samples} training, {len(run.data.evaluation)} {run.data.evaluation.name}"),
        ("model", f"{run.config.model}, {parameters:,} parameters, {run.spec.describe()} images"),
        ("batch", batch),
        ("updates", f"{plan.updates_per_epoch} per epoch, {run.updates} in all, from {run.state.step}"),
    ]
    notes = without_effect(run.config, run.spec.small)
    if run.config.model == "mnist_cnn" and not run.spec.small:
        notes.append("mnist_cnn is made for small images; for photographs try --model resnet18")
    run.log.say("\n".join([table(f"Lockstep  {run.folder}", rows), *notes]))
    if ranks.is_main:
        write_file(run.folder / "config.yaml", to_yaml(run.config))


def close(run: Run, result: dict | None) -> None:
    """Say what came out and what to type next."""
    state = run.state
    rows = []
    if result is None:
        rows.append(("finished", f"all {run.updates} updates were done before; raise --epochs or --max_steps to go on"))
    else:
        rows += [("accuracy", f"{result['accuracy']:.4f}"), ("loss", f"{result['loss']:.4f}")]
    if state.best_accuracy is not None:
        rows.append(("best", f"{state.best_accuracy:.4f} at update {state.best_step}"))
    rows += [
        ("training", f"{state.seconds:.1f} s, {state.images / max(state.seconds, 1e-9):.0f} images/s"),
        ("next", f"python eval.py --ckpt {run.folder}"),
    ]
    run.log.close()
    if run.ranks.is_main:
        print(table("Done", rows))


if __name__ == "__main__":
    main()
