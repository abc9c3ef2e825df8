"""train.py with photographs, on two CPU processes, compared with forty lines of timm and
scikit-learn.

    python benchmarks/photos.py --what time --data FOLDER --weights FILE \\
        --model tf_efficientnet_lite0
    python benchmarks/photos.py --what accuracy --cifar10 PARQUET --weights FILE \\
        --model tf_efficientnet_lite0

FOLDER has train/CLASS/IMAGE and val/CLASS/IMAGE. --cifar10 makes a temporary FOLDER with PNG files
of CIFAR-10: 50 training images and 100 test images of each class. Both methods start from the same
published weights; fine_tuning.py compares the second one with training all layers:

* forty lines: forty_lines.py, which computes the features of each photograph once.
  --forty_lines=--channels_last makes it faster on many CPUs.
* head only: `train.py --config recipes/head.yaml` under
  `accelerate launch --config_file accelerate_configs/2cpu.yaml`.

Settings that are not named here have the defaults of train.py. --args adds settings.

`--what time` measures four whole commands, from start to exit, in each round:

* forty lines
* head only, from nothing: with empty caches and a new run folder
* head only, second start: with the caches of an earlier run and a new run folder
* head only, no update: a finished run is resumed

The photographs have been read before, so the speed of the disk has no effect. If other programs
slow the machine down, compare the processor times. They include all processes of a command.

`--what accuracy` counts the misclassified images of val/ after the last update, for each seed. The
images of val/ are not used to select an epoch. The forty lines use no random numbers, so they run
only once.
"""

import argparse
import re
import shlex
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from statistics import mean
from typing import Any

import pandas
from common import (
    ROOT,
    flags,
    in_turns,
    last_json,
    over,
    parse_flags,
    read_log,
    report,
    run,
    spread,
    temporary,
)

FORTY, HEAD = "forty lines", "head only"
FIRST, SECOND = "head only, from nothing", "head only, second start"
NO_UPDATE = "head only, no update"
OVER = {FIRST: FORTY, SECOND: NO_UPDATE}  # what a time is compared with
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
LAUNCH += [ROOT / "accelerate_configs/2cpu.yaml", ROOT / "train.py"]
FREEZE = flags(config=ROOT / "recipes/head.yaml")


