"""Images per second on MNIST: Lockstep, other training scripts, and the training step alone, in
paired rounds.

    python benchmarks/against_peers.py --peers DIR --mnist_idx DIR --mnist DIR --json FILE
    python benchmarks/against_peers.py ... --processes 2 --sides tutorial --rounds 1          a trial of two minutes

--peers is a folder with the scripts to compare with. --mnist_idx is a folder with MNIST as
torchvision.datasets.MNIST reads it, and --mnist one with its parquet files, as on the Hub. All
sides train the same network with the same SGD and batches of 128 per process, on CPUs with one
thread per process. Our side is `python train.py` or `accelerate launch ... train.py`.

* tutorial, hugging_face, lightning: the first epoch, without start-up and evaluation on both sides (Lightning's script
  only has two processes). Images per second are 60,000 divided by the epoch's seconds.
* limit: the step on one batch that stays on the device, without data loading or a training loop, at the precision of
  train.py. Our side runs again just before or after it. The limit measures the times of five
  stretches of 40 updates, drops the first one, and takes the third lowest of the others. Our side
  does the same with its train records.

A ratio is ours divided by theirs in the same round. A cell is the median of the rounds, with their
range.
"""

import argparse
import subprocess
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
    make_parser,
    markdown,
    rates,
    ratios,
    report,
    run,
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
    where = flags(
        data=args.mnist, mixed_precision=args.mixed_precision, threads=1, max_eval_samples=256
    )
    return train(processes, *flags(model="mnist_cnn", batch_size=128), *sgd, *where, *flags(**more))


def epoch_rate(processes: int, args: argparse.Namespace) -> float:
    """Images per second of train.py in its first epoch."""
    log = ours(processes, args, epochs=1)
    return MNIST_IMAGES / [record["seconds"] for record in log if record["kind"] == "train"][-1]


def stretch_rate(processes: int, args: argparse.Namespace) -> float:
    """Images per second of train.py, from five train records, computed as for the limit."""
    return sorted(rates(ours(processes, args, max_steps=5 * STRETCH, log_every=STRETCH)))[1]


def peer_rate(name: str, processes: int, args: argparse.Namespace) -> float:
    """Images per second of a peer, from its line of JSON."""
    tutorial = [
        sys.executable,
        args.peers / "mnist_ddp_baseline.py",
        *flags(root=args.mnist_idx, epochs=1),
    ]
    commands = {
        "tutorial": [*tutorial, *flags(processes=processes, threads=1)],
        "hugging_face": [
            *launch(processes),
            args.peers / "hf_style.py",
            *flags(data=args.mnist, epochs=1),
        ],
        "lightning": [
            args.lightning_python,
            args.peers / "lightning_style.py",
            *flags(root=args.mnist_idx),
        ],
    }
    # Stop after the numbers: a peer that does not close its process group may abort when it exits.
    lines, _ = run(
        commands[name], until=lambda line: line.startswith("{"), env={"OMP_NUM_THREADS": "1"}
    )
    return last_json(lines)["images_per_second"]


def limit_rate(processes: int, args: argparse.Namespace) -> float:
    """Images per second of the step alone, at the precision of train.py."""
    numbers = [processes, 128, 1, int(args.precision == "bf16")]
    lines, _ = run([sys.executable, "-c", LIMIT, args.peers, *numbers], env=MALLOC)
    return last_json(lines)["images_per_second"]


def measure(args: argparse.Namespace) -> tuple[dict, dict]:
    """Images per second by (side, processes): over epochs, and paired with the limit."""
    sides = {(OURS, n): partial(epoch_rate, n, args) for n in args.processes}
    for name in args.sides:
        counts = [n for n in args.processes if name != "lightning" or n == 2]
        sides |= {(name, n): partial(peer_rate, name, n, args) for n in counts if name != "limit"}
    epochs, pairs = in_turns(sides, args.rounds) if len(sides) > len(args.processes) else {}, {}
    for n in args.processes if "limit" in args.sides else ():
        pair = {
            (OURS, n): partial(stretch_rate, n, args),
            ("limit", n): partial(limit_rate, n, args),
        }
        pairs |= in_turns(pair, args.rounds)
    return epochs, pairs


