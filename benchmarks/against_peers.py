"""Images per second on MNIST: Lockstep, the training scripts of benchmarks/peers, and the training
step alone.

    python benchmarks/against_peers.py --json FILE
    python benchmarks/against_peers.py --sides tutorial --rounds 1      a trial

mnist.py makes the folder --mnist on first use. Without a network, it has generated images, and the
output says so. All sides train the same network in float32, with the same SGD and batches of 128
per process, on CPUs with one thread per process. Our side is `python train.py` or `accelerate
launch ... train.py`. In each round, all sides run once, in a random order.

* tutorial, hugging_face, hugging_face_decoded, timm, lightning: the first epoch, without start-up
  and evaluation. Neither our side nor hugging_face_decoded counts the time in which images are
  decoded beforehand. lightning is left out if it is not installed.
* bare_step: the step on one batch that stays on the device, without data loading or a training
  loop. Our side runs again just before or after it. Both measure five stretches of 40 updates, drop
  the first one, and take the third lowest time of the others.

A ratio is ours divided by theirs in the same round. A cell is the median of the rounds, with their
range.
"""

import argparse
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import mnist
from common import (
    MNIST_IMAGES,
    ROOT,
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

OURS, BARE = "ours", "bare_step"
PEERS = ("tutorial", "hugging_face", "hugging_face_decoded", "timm", "lightning")
STRETCH = 40  # updates of one of the five stretches of the bare step
ON_CPUS = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def peer(name: str, processes: int, *more: str) -> list:
    """The command of a script of benchmarks/peers."""
    folder, counted = ROOT / "benchmarks/peers", flags(processes=processes)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += flags(nproc_per_node=processes)
    commands = {
        "tutorial": [sys.executable, folder / "tutorial.py"],
        "hugging_face": [*launch(processes, "cpu"), folder / "hugging_face.py"],
        "hugging_face_decoded": [
            *launch(processes, "cpu"),
            folder / "hugging_face.py",
            "--decoded",
        ],
        "timm": [*torchrun, folder / "timm_parts.py"],
        "lightning": [sys.executable, folder / "lightning_trainer.py"],
        BARE: [*torchrun, folder / "tutorial_step.py"],
    }
    return [*commands[name], *counted, *more]


def installed(sides: list[str]) -> list[str]:
    """The sides without lightning if it is not installed."""
    if "lightning" in sides and not find_spec("lightning"):
        print("lightning is not installed, so it is left out", file=sys.stderr)
        return [side for side in sides if side != "lightning"]
    return sides


def tutorial_settings(folder: Path) -> list[str]:
    """The flags of train.py for the tutorials' network, optimizer and batch."""
    sgd = flags(optimizer="sgd", lr=0.01, momentum=0, weight_decay=0, lr_schedule="constant")
    data = flags(data="torchvision/MNIST", data_dir=folder, model="mnist_cnn")
    return [*sgd, *data, *flags(batch_size=128, threads=1, mixed_precision="no")]


def ours(processes: int, args: argparse.Namespace, **more) -> list[dict]:
    """The log of train.py with the tutorials' settings."""
    settings = [*tutorial_settings(args.mnist), *flags(max_eval_samples=256, **more)]
    return train(processes, *settings, device="cpu", env=ON_CPUS)


def epoch_rate(processes: int, args: argparse.Namespace) -> float:
    """Images per second of train.py in its first epoch."""
    log = ours(processes, args, epochs=1)
    return MNIST_IMAGES / [record["seconds"] for record in log if record["kind"] == "train"][-1]


def stretch_rate(processes: int, args: argparse.Namespace) -> float:
    """Images per second of train.py, from five train records, computed as for the bare step."""
    return sorted(rates(ours(processes, args, max_steps=5 * STRETCH, log_every=STRETCH)))[1]


def peer_rate(name: str, processes: int, args: argparse.Namespace) -> float:
    """Images per second of a peer, from its line of JSON."""
    more = () if name == BARE else flags(data=args.mnist, epochs=1)
    command = peer(name, processes, *more)
    return last_json(command, until=lambda line: line.startswith("{"), env=ON_CPUS)[
        "images_per_second"
    ]


def measure(args: argparse.Namespace) -> tuple[dict, dict]:
    """Images per second by (side, processes): over epochs, and paired with the bare step."""
    peers = [side for side in args.sides if side != BARE]
    sides = {(OURS, n): partial(epoch_rate, n, args) for n in args.processes}
    sides |= {
        (name, n): partial(peer_rate, name, n, args) for name in peers for n in args.processes
    }
    # A round of ours alone compares nothing.
    epochs, pairs = in_turns(sides, args.rounds) if peers else {}, {}
    for n in args.processes if BARE in args.sides else ():
        both = {
            (OURS, n): partial(stretch_rate, n, args),
            (BARE, n): partial(peer_rate, BARE, n, args),
        }
        pairs |= in_turns(both, args.rounds)
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
        mnist=(Path("build/mnist"), "folder made by mnist.py"),
        processes=("2", "how many, such as 1,2"),
        sides=(",".join([*PEERS, BARE]), "sides to compare with"),
    )
    args.processes, args.sides = numbers(args.processes), args.sides.split(",")
    if not set(args.sides) <= {*PEERS, BARE}:
        raise SystemExit(f"--sides must be some of {','.join([*PEERS, BARE])}")
    args.sides, args.images = installed(args.sides), mnist.ready(args.mnist)
    print(f"images: {args.images}", file=sys.stderr)
    epochs, pairs = measure(args)
    columns = ["against", "processes", "ours, images/s", "theirs", "ours, s per epoch", "theirs"]
    named = {("epoch", *key): found for key, found in epochs.items()}
    named |= {("pair", *key): found for key, found in pairs.items()}
    report(args, [*columns, "ours over theirs"], rows(epochs) + rows(pairs), named)


if __name__ == "__main__":
    main()
