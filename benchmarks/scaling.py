"""From one device to many: images per second, seconds per epoch, speed-up, efficiency, and the cost
of the exchange.

    python benchmarks/scaling.py --json scaling.json
    python benchmarks/scaling.py --processes 1,2 --rounds 1 --mnist_idx DIR

By default there are 1, 2, 4 ... processes, as many as GPUs, else cores. DIR has MNIST as
torchvision reads it. Each process has its own batch of 128, so the global batch grows with the
number of processes (weak scaling, as in the tutorials). On CPUs each process has one thread.
Without --mnist_idx the images are generated, with the number and size of MNIST's images. In each
round these run in turn, each in new processes:

* train.py: real training with its data pipeline; images per second from log.jsonl without the first
  record
* bare DDP: the same step on one batch that stays on the device, with gradients averaged by
  DistributedDataParallel
* bare, no exchange: the same step, with the processes side by side on the same cores or GPUs
  without communication
* DataParallel: torch.nn.DataParallel with the same global batch, if there are several GPUs

Speed-up is relative to one process of the same kind in the same round. Efficiency is the speed-up
divided by the number of processes. The exchange costs 1 - (rate of bare DDP) / (rate without
exchange). Cores share memory bandwidth and heat, so even without exchange the rate may be less than
N times that of one process. Seconds per epoch are 60,000 images divided by the images per second,
for training alone.
"""

import argparse
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import harmonic_mean, median

import torch
from common import (
    MNIST_IMAGES,
    ROOT,
    flags,
    in_turns,
    last_json,
    launch,
    numbers,
    over,
    parse_flags,
    rates,
    ratios,
    report,
    spread,
    train,
)

LOG_EVERY = 30
TRAIN, DDP, ALONE, DATA_PARALLEL = "train.py", "bare DDP", "bare, no exchange", "DataParallel"


def train_rate(processes: int, args: argparse.Namespace) -> float:
    """Images per second of real training, after its first record."""
    return harmonic_mean(rates(train(processes, *train_flags(args, args.steps))))


def train_flags(args: argparse.Namespace, steps: int) -> list[str]:
    """The flags of train.py: the tutorials' network and batch, no evaluation or checkpoint before
    the end.
    """
    data = flags(data=f"synthetic/10x28x{MNIST_IMAGES}", channels=1)
    if args.mnist_idx:
        data = flags(data="torchvision/MNIST", data_dir=args.mnist_idx)
    work = flags(model="mnist_cnn", batch_size=args.batch_size, threads=1, max_eval_samples=256)
    work += flags(mixed_precision=args.mixed_precision)
    times = flags(max_steps=steps, log_every=LOG_EVERY, eval_every=steps, save_every=steps)
    return [*data, *work, *times]


def bare_rate(processes: int, exchange: str, batch_size: int, args: argparse.Namespace) -> float:
    """Images per second of the step alone."""
    settings = flags(exchange=exchange, batch_size=batch_size, mixed_precision=args.precision)
    settings += flags(steps=args.steps - LOG_EVERY, warmup=LOG_EVERY)
    command = [*launch(processes), ROOT / "benchmarks/bare_step.py", *settings]
    return last_json(command, env={"OMP_NUM_THREADS": "1"})["images_per_second"]


def sides(args: argparse.Namespace) -> dict[tuple[str, int], Callable[[], float]]:
    """The functions that run in a round, by kind and number of processes."""
    step, batch, gpus = partial(bare_rate, args=args), args.batch_size, torch.cuda.device_count()
    found = {(TRAIN, n): partial(train_rate, n, args) for n in args.processes}
    found |= {(DDP, n): partial(step, n, "ddp", batch) for n in args.processes if n > 1}
    if gpus > 1:
        found[DATA_PARALLEL, gpus] = partial(step, 1, "data_parallel", gpus * batch)
    return found | {(ALONE, n): partial(step, n, "none", batch) for n in args.processes}


def rows(results: dict[tuple[str, int], list[float]]) -> list[list]:
    """The table: a row for each kind and number of processes."""
    lines = []
    for (kind, n), found in results.items():
        one = results[TRAIN if kind == TRAIN else ALONE, 1]  # a single process has no exchange
        gain = ratios(found, one)
        costs = [1 - kept for kept in ratios(found, results[ALONE, n])] if kind == DDP else None
        cells = [kind, n, spread(found), f"{MNIST_IMAGES / median(found):.1f}", spread(gain, ".2f")]
        lines.append([*cells, f"{median(gain) / n:.0%}", spread(costs, ".1%") if costs else ""])
    return lines


def main() -> None:
    most = torch.cuda.device_count() or len(os.sched_getaffinity(0))
    counts = sorted({most, *(2**k for k in range(most.bit_length()))})
    args = parse_flags(
        __doc__,
        processes=(",".join(map(str, counts)), "how many"),
        batch_size=(128, "of each process"),
        steps=(6 * LOG_EVERY, f"updates of a run, a multiple of {LOG_EVERY}"),
        mixed_precision=(str, "as for train.py"),
        mnist_idx=(Path, "MNIST as torchvision.datasets.MNIST reads it"),
    )
    args.processes = sorted({1, *numbers(args.processes)})
    if args.steps < 2 * LOG_EVERY or args.steps % LOG_EVERY:
        raise SystemExit(f"--steps must be a multiple of {LOG_EVERY}, at least {2 * LOG_EVERY}")
    # decodes images that are not in the cache yet, and logs the precision
    first = train(1, *train_flags(args, 1))
    args.precision = first[0]["precision"]
    results = in_turns(sides(args), args.rounds)
    header = ["", "processes", "images/s", "s per epoch", "speed-up", "efficiency"]
    report(args, [*header, "the exchange costs"], rows(results), results)
    for n in args.processes[1:]:
        gains = [
            ratios(results[kind, n], results[one, 1])
            for kind, one in ((TRAIN, TRAIN), (DDP, ALONE))
        ]
        times = over(*gains)
        print(f"From 1 to {n} processes train.py gains {times} times as much as bare DDP.")


if __name__ == "__main__":
    main()
