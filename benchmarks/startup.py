"""How long each stage of a start takes, on first use and later, and how much memory the ranks need
for large data.

    python benchmarks/startup.py --mnist DIR --json FILE          MNIST's parquet files in DIR, five rounds
    python benchmarks/startup.py --gigabytes 5 --rounds 1         memory, with 0.5 and 5 GB of decoded pixels

Each run is `train.py --config recipes/mnist.yaml --max_steps 1`, from its start to its exit: one
update, an evaluation of 1,000 images, and one checkpoint. This script runs train.py and records
when each stage ends. A stage lasts until the slowest rank has finished it. On first use the caches
are empty, so 70,000 PNG images are decoded.

For memory, a small network trains on each image of a table once. Private memory is RssAnon of
/proc/PID/status. Mapped memory is RssFile: libraries, and the decoded images, which all ranks of a
machine share and which the system reclaims when memory is short. Both are peaks, sampled every 20
ms, of the rank with the highest peak. 1 GB = 10^9 bytes.
"""

import argparse
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

BEGUN = time.time()  # when this process started, before the slow imports
ROOT = Path(__file__).resolve().parent.parent
STAGES = {  # the event that ends each stage
    "launcher, interpreter": "begun",
    "imports": "imported",
    "settings, ranks connect": "load_data called",
    "data: sources, decoded images": "make_dataset ended",
    "model, optimizer, run folder": "train called",
    "first update": "train_update ended",
    "evaluation, checkpoint": "train ended",
    "end of all processes": "ended",
}
SIDE = 96  # pixels of the images in the memory part, the largest that are decoded beforehand


def run_rank(folder: Path, argv: list[str]) -> None:
    """Train with these arguments; write the times of the stages and the peaks of memory to
    `folder`.
    """
    at, peak = {"begun": BEGUN}, {"RssAnon": 0, "RssFile": 0}
    sys.path.insert(0, str(ROOT))
    import train

    at["imported"] = time.time()
    threading.Thread(target=sample_memory, args=(peak,), daemon=True).start()
    for name in ("load_data", "make_dataset", "train", "train_update"):
        setattr(train, name, noting(getattr(train, name), name, at))
    train.main(argv)
    (folder / f"rank-{os.environ.get('RANK', 0)}.json").write_text(
        json.dumps({"at": at, "peak": peak})
    )


def noting(function: Callable, name: str, at: dict[str, float]) -> Callable:
    """Wrap a function to record in `at` when it is first called and when it last returned."""

    @functools.wraps(function)
    def noted(*arguments, **keywords):
        at.setdefault(f"{name} called", time.time())
        result = function(*arguments, **keywords)
        at[f"{name} ended"] = time.time()
        return result

    return noted


def sample_memory(peak: dict[str, int]) -> None:
    """Record the peaks of this process's memory, in bytes, until it exits."""
    while True:
        for line in Path("/proc/self/status").read_text().splitlines():
            field = line.split(":")[0]
            if field in peak:
                peak[field] = max(peak[field], int(line.split()[1]) * 1024)
        time.sleep(0.02)


def train_once(
    processes: int, caches: Path, *settings: str
) -> tuple[dict[str, float], list[dict[str, int]]]:
    """Run train.py once; returns the seconds of its stages, and each rank's peaks of memory."""
    from common import flags, launch, run

    with TemporaryDirectory(prefix="lockstep-") as folder:
        places = flags(output_dir=folder, run_name="run", cache_dir=caches)
        begun = time.time()
        command = [*launch(processes), __file__, "--rank", folder, *settings, *places]
        run(command, env={"HF_HOME": str(caches / "huggingface")})
        ended, ranks = (
            time.time(),
            [json.loads(file.read_text()) for file in Path(folder).glob("rank-*.json")],
        )
    assert len(ranks) == processes
    seconds, before = {}, begun
    for stage, event in STAGES.items():
        times = [rank["at"].get(event, ended) for rank in ranks]
        # when the first rank starts to load the data
        now = min(times) if event == "load_data called" else max(times)
        seconds[stage], before = now - before, now
    return seconds | {"whole command": ended - begun}, [rank["peak"] for rank in ranks]


