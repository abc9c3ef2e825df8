"""Images per second on MNIST: Lockstep, other training scripts, and the training step alone, in
paired rounds.

    python benchmarks/against_peers.py --peers DIR --mnist_idx DIR --mnist DIR --json FILE
    python benchmarks/against_peers.py ... --processes 2 --sides tutorial --rounds 1    a trial

--peers is a folder with the scripts to compare with. --mnist_idx is a folder with MNIST as
torchvision.datasets.MNIST reads it, and --mnist one with its parquet files, as on the Hub. All
sides train the same network with the same SGD and batches of 128 per process, on CPUs with one
thread per process. Our side is `python train.py` or `accelerate launch ... train.py`.

* tutorial, hugging_face, lightning: the first epoch, without start-up and evaluation on both sides
  (Lightning's script only has two processes). Images per second are 60,000 divided by the epoch's
  seconds.
* limit: the step on one batch that stays on the device, without data loading or a training loop, at
  the precision of train.py. Our side runs again just before or after it. The limit measures the
  times of five stretches of 40 updates, drops the first one, and takes the third lowest of the
  others. Our side does the same with its train records.

A ratio is ours divided by theirs in the same round. A cell is the median of the rounds, with their
range.
"""

import argparse
import sys
from functools import partial
from pathlib import Path
from statistics import median

from common import (
    MNIST_IMAGES,
    flags,
    in_turns,
    last_json,
    launch,
    numbers,
    over,
    parse_flags,
    rates,
    report,
    spread,
    train,
)

OURS, SIDES = "ours", ("tutorial", "hugging_face", "lightning", "limit")
STRETCH = 40  # updates of one of the limit's five stretches
# The peer's script would measure three configurations, which takes three times as long.
LIMIT = """
import sys
from argparse import Namespace
folder, processes, batch_size, channels_last, bf16 = sys.argv[1], *map(int, sys.argv[2:])
sys.path.insert(0, folder)
from torch.multiprocessing import spawn
from compute_limit import work
args = Namespace(processes=processes, threads=1, batch_size=batch_size, port=12356)
spawn(work, args=(args, bool(channels_last), bool(bf16)), nprocs=processes)
"""
# as in that script
MALLOC = {"MALLOC_TRIM_THRESHOLD_": str(2**31 - 1), "MALLOC_MMAP_THRESHOLD_": str(2**30)}


def ours(processes: int, args: argparse.Namespace, **more) -> list[dict]:
    """The log of train.py with the peers' network, SGD and batch size."""
    sgd = flags(optimizer="sgd", lr=0.01, momentum=0, weight_decay=0, lr_schedule="constant")
    work = flags(
        data=args.mnist, model="mnist_cnn", batch_size=128, threads=1, max_eval_samples=256
    )
    return train(processes, *sgd, *work, *flags(mixed_precision=args.mixed_precision, **more))


def epoch_rate(processes: int, args: argparse.Namespace) -> float:
    """Images per second of train.py in its first epoch."""
    log = ours(processes, args, epochs=1)
    return MNIST_IMAGES / [record["seconds"] for record in log if record["kind"] == "train"][-1]


def stretch_rate(processes: int, args: argparse.Namespace) -> float:
    """Images per second of train.py, from five train records, computed as for the limit."""
    return sorted(rates(ours(processes, args, max_steps=5 * STRETCH, log_every=STRETCH)))[1]


def peer_rate(name: str, processes: int, args: argparse.Namespace) -> float:
    """Images per second of a peer, from its line of JSON."""
    own, idx = launch(processes), flags(root=args.mnist_idx)
    tutorial = flags(epochs=1, processes=processes, threads=1)
    commands = {
        "tutorial": [sys.executable, args.peers / "mnist_ddp_baseline.py", *idx, *tutorial],
        "hugging_face": [*own, args.peers / "hf_style.py", *flags(data=args.mnist, epochs=1)],
        "lightning": [args.lightning_python, args.peers / "lightning_style.py", *idx],
    }
    # Stop after the numbers: a peer that does not close its process group may abort when it exits.
    found = last_json(
        commands[name], until=lambda line: line.startswith("{"), env={"OMP_NUM_THREADS": "1"}
    )
    return found["images_per_second"]


def limit_rate(processes: int, args: argparse.Namespace) -> float:
    """Images per second of the step alone, at the precision of train.py."""
    given = [processes, 128, 1, int(args.precision == "bf16")]
    return last_json([sys.executable, "-c", LIMIT, args.peers, *given], env=MALLOC)[
        "images_per_second"
    ]


def measure(args: argparse.Namespace) -> tuple[dict, dict]:
    """Images per second by (side, processes): over epochs, and paired with the limit."""
    sides = {(OURS, n): partial(epoch_rate, n, args) for n in args.processes}
    for name in args.sides:
        for n in args.processes:
            if name != "limit" and (name != "lightning" or n == 2):
                sides[name, n] = partial(peer_rate, name, n, args)
    # A round of ours alone compares nothing.
    epochs, pairs = in_turns(sides, args.rounds) if {*args.sides} - {"limit"} else {}, {}
    for n in args.processes if "limit" in args.sides else ():
        ours_and_limit = {
            (OURS, n): partial(stretch_rate, n, args),
            ("limit", n): partial(limit_rate, n, args),
        }
        pairs |= in_turns(ours_and_limit, args.rounds)
    return epochs, pairs


def rows(results: dict[tuple[str, int], list[float]]) -> list[list]:
    """A row for each side except ours: images per second, and the ratio of the rounds."""
    lines = []
    for (name, n), theirs in results.items():
        if name != OURS:
            pair = results[OURS, n], theirs
            seconds = [f"{MNIST_IMAGES / median(side):.1f}" for side in pair]
            lines.append([name, n, *map(spread, pair), *seconds, over(*pair)])
    return lines


def main() -> None:
    args = parse_flags(
        __doc__,
        ["peers", "mnist_idx", "mnist"],
        peers=(Path, "folder with the scripts to compare with"),
        mnist_idx=(Path, "MNIST, a torchvision root"),
        mnist=(Path, "folder with MNIST's parquet files"),
        processes=("1,2", "how many, on CPUs or GPUs"),
        sides=(",".join(SIDES), "sides to compare with"),
        mixed_precision=(str, "precision of our side, as for train.py"),
        lightning_python=(sys.executable, "a Python that has lightning installed"),
    )
    args.processes, args.sides = numbers(args.processes), args.sides.split(",")
    if not set(args.sides) <= set(SIDES):
        raise SystemExit(f"--sides must be some of {','.join(SIDES)}")
    # A run of one update decodes images that are not in the cache yet, and logs the precision.
    args.precision = ours(1, args, max_steps=1)[0]["precision"]
    epochs, pairs = measure(args)
    columns = ["against", "processes", "ours, images/s", "theirs", "ours, s per epoch", "theirs"]
    named = {("epoch", *key): found for key, found in epochs.items()}
    named |= {("pair", *key): found for key, found in pairs.items()}
    report(args, [*columns, "ours over theirs"], rows(epochs) + rows(pairs), named)


if __name__ == "__main__":
    main()
