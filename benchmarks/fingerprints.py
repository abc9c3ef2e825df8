"""SHA-256 of the final weights of ten short runs, to show that a change of the code changes no
result.

    python benchmarks/fingerprints.py --cifar10 DIR --photos DIR --json before.json
    python benchmarks/fingerprints.py --cifar10 DIR --photos DIR --compare before.json

The first command on the old commit, the second on the new one.

--cifar10 is a folder with the parquet files of CIFAR-10, --photos an image folder. Each run has one
thread per process. The hash covers the weights, their average if there is one, and the last
evaluation, to five digits and without its duration. Hashes are only comparable on one machine with
the same libraries. Exits with code 1 if one differs.
"""

import csv
import hashlib
import json
import sys
from pathlib import Path

from common import (
    ROOT,
    flags,
    latest_checkpoint,
    launch,
    parse_flags,
    read_log,
    report,
    run,
    temporary,
)
from safetensors.numpy import load_file
from tqdm import tqdm

DIGITS = {"max_steps": 40, "log_every": 10, "eval_every": 20}
CIFAR = {
    "max_train_samples": 2000,
    "max_eval_samples": 500,
    "max_steps": 20,
    "log_every": 5,
    "eval_every": 20,
}
PHOTOS = {
    "image_size": 64,
    "max_steps": 6,
    "global_batch_size": 16,
    "log_every": 2,
    "num_workers": 1,
}
# Name: processes and settings. {cifar10}, {photos} and {labels} stand for data, {digits} for the
# folder of that run.
RUNS = {
    "digits": (1, DIGITS),
    "digits, accumulation": (
        2,
        DIGITS | {"model": "mlp", "grad_accum": 2, "clip_norm": 1, "optimizer": "adamw"},
    ),
    "microbatches on one process": (1, DIGITS | {"microbatches": 4, "label_smoothing": 0.1}),
    "microbatches on two": (2, DIGITS | {"microbatches": 4, "label_smoothing": 0.1}),
    "CIFAR-10, mixing and average": (
        2,
        CIFAR
        | {
            "data": "{cifar10}",
            "model": "fastnet",
            "mixup": 0.2,
            "cutmix": 1,
            "ema_decay": 0.9,
            "crop_padding": 4,
        },
    ),
    "CIFAR-10, policy": (
        1,
        CIFAR
        | {
            "data": "{cifar10}",
            "model": "mnist_cnn",
            "auto_augment": "trivialaugment",
            "random_erasing": 0.5,
        },
    ),
    "photographs": (1, PHOTOS | {"data": "{photos}", "model": "resnet18"}),
    "photographs, drop path": (
        2,
        PHOTOS
        | {
            "data": "{photos}",
            "model": "timm/test_vit",
            "optimizer": "muon",
            "drop_path": 0.1,
            "image_size": 160,
        },
    ),
    "multilabel": (
        2,
        PHOTOS
        | {
            "data": "{labels}",
            "task": "multilabel",
            "loss": "focal",
            "pos_weight": "balanced",
            "eval_fraction": 0.2,
        },
    ),
    "fine-tuning": (
        2,
        DIGITS
        | {"init_from": "{digits}", "freeze": "conv1", "layer_decay": 0.8, "optimizer": "adamw"},
    ),
}


def write_labels(photos: Path, path: Path) -> None:
    """A CSV file that gives each photograph the label of its folder, and every other one a second
    label.
    """
    images = sorted(path for path in photos.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "label"])
        for number, image in enumerate(images):
            writer.writerow([image.absolute(), image.parent.name + "|even" * (number % 2 == 0)])


def fingerprint(folder: Path) -> str:
    """The SHA-256 of a run's last weights and evaluation."""
    checkpoint, found = latest_checkpoint(folder), hashlib.sha256()
    for file in ("model.safetensors", "ema.safetensors"):
        tensors = load_file(checkpoint / file) if (checkpoint / file).exists() else {}
        for name in sorted(tensors):
            found.update(f"{name} {tensors[name].dtype} {tensors[name].shape}".encode())
            found.update(tensors[name].tobytes())
    last = [record for record in read_log(folder) if record["kind"] == "eval"][-1]
    for name in sorted(last.keys() - {"seconds", "time"}):
        value = last[name]
        found.update((f"{name} {value:.5g}" if isinstance(value, float) else str(value)).encode())
    return found.hexdigest()


def main() -> None:
    args = parse_flags(
        __doc__,
        ["cifar10", "photos"],
        rounds=1,
        cifar10=(Path, "folder with parquet files"),
        photos=(Path, "image folder"),
        compare=(Path, "a file that --json has written before"),
    )
    found: dict[str, str] = {}
    with temporary() as folder:
        write_labels(args.photos, folder / "labels.csv")
        places = {"cifar10": args.cifar10.absolute(), "photos": args.photos.absolute()}
        places |= {"labels": folder / "labels.csv", "digits": folder / "digits"}
        for name, (processes, settings) in tqdm(RUNS.items()):
            words = [
                word.format(**places) if word[0] == "{" else word for word in flags(**settings)
            ]
            run_name = name.replace(",", "").replace(" ", "-")
            own = flags(output_dir=folder, run_name=run_name, threads=1)
            run([*launch(processes), ROOT / "train.py", "--cpu", *words, *own])
            found[name] = fingerprint(folder / run_name)
    before = json.loads(args.compare.read_text())["results"] if args.compare else {}
    differs = [name for name in found if before and before.get(name) != found[name]]
    words = {name: "differs" if name in differs else "equal" * bool(before) for name in found}
    rows = [[name, RUNS[name][0], found[name][:16], words[name]] for name in found]
    report(args, ["run", "processes", "SHA-256", "" if not before else "before"], rows, found)
    sys.exit(1 if differs else 0)


if __name__ == "__main__":
    main()
