"""How long each stage of a start takes, on first use and later, and how much memory the ranks need
for large data.

    python benchmarks/startup.py --mnist DIR --json FILE     MNIST's parquet files in DIR
    python benchmarks/startup.py --gigabytes 5 --rounds 1    memory, with 0.5 and 5 GB of pixels

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
import json
import os
import sys
import threading
import time
from functools import partial
from pathlib import Path

from common import (
    ROOT,
    flags,
    in_turns,
    launch,
    note_times,
    parse_flags,
    report,
    run,
    spread,
    temporary,
)

BEGUN = time.time()  # before the slow imports
STAGES = {  # the event that ends each stage
    "launcher, interpreter": "begun",
    "imports": "imported",
    "settings, ranks connect": "load_data called",
    "data: sources, decoded images": "make_datasets ended",
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
    from utils.training import setup

    at["imported"] = time.time()
    threading.Thread(target=sample_memory, args=(peak,), daemon=True).start()

    def note(name: str, now: float) -> None:
        at[name] = at.get(name, now) if name.endswith("called") else now

    note_times(setup, "load_data", note)
    for name in ("make_datasets", "train", "train_update"):
        note_times(train, name, note)
    train.main(argv)
    found = json.dumps({"at": at, "peak": peak})
    (folder / f"rank-{os.environ.get('RANK', 0)}.json").write_text(found)


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
    with temporary() as folder:
        places = flags(output_dir=folder, run_name="run", cache_dir=caches)
        begun = time.time()
        command = [*launch(processes), __file__, "--rank", folder, *settings, *places]
        run(command, env={"HF_HOME": str(caches / "huggingface")})
        ended = time.time()
        ranks = [json.loads(file.read_text()) for file in folder.glob("rank-*.json")]
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
    recipe = ROOT / "recipes/mnist.yaml"
    settings = flags(config=recipe, data=args.mnist, max_steps=1, max_eval_samples=1000)

    def first(processes: int) -> dict[str, float]:
        with temporary() as caches:
            return later(processes, caches)

    def later(processes: int, caches: Path) -> dict[str, float]:
        return train_once(processes, caches, *settings)[0]

    with temporary() as kept:
        later(1, kept)  # fills the caches that the later runs use
        sides = {
            "first use": partial(first, 1),
            "first use, 2 processes": partial(first, 2),
            "later": partial(later, 1, kept),
            "later, 2 processes": partial(later, 2, kept),
        }
        results = in_turns(sides, args.rounds)
    rows = [
        [stage, *(spread([seconds[stage] for seconds in runs], ".2f") for runs in results.values())]
        for stage in [*STAGES, "whole command"]
    ]
    report(args, ["Seconds", *results], rows, results)


def measure_memory(args: argparse.Namespace) -> None:
    """Print the peaks of memory with a data set of --gigabytes and with a tenth of it."""
    model = flags(model="mlp", model_args="{hidden: 8}", epochs=1, global_batch_size=256, lr=0.001)
    with temporary() as folder:
        sides = {}
        for size in (args.gigabytes / 10, args.gigabytes):
            place = folder / f"{size:g}"
            write_table(place / "table", round(size * 1e9 / (SIDE * SIDE * 3)))
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
    report(args, header, rows, results)


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
        pixels = Image.fromarray(random.integers(0, 256, (8, 8, 3), np.uint8))
        pixels.resize((SIDE, SIDE), Image.NEAREST).save(file, "PNG")
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
    args = parse_flags(
        __doc__,
        mnist=(Path, "measure the start, with the folder of MNIST's parquet files"),
        gigabytes=(float, "measure memory, with this many GB of decoded pixels"),
    )
    if bool(args.mnist) == bool(args.gigabytes):
        raise SystemExit("give either --mnist or --gigabytes")
    measure_start(args) if args.mnist else measure_memory(args)


if __name__ == "__main__":
    main()
