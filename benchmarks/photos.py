"""train.py with photographs, on two CPU processes, compared with forty lines of timm and
scikit-learn.

    python benchmarks/photos.py --what time --data FOLDER --weights FILE \\
        --model tf_efficientnet_lite0
    python benchmarks/photos.py --what accuracy --cifar10 PARQUET --weights FILE \\
        --model tf_efficientnet_lite0

FOLDER has train/CLASS/IMAGE and val/CLASS/IMAGE. --cifar10 makes a temporary FOLDER with PNG files
of CIFAR-10: 50 training images and 100 test images of each class. The three methods start from the
same published weights:

* forty lines: forty_lines.py, which computes the features of each photograph once. --forty_lines=--channels_last makes
  it faster on many CPUs.
* head only: `accelerate launch --config_file accelerate_configs/2cpu.yaml train.py ... --freeze backbone`.
* everything: the same launcher with `train.py --config recipes/photos.yaml`, from a run of `head only` with the same
  seed. With --from_weights, it starts from the published weights instead and does not use the
  recipe.

Settings that are not named here have the defaults of train.py. --head, --everything and --args add
settings.

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
import json
import shlex
import sys
from functools import partial
from itertools import count
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from statistics import mean
from tempfile import TemporaryDirectory

import pandas
from common import ROOT, flags, in_turns, last_json, make_parser, ratios, report, run, spread

FORTY, HEAD, EVERYTHING = "forty lines", "head only", "everything"
FIRST, SECOND, NO_UPDATE = (
    "head only, from nothing",
    "head only, second start",
    "head only, no update",
)
OVER = {FIRST: FORTY, SECOND: NO_UPDATE}  # what a time is compared with
LAUNCH = [
    sys.executable,
    "-m",
    "accelerate.commands.launch",
    "--config_file",
    ROOT / "accelerate_configs/2cpu.yaml",
]


def timed(command: list, caches: Path) -> tuple[list, dict[str, float]]:
    """Run a command. Returns its lines, and its wall-clock and processor time in seconds."""
    before = getrusage(RUSAGE_CHILDREN)
    lines, seconds = run(
        command, env={"HF_HOME": str(caches / "huggingface"), "CUDA_VISIBLE_DEVICES": ""}
    )
    after = getrusage(RUSAGE_CHILDREN)
    return lines, {
        "s": seconds,
        "cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    }


def forty_lines(args: argparse.Namespace) -> dict[str, float]:
    """The times of forty_lines.py, and its number of misclassified images."""
    settings = [
        *flags(data=args.data, weights=args.weights, model=args.model),
        *shlex.split(args.forty_lines),
    ]
    with TemporaryDirectory(prefix="lockstep-") as caches:
        lines, times = timed(
            [sys.executable, ROOT / "benchmarks/forty_lines.py", *settings], Path(caches)
        )
    return times | {"wrong": last_json(lines)["wrong"]}


def ours(
    args: argparse.Namespace, settings: str, seeds: count, folder=None, caches=None
) -> dict[str, float]:
    """The times of train.py, and its number of misclassified images.

    Without `folder` and `caches`, these are new.
    """
    with TemporaryDirectory(prefix="lockstep-") as new:
        folder, caches = Path(folder or new), Path(caches or new, "caches")
        weights = flags(
            model=f"timm/{args.model}", init_from=args.weights, init_match=args.init_match
        )
        place = flags(output_dir=folder, run_name="run", cache_dir=caches, seed=next(seeds))
        more = shlex.split(f"{settings} {args.args}")
        lines, times = timed(
            [*LAUNCH, ROOT / "train.py", "--data", args.data, *weights, *more, *place], caches
        )
        log = [json.loads(line) for line in (folder / "run" / "log.jsonl").read_text().splitlines()]
    if "--resume" in more and not any("raise it to continue" in line for _, line in lines):
        raise SystemExit("the finished run was not recognised as finished")
    last = [record for record in log if record["kind"] == "eval"][-1]
    if args.what == "accuracy" and last["count"] != args.images:
        raise SystemExit(
            f"train.py evaluated {last['count']} of {args.images} images, which cannot be compared"
        )
    return times | {"wrong": round((1 - last["accuracy"]) * last["count"])}


def everything(args: argparse.Namespace, seeds: count, caches: str) -> dict[str, float]:
    """Like `ours`, for all layers, from the head of the same seed or from the published weights."""
    if args.from_weights:
        return ours(args, args.everything, seeds, None, caches)
    seed = next(seeds)
    with TemporaryDirectory(prefix="lockstep-") as folder:
        # the best checkpoint is the last one, so it is not selected by val/
        once = "--eval_every 1000000"
        ours(args, f"{args.head} {once}", count(seed), folder, caches)
        start = flags(
            config=ROOT / "recipes/photos.yaml", init_from=Path(folder, "run"), init_match="name"
        )
        return ours(
            args, f"{shlex.join(map(str, start))} {args.everything}", count(seed), None, caches
        )


def measure_time(args: argparse.Namespace) -> tuple[list[str], list[list], dict]:
    """The header, the rows and all numbers of --what time."""
    with TemporaryDirectory(prefix="lockstep-") as kept:
        # always the same seed
        seeds = {name: count(args.first_seed, 0) for name in (FIRST, SECOND, NO_UPDATE)}
        head = partial(ours, args, args.head)
        head(seeds[SECOND], kept, kept)  # the run that is resumed, and the caches of a second start
        sides = {FORTY: partial(forty_lines, args), FIRST: partial(head, seeds[FIRST])}
        sides[SECOND] = partial(head, seeds[SECOND], None, kept)
        sides[NO_UPDATE] = partial(
            ours, args, f"{args.head} --resume auto", seeds[NO_UPDATE], kept, kept
        )
        results = in_turns(sides, args.rounds)
    rows = []
    for name in sides:
        mine, over = results[name], results[OVER.get(name, name)]
        times = [[one[what] for one in side] for what in ("s", "cpu") for side in (mine, over)]
        compared = (
            [OVER[name], *(spread(ratios(*times[i : i + 2]), ".2f") for i in (0, 2))]
            if name in OVER
            else [""] * 3
        )
        rows.append([name, spread(times[0], ".1f"), spread(times[2], ".1f"), *compared])
    header = [
        "",
        "whole command, s",
        "processor time, s",
        "compared with",
        "times as long",
        "times the processor time",
    ]
    return header, rows, results


def measure_accuracy(args: argparse.Namespace) -> tuple[list[str], list[list], dict]:
    """The header, the rows and all numbers of --what accuracy."""
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    with TemporaryDirectory(prefix="lockstep-") as kept:  # all seeds share its caches
        sides = {
            HEAD: partial(ours, args, args.head, count(args.first_seed), None, kept),
            EVERYTHING: partial(everything, args, count(args.first_seed), kept),
        }
        results = {FORTY: [forty_lines(args)] * args.seeds} | in_turns(sides, args.seeds)
    wrong, rows = {name: [one["wrong"] for one in side] for name, side in results.items()}, []
    for name, mine in wrong.items():
        others = [over for over in (FORTY, HEAD) if over in list(wrong)[: list(wrong).index(name)]]
        less = [f"{mean(mine) - mean(wrong[over]):+.1f}" for over in others] + [""] * (
            2 - len(others)
        )
        rows.append(
            [name, *mine, f"{mean(mine):.1f}", f"{1 - mean(mine) / args.images:.1%}", *less]
        )
    header = [
        f"Wrong of {args.images}",
        *(f"seed {seed}" for seed in seeds),
        "mean",
        "mean accuracy",
    ]
    return [*header, f"more than {FORTY}", f"more than {HEAD}"], rows, results


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
    parser = make_parser(__doc__)
    parser.add_argument("--what", choices=("time", "accuracy"), required=True)
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument("--data", type=Path, metavar="FOLDER", help="photographs, in train/ and val/")
    data.add_argument(
        "--cifar10", type=Path, metavar="PARQUET", help="CIFAR-10's parquet files as on the Hub"
    )
    parser.add_argument(
        "--weights", type=Path, metavar="FILE", required=True, help="published weights"
    )
    parser.add_argument(
        "--model", metavar="NAME", required=True, help="timm's name of the model of these weights"
    )
    parser.add_argument(
        "--init_match", default="order", help="as for train.py; name if the file has timm's names"
    )
    parser.add_argument(
        "--head", default="--freeze backbone", help="settings of `head only` (default: %(default)s)"
    )
    parser.add_argument(
        "--everything", default="", help="more settings of `everything` (default: none)"
    )
    parser.add_argument(
        "--from_weights", action="store_true", help="start `everything` from the published weights"
    )
    parser.add_argument(
        "--args",
        default="",
        help="more settings of train.py, quoted as one argument (default: none)",
    )
    parser.add_argument(
        "--forty_lines", default="", help="settings of the forty lines (default: none)"
    )
    parser.add_argument(
        "--seeds", type=int, default=5, help="how many, for --what accuracy (default: %(default)s)"
    )
    parser.add_argument(
        "--first_seed", type=int, default=0, help="the other seeds follow it (default: %(default)s)"
    )
    args = parser.parse_args()
    with TemporaryDirectory(prefix="lockstep-") as folder:
        if args.cifar10:
            args.data = Path(folder, "cifar10")
            write_cifar10(args.cifar10, args.data)
        args.images = sum(path.is_file() for path in (args.data / "val").glob("*/*"))
        report(args, *(measure_time if args.what == "time" else measure_accuracy)(args))


if __name__ == "__main__":
    main()
