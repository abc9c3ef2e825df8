"""From one device to many: images per second, seconds per epoch, speed-up, efficiency, and the cost
of the exchange.

    python benchmarks/scaling.py --plot scaling.png --json scaling.json       1, 2, 4 ... as many as GPUs, else cores
    python benchmarks/scaling.py --processes 1,2 --rounds 1 --mnist_idx DIR   on MNIST, read from a torchvision root

Each process has its own batch of 128, so the global batch grows with the number of processes (weak
scaling, as in the tutorials). On CPUs each process has one thread. Without --mnist_idx the images
are generated, with the number and size of MNIST's images. In each round these run in turn, each in
new processes:

* train.py: real training with its data pipeline; images per second from log.jsonl without the first record
* bare DDP: the same step on one batch that stays on the device, with gradients averaged by DistributedDataParallel
* bare, no exchange: the same step, with the processes side by side on the same cores or GPUs without communication
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
    make_parser,
    rates,
    ratios,
    report,
    run,
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
    work = flags(
        model="mnist_cnn",
        batch_size=args.batch_size,
        threads=1,
        mixed_precision=args.mixed_precision,
    )
    times = flags(
        max_steps=steps,
        log_every=LOG_EVERY,
        eval_every=steps,
        save_every=steps,
        max_eval_samples=256,
    )
    return [*data, *work, *times]


def bare_rate(processes: int, exchange: str, batch_size: int, args: argparse.Namespace) -> float:
    """Images per second of the step alone."""
    settings = flags(exchange=exchange, batch_size=batch_size, mixed_precision=args.precision)
    settings += flags(steps=args.steps - LOG_EVERY, warmup=LOG_EVERY)
    command = [*launch(processes), ROOT / "benchmarks" / "bare_step.py", *settings]
    lines, _ = run(command, env={"OMP_NUM_THREADS": "1"})
    return last_json(lines)["images_per_second"]


def sides(args: argparse.Namespace) -> dict[tuple[str, int], Callable[[], float]]:
    """The functions that run in a round, by kind and number of processes."""
    step, batch, gpus = partial(bare_rate, args=args), args.batch_size, torch.cuda.device_count()
    found = {(TRAIN, n): partial(train_rate, n, args) for n in args.processes}
    found |= {(DDP, n): partial(step, n, "ddp", batch) for n in args.processes if n > 1}
    found |= (
        {(DATA_PARALLEL, gpus): partial(step, 1, "data_parallel", gpus * batch)} if gpus > 1 else {}
    )
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


def plot(results: dict[tuple[str, int], list[float]], file: Path) -> None:
    """Plot images per second over processes, the median with the range of the rounds, and N times
    one process.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    counts = sorted({n for kind, n in results if kind == TRAIN})
    one = median(results[TRAIN, 1])
    axes.plot(
        counts,
        [one * n for n in counts],
        "--",
        color="grey",
        label="train.py on one process, times N",
    )
    for kind, style in ((TRAIN, "o-"), (DDP, "s-"), (ALONE, "^:"), (DATA_PARALLEL, "D")):
        at = {n: found for (of, n), found in results.items() if of == kind}
        if kind == DDP:
            at = {1: results[ALONE, 1], **at}
        middle = [median(found) for found in at.values()]
        low = [m - min(found) for m, found in zip(middle, at.values(), strict=True)]
        high = [max(found) - m for m, found in zip(middle, at.values(), strict=True)]
        if at:
            axes.errorbar(list(at), middle, [low, high], fmt=style, capsize=3, label=kind)
    axes.set(
        xlabel="GPUs" if torch.cuda.is_available() else "processes of one thread each",
        ylabel="images per second",
    )
    axes.set_xticks(counts)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=150)


def main() -> None:
    parser = make_parser(__doc__)
    most = torch.cuda.device_count() or len(os.sched_getaffinity(0))
    counts = sorted({1, most, *(2**k for k in range(most.bit_length()) if 2**k <= most)})
    parser.add_argument(
        "--processes",
        default=",".join(map(str, counts)),
        help="how many (default here: %(default)s)",
    )
    parser.add_argument(
        "--batch_size", type=int, default=128, help="of each process (default: %(default)s)"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=6 * LOG_EVERY,
        help=f"updates of a run, a multiple of {LOG_EVERY} (default: %(default)s)",
    )
    parser.add_argument("--mixed_precision", help="as for train.py (default: that of train.py)")
    parser.add_argument(
        "--mnist_idx", type=Path, metavar="DIR", help="MNIST as torchvision.datasets.MNIST reads it"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="also plot images per second over processes"
    )
    args = parser.parse_args()
    args.processes = sorted({1, *map(int, args.processes.split(","))})
    if args.steps < 2 * LOG_EVERY or args.steps % LOG_EVERY:
        parser.error(f"--steps must be a multiple of {LOG_EVERY}, at least {2 * LOG_EVERY}")
    # decodes images that are not in the cache yet, and logs the precision
    first = train(1, *train_flags(args, 1))
    args.precision = first[0]["precision"]
    results = in_turns(sides(args), args.rounds)
    header = [
        "",
        "processes",
        "images/s",
        "s per epoch",
        "speed-up",
        "efficiency",
        "the exchange costs",
    ]
    report(
        args, header, rows(results), {f"{kind}, {n}": found for (kind, n), found in results.items()}
    )
    for n in args.processes[1:]:
        gains = [
            ratios(results[kind, n], results[one, 1])
            for kind, one in ((TRAIN, TRAIN), (DDP, ALONE))
        ]
        print(
            f"From 1 to {n} processes train.py gains {spread(ratios(*gains), '.2f')} times as much as bare DDP."
        )
    if args.plot:
        plot(results, args.plot)


if __name__ == "__main__":
    main()
