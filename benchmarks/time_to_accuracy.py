"""How long a command takes to reach 98.5 % on MNIST's 10,000 test images, including the start of
its processes.

    python benchmarks/time_to_accuracy.py --mnist_idx DIR --peers DIR --json FILE
    python benchmarks/time_to_accuracy.py --mnist_idx DIR --target 0.9 --rounds 1    a trial

Ours runs five times, the tutorial once. Our side is `accelerate launch ... train.py --config
recipes/mnist_fast.yaml`, each time with a different --seed. If --peers is the folder with the
tutorial's script, this script runs unchanged and evaluates after each epoch. Both sides have
--processes processes, on CPUs with one thread each, and read the same files: --mnist_idx, as read
by torchvision.datasets.MNIST.

The time is measured from the start of the command to the line of the first evaluation that reaches
--target. Our side then continues to its last checkpoint, which is timed too; the tutorial is
stopped.
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

from common import (
    ROOT,
    flags,
    in_turns,
    launch,
    parse_flags,
    read_log,
    report,
    run,
    spread,
    temporary,
)

# A line of train.py, such as: update 13  eval (hold-out)  accuracy 0.1944  loss 2.2401
EVALUATION = r"update \d+\s+eval .*?accuracy (\S+)"
OURS, TUTORIAL = "ours", "tutorial"


def ours(args: argparse.Namespace, seeds: count) -> dict[str, float]:
    """Seconds of train.py to the target, in all and of training alone, and the final accuracy."""
    settings = flags(config=args.config, threads=1, mixed_precision=args.mixed_precision)
    settings += flags(data="torchvision/MNIST", data_dir=args.mnist_idx)
    settings += flags(max_steps=args.max_steps, seed=next(seeds), run_name="run")
    with temporary() as folder:
        place = flags(output_dir=folder, cache_dir=folder / "cache")
        command = [*launch(args.processes), ROOT / "train.py", *settings, *place]
        lines, whole = run(command, seconds=args.cap)
        log = read_log(folder / "run")
    found = [(at, re.match(EVALUATION, line)) for at, line in lines]
    evaluated = [(at, float(match[1])) for at, match in found if match]
    reached = [at for at, accuracy in evaluated if accuracy >= args.target]
    return {
        "reached": min(reached, default=math.inf),
        "whole": whole,
        "training": [record["seconds"] for record in log if record["kind"] == "train"][-1],
        "accuracy": evaluated[-1][1],
    }


def tutorial(args: argparse.Namespace) -> dict[str, float]:
    """Seconds of the tutorial to the target, infinity if --cap ended it, and its last numbers."""
    epochs = []

    def reaches(line: str) -> bool:
        epochs.extend([json.loads(line)] if line.startswith("{") else [])
        return bool(epochs) and epochs[-1]["accuracy"] >= args.target

    settings = flags(root=args.mnist_idx, processes=args.processes, threads=1, epochs=10_000)
    command = [sys.executable, args.peers / "mnist_ddp_baseline.py", *settings]
    try:
        _, reached = run(command, reaches, seconds=args.cap)
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
        never, more = math.isinf(median(times)), ""
        shown = f"not within {cap:.0f}" if never else spread(times, ".1f")
        if name == TUTORIAL:
            least = spread([min(median(times), cap) / time for time in mine], ".1f")
            more = f"at least {least}" if never else least
        ends = spread([run["whole"] for run in runs], ".1f") if "whole" in runs[0] else ""
        training = spread([run["training"] for run in runs], ".1f")
        accuracy = spread([run["accuracy"] for run in runs], ".2%")
        lines.append([name, shown, f"{reached} of {len(runs)}", training, ends, accuracy, more])
    return lines


def main() -> None:
    args = parse_flags(
        __doc__,
        ["mnist_idx"],
        mnist_idx=(Path, "MNIST, a torchvision root"),
        peers=(Path, "folder with the tutorial's mnist_ddp_baseline.py"),
        processes=(2, "how many on each side"),
        target=(0.985, "test accuracy"),
        max_steps=(int, "updates of our side, if not those of the recipe"),
        cap=(3600.0, "seconds after which a side is stopped"),
        config=(ROOT / "recipes/mnist_fast.yaml", "recipe of our side"),
        mixed_precision=(str, "precision of our side, as for train.py"),
    )
    results = in_turns({OURS: partial(ours, args, count())}, args.rounds)
    if args.peers:
        results |= in_turns({TUTORIAL: partial(tutorial, args)}, 1)
    header = ["", f"to {args.target:.1%}, s", "reached by", "of it training, s"]
    header += ["whole command, s", "test accuracy", "over ours"]
    report(args, header, rows(results, args.cap), results)


if __name__ == "__main__":
    main()
