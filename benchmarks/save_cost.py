"""Measure the seconds of each step of a save. Training waits for the first step; a thread does the
others.

    python benchmarks/save_cost.py
    python benchmarks/save_cost.py --models resnet50:sgd --epoch_seconds 60

By default: resnet50 with SGD, and vit_l_16 with AdamW. With --epoch_seconds, the table also has the
whole save and the wait as shares of the training time of an epoch. A run saves after each epoch by
default.
"""

import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import Accelerator
from common import ROOT, parse_flags, report, spread

sys.path.insert(0, str(ROOT))
from utils.data import InputSpec
from utils.files import put_in_place, sync, write_file
from utils.models import build_model
from utils.runs.manifest import MANIFEST_FILE, manifest_text, sha256_of
from utils.runs.save_state import extend_save_state
from utils.runs.writing import finish_partial, new_partial, partial_of
from utils.settings.train import TrainConfig
from utils.training import build_optimizer

SPEC = InputSpec(height=224, width=224, channels=3, mean=[0.5] * 3, std=[0.5] * 3)
STEPS = ("write", "hash", "fsync", "rename")
HEADER = "model, optimizer", "MB", "save_state, s", "SHA-256, s", "fsync, s", "manifest, rename, s"


def seconds(action: Callable, *arguments) -> float:
    begun = time.perf_counter()
    action(*arguments)
    return time.perf_counter() - begun


def measure(
    name: str, optimizer_name: str, folder: Path, rounds: int
) -> tuple[float, dict[str, list[float]]]:
    """The size of a checkpoint in MB, and the seconds of each step of a save in each round."""
    config = TrainConfig(model=name, optimizer=optimizer_name, lr=0.05, weight_decay=5e-4)
    accelerator = Accelerator()
    module = build_model(config, SPEC, classes=1000)
    module, optimizer = accelerator.prepare(module, build_optimizer(config, module))
    extend_save_state(accelerator, module, optimizer, None)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # creates its state
    optimizer.zero_grad()
    results: dict[str, list[float]] = {step: [] for step in STEPS}
    for step in range(rounds):
        partial = partial_of(folder, step)
        new_partial(folder, step, need=0)
        results["write"].append(seconds(accelerator.save_state, partial))
        finish_partial(partial, {})
        files = sorted(partial.iterdir())
        results["hash"].append(sum(seconds(sha256_of, path) for path in files))
        results["fsync"].append(sum(seconds(sync, path) for path in files))
        manifest = seconds(write_file, partial / MANIFEST_FILE, manifest_text({}))
        renaming = seconds(put_in_place, partial, folder / f"step-{step:08d}")
        results["rename"].append(manifest + renaming)
        size = sum(path.stat().st_size for path in (folder / f"step-{step:08d}").iterdir()) / 1e6
        shutil.rmtree(folder / f"step-{step:08d}")
    return size, results


def main() -> None:
    args = parse_flags(
        __doc__,
        models=("resnet50:sgd,vit_l_16:adamw", "models and their optimizers"),
        folder=(tempfile.gettempdir(), "on the disk to measure"),
        epoch_seconds=(float, "training time of an epoch"),
    )
    rows, results = [], {}
    for pair in args.models.split(","):
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            size, steps = measure(*pair.split(":"), Path(folder), args.rounds)
        results[pair] = steps
        row = [pair.replace(":", ", "), f"{size:.0f}"]
        row += [spread(steps[step], ".2f") for step in STEPS]
        if args.epoch_seconds:
            whole = [sum(times) / args.epoch_seconds for times in zip(*steps.values(), strict=True)]
            waits = [time / args.epoch_seconds for time in steps["write"]]
            row += [spread(whole, ".1%"), spread(waits, ".1%")]
        rows.append(row)
    shares = ["whole save / epoch", "wait / epoch"] if args.epoch_seconds else []
    report(args, [*HEADER, *shares], rows, results)


if __name__ == "__main__":
    main()