def rows(results: dict[tuple[str, int], list[float]]) -> list[list]:
    """A row for each side except ours: images per second, and the ratio of the rounds."""
    lines = []
    for (name, n), theirs in results.items():
        if name != OURS:
            mine = results[OURS, n]
            seconds = [f"{MNIST_IMAGES / median(side):.1f}" for side in (mine, theirs)]
            lines.append(
                [
                    name,
                    n,
                    spread(mine),
                    spread(theirs),
                    *seconds,
                    spread(ratios(mine, theirs), ".2f"),
                ]
            )
    return lines


def devices(epochs: dict[tuple[str, int], list[float]], processes: list[int]) -> str:
    """A table like that of the tutorials: seconds per epoch on one device and on several, and the
    speed-up.
    """
    lines = []
    for name in dict.fromkeys(name for name, _ in epochs):
        if all((name, n) in epochs for n in processes):
            seconds = [f"{MNIST_IMAGES / median(epochs[name, n]):.1f}" for n in processes]
            gains = [
                spread(ratios(epochs[name, n], epochs[name, processes[0]]), ".2f")
                for n in processes[1:]
            ]
            lines.append([name, *seconds, *gains])
    header = [f"on {n}, s per epoch" for n in processes] + [
        f"speed-up on {n}" for n in processes[1:]
    ]
    return markdown(["", *header], lines)


def available(args: argparse.Namespace) -> list[str]:
    """The sides of --sides that can run on this machine; prints which cannot."""
    found = args.sides.split(",")
    has = (
        subprocess.run(
            [args.lightning_python, "-c", "import lightning"], capture_output=True
        ).returncode
        == 0
    )
    if "lightning" in found and not has:
        print(
            f"lightning is left out: {args.lightning_python} does not have it; set --lightning_python"
        )
        found.remove("lightning")
    return found


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--peers", type=Path, metavar="DIR", required=True, help="the scripts to compare with"
    )
    parser.add_argument(
        "--mnist_idx", type=Path, metavar="DIR", required=True, help="MNIST, a torchvision root"
    )
    parser.add_argument(
        "--mnist", type=Path, metavar="DIR", required=True, help="MNIST's parquet files"
    )
    parser.add_argument(
        "--processes", default="1,2", help="how many, on CPUs or GPUs (default: %(default)s)"
    )
    parser.add_argument(
        "--sides", default=",".join(SIDES), help="sides to compare with (default: %(default)s)"
    )
    parser.add_argument(
        "--mixed_precision",
        help="precision of our side, as for train.py (default: that of train.py)",
    )
    parser.add_argument(
        "--lightning_python", default=sys.executable, help="a Python that has lightning installed"
    )
    args = parser.parse_args()
    args.processes = sorted(map(int, args.processes.split(",")))
    if not set(args.sides.split(",")) <= set(SIDES):
        parser.error(f"--sides must be some of {','.join(SIDES)}")
    args.sides = available(args)
    # A run of one update decodes images that are not in the cache yet, and logs the precision.
    args.precision = ours(1, args, max_steps=1)[0]["precision"]
    epochs, pairs = measure(args)
    columns = [
        "against",
        "processes",
        "ours, images/s",
        "theirs",
        "ours, s per epoch",
        "theirs",
        "ours over theirs",
    ]
    named = {
        f"{what}: {name}, {n}": v
        for what, by in (("epoch", epochs), ("pair", pairs))
        for (name, n), v in by.items()
    }
    report(args, columns, rows(epochs) + rows(pairs), named)
    if epochs and len(args.processes) > 1:
        print(f"\nOne device and several:\n\n{devices(epochs, args.processes)}")


if __name__ == "__main__":
    main()
