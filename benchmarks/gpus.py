"""train.py on the GPUs of this machine beside the training step alone, timm's step and
DataParallel, in paired rounds.

    python benchmarks/gpus.py --json gpu.json      ResNet-50 at 224 pixels
    python benchmarks/gpus.py --rounds 1 --model resnet18 --image_size 32 --batch_size 8 \\
        --steps 8 --photos_count 16

The second command is a trial on a CPU. The sides are:

* generated: train.py on generated images, the step of train.py on one batch that stays on the
  device, and the step of timm: its model and optimizer, with the same precision and memory layout;
* photographs: train.py on an image folder of generated JPEG files, and timm's loader and step, with
  as many workers;
* small images: train.py with MNIST's network on generated images of MNIST's size, which stay on the
  device, and the step of train.py alone;
* all GPUs, if there are several: train.py with DistributedDataParallel, and the same step with
  DataParallel.

A ratio is ours divided by theirs in the same round. A cell is the median of the rounds, with their
range. The memory is the most that PyTorch has used of one GPU at a time, after the first updates,
in which kernels are tried.
"""

import argparse
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import harmonic_mean

import torch
from common import (
    ROOT,
    flags,
    in_turns,
    last_json,
    launch,
    over,
    parse_flags,
    rates,
    report,
    spread,
    temporary,
    train,
)
from input_pipeline import make_photographs

OURS, ALONE, TIMM, DATA_PARALLEL = "train.py", "its step alone", "timm", "DataParallel"
# An update takes about a millisecond, so there are more of them.
SMALL = {"model": "mnist_cnn", "image_size": 28, "channels": 1, "repeat": 10}


def measure_train(
    args: argparse.Namespace,
    data: str,
    batch_size: int,
    processes: int = 1,
    repeat: int = 1,
    **settings,
) -> dict:
    """Images per second and peak memory of train.py in `repeat` times --steps updates, after its
    first record.

    All batches have the same size, because cuDNN would search for kernels when a smaller one comes.
    """
    steps = repeat * args.steps
    times = flags(max_steps=steps, log_every=max(1, steps // 4), eval_every=steps, save_every=steps)
    work = flags(data=data, batch_size=batch_size, mixed_precision=args.mixed_precision, lr=0.01)
    work += flags(drop_last=True, max_eval_samples=64, report=False, **settings)
    log = train(processes, *times, *work)
    memory = [record.get("gpu_memory") for record in log if record["kind"] == "train"][-1]
    return {"images_per_second": harmonic_mean(rates(log)), "gpu_memory": memory}


def measure_step(args: argparse.Namespace, batch_size: int, repeat: int = 1, **settings) -> dict:
    """The same of a step on a batch that stays on the device, or on batches of timm's loader."""
    steps = repeat * args.steps
    given = flags(batch_size=batch_size, mixed_precision=args.mixed_precision, **settings)
    given += flags(steps=steps, warmup=max(2, steps // 4))
    return last_json([*launch(1), ROOT / "benchmarks/bare_step.py", *given])


def sides(args: argparse.Namespace, photos: Path) -> dict[str, dict[str, Callable[[], dict]]]:
    """The functions that run in a round, by kind and side."""
    network = {"model": args.model, "image_size": args.image_size}
    count, size, gpus = args.batch_size * args.steps, args.image_size, torch.cuda.device_count()
    ours, alone = partial(measure_train, args), partial(measure_step, args)
    small_count = max(64, min(60_000, args.small_batch_size * args.steps))
    found = {
        "generated": {
            OURS: partial(ours, f"synthetic/10x{size}x{count}", args.batch_size, **network),
            ALONE: partial(alone, args.batch_size, channels=3, **network),
        },
        "photographs": {
            OURS: partial(
                ours, str(photos), args.batch_size, num_workers=args.num_workers, **network
            )
        },
        "small images": {
            OURS: partial(ours, f"synthetic/10x28x{small_count}", args.small_batch_size, **SMALL),
            ALONE: partial(alone, args.small_batch_size, **SMALL),
        },
    }
    if find_spec("timm"):
        theirs = partial(alone, args.batch_size, library="timm", channels=3, **network)
        found["generated"][TIMM] = theirs
        found["photographs"][TIMM] = partial(
            theirs, photos=f"{photos}/train", num_workers=args.num_workers
        )
    if gpus > 1:
        data = f"synthetic/10x{size}x{count * gpus}"
        found["all GPUs"] = {
            OURS: partial(ours, data, args.batch_size, gpus, **network),
            DATA_PARALLEL: partial(
                alone, gpus * args.batch_size, exchange="data_parallel", channels=3, **network
            ),
        }
    return {kind: side for kind, side in found.items() if kind in args.kinds.split(",")}


def rows(results: dict[str, dict[str, list[dict]]]) -> list[list[str]]:
    """The table: a row for each side of each kind, with our ratio to it and its memory."""
    table = []
    for kind, by_side in results.items():
        rate = {
            name: [found["images_per_second"] for found in rounds]
            for name, rounds in by_side.items()
        }
        for name, rounds in by_side.items():
            ratio = "" if name == OURS else over(rate[OURS], rate[name])
            memory = [found["gpu_memory"] / 1e9 for found in rounds if found["gpu_memory"]]
            cells = [kind, name, spread(rate[name]), ratio]
            table.append([*cells, spread(memory, ".2f") if memory else ""])
    return table


def main() -> None:
    precision = "bf16" if torch.cuda.is_available() else "no"
    args = parse_flags(
        __doc__,
        rounds=3,
        kinds=("generated,photographs,small images,all GPUs", "which to run"),
        model=("resnet50", "a model of torchvision and timm"),
        image_size=(224, "pixels of a side"),
        batch_size=(256, "of each process"),
        small_batch_size=(1024, "of small images"),
        steps=(80, "updates; small images: times ten"),
        num_workers=(8, "loader processes"),
        photos_count=(2048, "distinct photographs"),
        mixed_precision=(precision, "no, bf16 or fp16"),
    )
    with temporary() as photos:
        if "photographs" in args.kinds:
            make_photographs(photos / "train", 500, 400, 12, args.photos_count, classes=2)
        results = {
            kind: in_turns(by_side, args.rounds) for kind, by_side in sides(args, photos).items()
        }
    report(args, ["Images", "Side", "Images/s", "Ours over it", "GB"], rows(results), results)


if __name__ == "__main__":
    main()
