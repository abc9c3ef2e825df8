"""How long a command takes to reach an accuracy on MNIST's 10,000 test images, including the start
of its processes: Lockstep and the training scripts of benchmarks/peers, under equal conditions.

    python benchmarks/time_to_accuracy.py --json FILE
    python benchmarks/time_to_accuracy.py --conditions recipe --sides tutorial --rounds 1    a trial

mnist.py makes the folder --mnist on first use. Each script runs in --processes processes on the
CPU, with one thread per process. There are two conditions:

* tutorial: the tutorials' network, SGD with their learning rate of 0.01, and batches of 128 per
  process, to an accuracy of 90 %. The test images are evaluated after each epoch.
* recipe: network, optimizer, schedule and batch of recipes/mnist_fast.yaml, with 150 updates, to
  98.5 %. The test images are evaluated at the end.

The time is measured from the start of the command to the line of the first evaluation that reaches
the target; then the command is stopped. In each round, all scripts run once, in a random order.
Each script has another --seed in each round.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median

import mnist
from against_peers import ON_CPUS, OURS, PEERS, installed, peer, tutorial_settings
from common import ROOT, flags, in_turns, launch, parse_flags, report, run, spread, temporary

# A line of train.py, such as: update 13  eval (hold-out)  accuracy 0.1944  loss 2.2401
EVALUATION = r"update \d+\s+eval .*?accuracy (\S+)"
TUTORIAL, RECIPE = "tutorial", "recipe"
TARGETS = {TUTORIAL: 0.9, RECIPE: 0.985}
EPOCHS = 30  # at most, in the first condition
UPDATES = 150  # of each run, in the second condition


def reach(
    command: list, accuracy_of: Callable[[str], float | None], target: float, cap: float
) -> dict[str, float]:
    """Seconds of a command to the target, infinity if it was not reached, and the accuracy of its
    last evaluation.
    """
    found = [math.nan]

    def reaches(line: str) -> bool:
        accuracy = accuracy_of(line)
        found.extend([] if accuracy is None else [accuracy])
        return accuracy is not None and accuracy >= target

    try:
        _, seconds = run(command, reaches, seconds=cap, env=ON_CPUS)
    except TimeoutError:
        seconds = math.inf
    return {
        "reached": seconds if found[-1] >= target else math.inf,
        "accuracy": found[-1],
        "evaluations": len(found) - 1,
    }


def ours(condition: str, args: argparse.Namespace, seeds: count) -> dict[str, float]:
    """train.py, with an empty cache."""
    data = flags(data="torchvision/MNIST", data_dir=args.mnist)
    recipe = [*data, *flags(config=ROOT / "recipes/mnist_fast.yaml", max_steps=UPDATES, threads=1)]
    tutorial = [*tutorial_settings(args.mnist), *flags(epochs=EPOCHS)]
    settings = {TUTORIAL: tutorial, RECIPE: recipe}[condition]

    def accuracy_of(line: str) -> float | None:
        match = re.match(EVALUATION, line)
        return float(match[1]) if match else None

    with temporary() as folder:
        place = flags(output_dir=folder, cache_dir=folder / "cache", seed=next(seeds))
        command = [*launch(args.processes, "cpu"), ROOT / "train.py", *settings, *place]
        return reach(command, accuracy_of, TARGETS[condition], args.cap)


def theirs(condition: str, name: str, args: argparse.Namespace, seeds: count) -> dict[str, float]:
    """A script of benchmarks/peers."""
    recipe = flags(recipe="lockstep", updates=UPDATES)
    settings = {TUTORIAL: flags(epochs=EPOCHS), RECIPE: recipe}[condition]
    settings = [*flags(data=args.mnist, seed=next(seeds)), *settings]
    command = peer(name, args.processes, *settings)

    def accuracy_of(line: str) -> float | None:
        return json.loads(line)["accuracy"] if line.startswith("{") else None

    return reach(command, accuracy_of, TARGETS[condition], args.cap)


def rows(results: dict[tuple[str, str], list[dict]]) -> list[list]:
    """A row for each condition and side: seconds to the target, and the ratio to ours."""
    lines = []
    for (condition, name), runs in results.items():
        times = [run["reached"] for run in runs]
        mine = [run["reached"] for run in results[condition, OURS]]
        reached = sum(map(math.isfinite, times))
        shown = spread(times, ".1f") if reached == len(times) else "not in all rounds"
        ratio = [time / own for time, own in zip(times, mine, strict=True)]
        more = spread(ratio, ".2f") if name != OURS and math.isfinite(median(ratio)) else ""
        target = f"{TARGETS[condition]:.1%}"
        lines.append([condition, name, target, shown, f"{reached} of {len(runs)}", more])
    return lines


def main() -> None:
    args = parse_flags(
        __doc__,
        rounds=3,
        mnist=(Path("build/mnist"), "folder made by mnist.py"),
        processes=(2, "how many on each side"),
        conditions=(f"{TUTORIAL},{RECIPE}", "one or both"),
        sides=(",".join(PEERS), "sides to compare with"),
        cap=(900.0, "seconds after which a command is stopped"),
    )
    sides, args.images = installed(args.sides.split(",")), mnist.ready(args.mnist)
    print(f"images: {args.images}", file=sys.stderr)
    conditions, results = args.conditions.split(","), {}
    if not ({*sides} <= {*PEERS} and {*conditions} <= TARGETS.keys()):
        raise SystemExit(f"--sides: some of {','.join(PEERS)}; --conditions: {','.join(TARGETS)}")
    for condition in conditions:
        runs = {(condition, OURS): partial(ours, condition, args, count())}
        for name in sides:
            runs[condition, name] = partial(theirs, condition, name, args, count())
        results |= in_turns(runs, args.rounds)
    header = ["conditions", "script", "accuracy", "seconds to it", "reached in", "seconds / ours"]
    report(args, header, rows(results), results)


if __name__ == "__main__":
    main()
