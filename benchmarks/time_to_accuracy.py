"""How long a command takes to reach 98.5 % on MNIST's 10,000 test images, including the start of
its processes.

    python benchmarks/time_to_accuracy.py --mnist_idx DIR --peers DIR --json FILE    ours five times, the tutorial once
    python benchmarks/time_to_accuracy.py --mnist_idx DIR --target 0.9 --rounds 1    a trial

Our side is `accelerate launch ... train.py --config recipes/mnist_fast.yaml`, each time with a
different --seed. If --peers is the folder with the tutorial's script, this script runs unchanged
and evaluates after each epoch. Both sides have --processes processes, on CPUs with one thread each,
and read the same files: --mnist_idx, as read by torchvision.datasets.MNIST.

The time is measured from the start of the command to the line of the first evaluation that reaches
--target. Our side then continues to its last checkpoint, which is timed too; the tutorial is
stopped. With --mnist, a folder with MNIST's parquet files, our side is also timed on these files
with an empty cache, so that each run first decodes 70,000 PNG images.
"""

import argparse
import json
import math
import re
import sys
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from common import ROOT, flags, in_turns, launch, make_parser, report, run, spread

# A line of train.py, such as: update 13  eval (hold-out)  accuracy 0.1944  loss 2.2401
EVALUATION = r"update \d+\s+eval .*?accuracy (\S+)"
OURS, DECODING, TUTORIAL = "ours", "ours, decoding PNG images first", "tutorial"


def ours(args: argparse.Namespace, seeds: count, **data) -> dict[str, float]:
    """Seconds of train.py to the target, in all and of training alone, and the final accuracy."""
    with TemporaryDirectory(prefix="lockstep-") as folder:
        data |= {"max_steps": args.max_steps}
        place = flags(
            output_dir=folder, run_name="run", cache_dir=f"{folder}/cache", seed=next(seeds)
        )
        settings = [
            *flags(config=args.config, threads=1, mixed_precision=args.mixed_precision, **data),
            *place,
        ]
        lines, whole = run(
            [*launch(args.processes), ROOT / "train.py", *settings], seconds=args.cap
        )
        log = [
            json.loads(line)
            for line in (Path(folder) / "run" / "log.jsonl").read_text().splitlines()
        ]
    evaluated = [
        (at, float(found[1])) for at, line in lines if (found := re.match(EVALUATION, line))
    ]
    reached = [at for at, accuracy in evaluated if accuracy >= args.target]
    training = [record["seconds"] for record in log if record["kind"] == "train"][-1]
    return {
        "reached": min(reached, default=math.inf),
        "whole": whole,
        "training": training,
        "accuracy": evaluated[-1][1],
    }


def tutorial(args: argparse.Namespace) -> dict[str, float]:
    """Seconds of the tutorial to the target, or infinity if --cap ended it, and its last numbers."""
    epochs = []

    def reaches(line: str) -> bool:
        epochs.extend([json.loads(line)] if line.startswith("{") else [])
        return bool(epochs) and epochs[-1]["accuracy"] >= args.target

    settings = flags(root=args.mnist_idx, processes=args.processes, threads=1, epochs=10_000)
    try:
        _, reached = run(
            [sys.executable, args.peers / "mnist_ddp_baseline.py", *settings],
            reaches,
            seconds=args.cap,
        )
    except TimeoutError:
        reached = math.inf
    last = epochs[-1] if epochs else {"train_s": math.nan, "accuracy": math.nan, "epoch": 0}
    return {
        "reached": reached,
        "training": last["train_s"],
        "accuracy": last["accuracy"],
        "epochs": last["epoch"],
    }


def rows(results: dict[str, list[dict]], cap: float) -> list[list]:
    """A row for each side: seconds to the target, of training and in all, the accuracy, and the
    ratio to ours.
    """
    lines = []
    for name, runs in results.items():
        times, mine = ([run["reached"] for run in results[side]] for side in (name, OURS))
        reached = sum(map(math.isfinite, times))
        shown = f"not within {cap:.0f}" if math.isinf(median(times)) else spread(times, ".1f")
        least = [min(median(times), cap) / time for time in mine]
        more = (
            "at least " * math.isinf(median(times)) + spread(least, ".1f")
            if name == TUTORIAL
            else ""
        )
        ends = spread([run["whole"] for run in runs], ".1f") if "whole" in runs[0] else ""
        training = spread([run["training"] for run in runs], ".1f")
        accuracy = spread([run["accuracy"] for run in runs], ".2%")
        lines.append([name, shown, f"{reached} of {len(runs)}", training, ends, accuracy, more])
    return lines


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--mnist_idx", type=Path, metavar="DIR", required=True, help="MNIST, a torchvision root"
    )
    parser.add_argument("--mnist", type=Path, metavar="DIR", help="MNIST's parquet files")
    parser.add_argument(
        "--peers", type=Path, metavar="DIR", help="folder with the tutorial's mnist_ddp_baseline.py"
    )
    parser.add_argument(
        "--processes", type=int, default=2, help="how many on each side (default: %(default)s)"
    )
    parser.add_argument(
        "--target", type=float, default=0.985, help="test accuracy (default: %(default)s)"
    )
    parser.add_argument(
        "--max_steps", type=int, help="updates of our side (default: those of the recipe)"
    )
    parser.add_argument(
        "--cap",
        type=float,
        default=3600,
        help="seconds after which a side is stopped (default: %(default)s)",
    )
    parser.add_argument(
        "--config",
        type=Path,
        default=ROOT / "recipes" / "mnist_fast.yaml",
        help="recipe of our side",
    )
    parser.add_argument(
        "--mixed_precision",
        help="precision of our side, as for train.py (default: that of train.py)",
    )
    args = parser.parse_args()
    sides = {OURS: partial(ours, args, count(), data="torchvision/MNIST", data_dir=args.mnist_idx)}
    if args.mnist:
        sides[DECODING] = partial(ours, args, count(), data=args.mnist)
    results = in_turns(sides, args.rounds)
    if args.peers:
        results |= in_turns({TUTORIAL: partial(tutorial, args)}, 1)
    header = [
        "",
        f"to {args.target:.1%}, s",
        "reached by",
        "of it training, s",
        "whole command, s",
        "test accuracy",
    ]
    report(args, [*header, "over ours"], rows(results, args.cap), results)


if __name__ == "__main__":
    main()