def measure_start(args: argparse.Namespace) -> None:
    """Print the stages of first and later starts, on one and on two processes."""
    from common import flags, in_turns, report, spread

    settings = flags(
        config=ROOT / "recipes/mnist.yaml", data=args.mnist, max_steps=1, max_eval_samples=1000
    )

    def first(processes: int) -> dict[str, float]:
        with TemporaryDirectory(prefix="lockstep-") as caches:
            return train_once(processes, Path(caches), *settings)[0]

    with TemporaryDirectory(prefix="lockstep-") as kept:
        sides = {"first use": partial(first, 1), "first use, 2 processes": partial(first, 2)}
        for name, processes in {"later": 1, "later, 2 processes": 2}.items():
            sides[name] = lambda processes=processes: train_once(processes, Path(kept), *settings)[
                0
            ]
        sides["later"]()  # fills the caches that the later runs use
        results = in_turns(sides, args.rounds)
    rows = [
        [stage, *(spread([seconds[stage] for seconds in runs], ".2f") for runs in results.values())]
        for stage in [*STAGES, "whole command"]
    ]
    report(args, ["Seconds", *results], rows, results)


def measure_memory(args: argparse.Namespace) -> None:
    """Print the peaks of memory with a data set of --gigabytes and with a tenth of it."""
    from common import flags, in_turns, report, spread

    with TemporaryDirectory(prefix="lockstep-") as folder:
        sides = {}
        for size in (args.gigabytes / 10, args.gigabytes):
            place = Path(folder, f"{size:g}")
            write_table(place / "table", round(size * 1e9 / (SIDE * SIDE * 3)))
            model = flags(
                model="mlp", model_args="{hidden: 8}", epochs=1, global_batch_size=256, lr=0.001
            )
            settings = [*flags(data=place / "table"), *model]
            for processes in (1, 2):
                sides[size, processes] = partial(train_once, processes, place, *settings)
        results = in_turns(sides, args.rounds)
    rows = []
    for (size, processes), runs in results.items():
        most = [
            [max(peak[field] for peak in peaks) / 1e9 for _, peaks in runs]
            for field in ("RssAnon", "RssFile")
        ]
        rows.append([f"{size:g} GB", processes, *(spread(values, ".2f") for values in most)])
    header = ["Decoded pixels", "Processes", "Private memory of a rank, GB", "Mapped by a rank, GB"]
    report(args, header, rows, {str(side): runs for side, runs in results.items()})


def write_table(folder: Path, count: int) -> None:
    """Write parquet files with `count` training images, a few hundred of them distinct, and some
    test images.
    """
    import io

    import numpy as np
    import pyarrow as pa
    from PIL import Image
    from pyarrow import parquet

    random, images = np.random.default_rng(0), []
    for _ in range(256):
        file = io.BytesIO()
        pixels = (
            random.integers(0, 256, (8, 8, 3), np.uint8).repeat(SIDE // 8, 0).repeat(SIDE // 8, 1)
        )
        Image.fromarray(pixels).save(file, "PNG")
        images.append({"bytes": file.getvalue(), "path": None})
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    folder.mkdir(parents=True)
    for name, rows in {"train": count, "test": 1000}.items():
        columns = {"image": pa.array(images, kind).take(pa.array(np.arange(rows) % len(images)))}
        table = pa.table(columns | {"label": pa.array(np.arange(rows) % 10)})
        parquet.write_table(table, folder / f"{name}.parquet", row_group_size=10_000)


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        return run_rank(Path(sys.argv[2]), sys.argv[3:])
    from common import make_parser

    parser = make_parser(__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--mnist", type=Path, metavar="DIR", help="measure the start, with MNIST's parquet files"
    )
    what.add_argument(
        "--gigabytes", type=float, metavar="N", help="measure memory, with N GB of decoded pixels"
    )
    args = parser.parse_args()
    measure_start(args) if args.mnist else measure_memory(args)


if __name__ == "__main__":
    main()