def timed(function: Callable, command: list, caches: Path) -> tuple[Any, dict[str, float]]:
    """Run a command with `function`. Returns its result, and the wall-clock and processor time in
    seconds.
    """
    before, begun = getrusage(RUSAGE_CHILDREN), time.perf_counter()
    result = function(command, env={"HF_HOME": caches / "huggingface", "CUDA_VISIBLE_DEVICES": ""})
    seconds, after = time.perf_counter() - begun, getrusage(RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return result, {"s": seconds, "cpu": used}


def forty_lines(args: argparse.Namespace) -> dict[str, float]:
    """The times of forty_lines.py, and its number of misclassified images."""
    settings = flags(data=args.data, weights=args.weights, model=args.model)
    settings += shlex.split(args.forty_lines)
    with temporary() as caches:
        command = [sys.executable, ROOT / "benchmarks/forty_lines.py", *settings]
        found, times = timed(last_json, command, caches)
    return times | {"wrong": found["wrong"]}


def ours(
    args: argparse.Namespace, settings: list[str], seed: int, folder=None, caches=None
) -> dict[str, float]:
    """The times of train.py, and its number of misclassified images.

    Without `folder` and `caches`, these are new.
    """
    with temporary() as new:
        folder, caches = folder or new, (caches or new) / "caches"
        weights = flags(model=f"timm/{args.model}", init_from=args.weights, data=args.data)
        weights += flags(init_match=args.init_match)
        place = flags(output_dir=folder, run_name="run", cache_dir=caches, seed=seed)
        command = [*LAUNCH, *weights, *settings, *shlex.split(args.args), *place]
        (lines, _), times = timed(run, command, caches)
        log = read_log(folder / "run")
    last = [record for record in log if record["kind"] == "eval"][-1]
    if "--resume" in settings and not any("raise it to continue" in line for _, line in lines):
        raise SystemExit("the finished run was not recognised as finished")
    if args.what == "accuracy" and last["count"] != args.images:
        raise SystemExit(
            f"train.py evaluated {last['count']} of {args.images} images, which cannot be compared"
        )
    wrong = round((1 - last["accuracy"]) * last["count"])
    listed = next(filter(None, (re.search(r"(\d+) training,", line) for _, line in lines)))
    return times | {"wrong": wrong, "count": last["count"], "training": int(listed[1])}


def measure_time(args: argparse.Namespace) -> tuple[list[str], list[list], dict]:
    """The header, the rows and all numbers of --what time."""
    with temporary() as kept:
        head, resumed = partial(ours, args, FREEZE, 0), [*FREEZE, *flags(resume="auto")]
        head(kept, kept)  # the run that is resumed, and the caches of a second start
        sides = {FORTY: partial(forty_lines, args), FIRST: head, SECOND: partial(head, None, kept)}
        sides[NO_UPDATE] = partial(ours, args, resumed, 0, kept, kept)
        results = in_turns(sides, args.rounds)
    rows = []
    for name, mine in results.items():
        row, compared = [name], [OVER.get(name, "")]
        for what in ("s", "cpu"):
            own = [one[what] for one in mine]
            row.append(spread(own, ".1f"))
            other = [one[what] for one in results[OVER.get(name, name)]]
            compared.append(over(own, other) if name in OVER else "")
        rows.append(row + compared)
    header = ["", "whole command, s", "processor time, s", "compared with"]
    return [*header, "times as long", "times the processor time"], rows, results


def measure_accuracy(args: argparse.Namespace) -> tuple[list[str], list[list], dict]:
    """The header, the rows and all numbers of --what accuracy."""
    seeds = count()
    with temporary() as kept:  # all seeds share its caches
        sides = {HEAD: lambda: ours(args, FREEZE, next(seeds), None, kept)}
        results = {FORTY: [forty_lines(args)] * args.seeds} | in_turns(sides, args.seeds)
    return *accuracy_table(results, args.images), results


def accuracy_table(results: dict[str, list[dict]], images: int) -> tuple[list[str], list[list]]:
    """The header and the rows of --what accuracy."""
    wrong, rows = {name: [one["wrong"] for one in side] for name, side in results.items()}, []
    for name, mine in wrong.items():
        more = f"{mean(mine) - mean(wrong[FORTY]):+.1f}"
        rows.append([name, *mine, f"{mean(mine):.1f}", f"{1 - mean(mine) / images:.1%}", more])
    header = [f"Wrong of {images}", *(f"seed {seed}" for seed in range(len(wrong[FORTY])))]
    header += ["mean", "mean accuracy", f"more than {FORTY}"]
    return header, rows


def write_cifar10(parquet: Path, folder: Path) -> None:
    """The first 50 training images and the first 100 test images of each class as PNG files."""
    for split, part, each in (("train", "train", 50), ("test", "val", 100)):
        frame = pandas.read_parquet(next(parquet.rglob(f"{split}-*.parquet")))
        image, label = frame.columns
        for name, group in frame.groupby(label):
            (folder / part / str(name)).mkdir(parents=True)
            for index, stored in group[image].head(each).items():
                (folder / part / str(name) / f"{index}.png").write_bytes(stored["bytes"])


def main() -> None:
    args = parse_flags(
        __doc__,
        ["what", "weights", "model"],
        what=(str, "time or accuracy"),
        data=(Path, "folder with photographs, in train/ and val/"),
        cifar10=(Path, "in place of --data: CIFAR-10's parquet files as on the Hub"),
        weights=(Path, "file with published weights"),
        model=(str, "timm's name of the model of these weights"),
        init_match=("order", "as for train.py; name if the file has timm's names"),
        args=("", "more settings of train.py, quoted as one argument"),
        forty_lines=("", "settings of the forty lines"),
        seeds=(5, "how many, for --what accuracy"),
    )

    if bool(args.data) == bool(args.cifar10):
        raise SystemExit("give either --data or --cifar10")
    with temporary() as folder:
        if args.cifar10:
            args.data = folder / "cifar10"
            write_cifar10(args.cifar10, args.data)
        args.images = sum(path.is_file() for path in (args.data / "val").glob("*/*"))
        report(args, *(measure_time if args.what == "time" else measure_accuracy)(args))


if __name__ == "__main__":
    main()
