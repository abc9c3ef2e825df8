"""Whether one commit resumes the checkpoints of another, with the bits of a run that was never
stopped.

    python benchmarks/resume_between.py OLD NEW
    python benchmarks/resume_between.py OLD . --cases plain,folds    this folder, two cases

OLD and NEW are commits, or folders of the project. OLD trains each case from beginning to end on
two processes, and keeps the checkpoint of update 6, in the middle of an epoch. NEW resumes from it
on two processes and on one, with the settings of the checkpoint. On two it reads the cache of OLD,
on one it computes cached features again. Nothing is downloaded, and no GPU is used.

* same bits: weights, their average, the optimizer's state, and each logged number except times are
  those of the whole run of OLD. Promised on the same number of processes, and with --microbatches
  on any number.
* to rounding: the data is the same, and each loss differs by at most 1e-5 of its value from that of
  the whole run. Each update is logged, so its loss shows that its samples are the same.

Seen in November 2026, when 08c08e3a resumed 9f4d6528 (torch 2.15, two AVX2 cores): the same bits in
all cases, also on one process, except FSDP2 on one process, which agreed to rounding.

Bits are only comparable on one machine with the same libraries. Exits with code 1 on a difference.
"""

import argparse
import hashlib
import json
import shlex
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet
import torch
from common import (
    ROOT,
    flags,
    latest_checkpoint,
    machine_line,
    markdown,
    read_log,
    run,
    temporary,
)
from PIL import Image
from safetensors.torch import load_file

STOP, STEPS = 6, 12
SAME, CLOSE = "same bits", "to rounding"
BOTH = f"--max_steps {STEPS} --save_every {STOP} --keep all --log_every 1 --eval_every 4"
BOTH += " --report false"
# four updates an epoch, of which the last is smaller
SMALL = "--max_train_samples 230 --global_batch_size 60"
PHOTOS = "--global_batch_size 16 --min_scale 0.3 --flip"
SOURCE = f"{PHOTOS} --data FOLDER/photos --model timm/test_resnet --image_size 32"
# Name: what the table says, and flags. FOLDER stands for the folder of photographs and runs.
CASES = {
    "plain": ("plain", f"{SMALL} --data digits"),
    "mixing": (
        "average, Mixup and CutMix",
        f"{SMALL} --data synthetic/5x32x300 --crop_padding 2 --optimizer adamw --lr 0.001 "
        "--ema_decay 0.9 --mixup 0.4 --cutmix 1",
    ),
    "microbatches": (
        "--microbatches 4",
        f"{SMALL} --data digits --microbatches 4 --ema_decay 0.9 --clip_norm 1",
    ),
    "features": (
        "cached features",
        f"{PHOTOS} --data FOLDER/photos --init_from FOLDER/source --image_size 100 "
        "--freeze backbone --feature_views 2 --ema_decay 0.9",
    ),
    "fsdp": (
        "FSDP2",
        f"{SMALL} --data digits --model timm/test_vit --image_size 32 --ema_decay 0.9 "
        "--model_args '{img_size: 32}' --optimizer adamw --lr 0.002",
    ),
    "folds": (
        "CSV file, fold 1/3",
        f"{PHOTOS} --data FOLDER/photos.csv --fold 1/3 --model mnist_cnn --image_size 64",
    ),
}
TIMES = {"seconds", "images_per_second", "data_wait", "computing", "waiting"}


def code_of(name: str, folder: Path) -> Path:
    """A folder of the project, or the files of a commit, written to `folder`."""
    if (Path(name) / "train.py").exists():
        return Path(name).resolve()
    archive = folder.with_suffix(".tar")
    subprocess.run(["git", "-C", ROOT, "archive", "--output", archive, name], check=True)
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    return folder


def write_photos(folder: Path) -> None:
    """photos/train and photos/val with 60 and 30 images, and photos.csv, which lists them all."""
    rows, random = ["path,label"], np.random.default_rng(0)
    for number in range(90):
        label = "abc"[number % 3]
        path = folder / "photos" / ("train" if number < 60 else "val") / label / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse = random.integers(0, 256, (6, 5, 3), np.uint8)
        Image.fromarray(coarse).resize((110, 130), Image.Resampling.BICUBIC).save(path, quality=90)
        rows.append(f"{path.relative_to(folder)},{label}")
    (folder / "photos.csv").write_text("\n".join(rows) + "\n")


def train(code: Path, processes: int, place: Path, config: str, words: str) -> Path:
    """Train with this code in the run folder `place`, and return it."""
    folder, command, began = place.parent, [sys.executable], time.perf_counter()
    if processes > 1:
        config_file = code / f"accelerate_configs/{config}.yaml"
        command += ["-m", "accelerate.commands.launch", *flags(config_file=config_file)]
    command += [code / "train.py", *shlex.split(words.replace("FOLDER", str(folder)))]
    cache = folder / f"cache-{processes}"
    command += flags(output_dir=folder, run_name=place.name, cache_dir=cache)
    run([*command, *flags(threads=1, num_workers=1)], env={"CUDA_VISIBLE_DEVICES": "-1"})
    print(f"{place.name}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    return place


def logged(run_folder: Path) -> list[dict]:
    """What a run logged of the updates and evaluations after STOP, without times."""
    log = [record for record in read_log(run_folder) if record["kind"] in ("train", "eval")]
    return [
        {k: v for k, v in each.items() if k not in TIMES} for each in log if each["step"] > STOP
    ]


def parts(run_folder: Path) -> dict[str, str]:
    """The SHA-256 of the tensors in each file of a run's last checkpoint, and that of its log."""
    checkpoint = latest_checkpoint(run_folder)
    optimizer = torch.load(checkpoint / "optimizer.bin", weights_only=True)
    state = {}  # by the names of parameters: FSDP2 saves it under other keys
    for group in optimizer["param_groups"]:
        for name, key in zip(group["param_names"], group["params"], strict=True):
            values = optimizer["state"].get(key, {})
            state |= {f"{name} {each}": torch.as_tensor(values[each]) for each in values}
    tensors = {"optimizer.bin": state}
    for path in checkpoint.glob("*.safetensors"):
        tensors[path.name] = load_file(path)
    found = {"log": hashlib.sha256(json.dumps(logged(run_folder), sort_keys=True).encode())}
    for file, values in tensors.items():
        found[file] = hashlib.sha256()
        for name in sorted(values):
            value = values[name].contiguous()
            found[file].update(f"{name} {value.dtype} {value.shape}".encode())
            found[file].update(value.numpy().tobytes())
    return {name: digest.hexdigest() for name, digest in found.items()}


def samples(run_folder: Path) -> dict:
    """What the last checkpoint says of the data: the samples of each split, and the position."""
    checkpoint = latest_checkpoint(run_folder)
    state = json.loads((checkpoint / "state.json").read_text())
    rows = pyarrow.parquet.read_table(checkpoint / "samples.parquet").to_pylist()
    place = [state["state"][name] for name in ("step", "epoch", "position")]
    return {"rows": rows, "count": state["samples"], "labels": state["labels"], "place": place}


def compare(whole: Path, resumed: Path, promised: str) -> str:
    """What the table says of a resumed run and the whole one."""
    ours, theirs = logged(resumed), logged(whole)
    started = [record["step"] for record in read_log(resumed) if record["kind"] == "start"]
    keys = [[(r["kind"], r["step"], r.get("weights")) for r in log] for log in (ours, theirs)]
    if started != [STOP] or keys[0] != keys[1] or keys[0][-1][1] != STEPS:
        return "DIFFERENT: updates"
    if samples(resumed) != samples(whole):
        return "DIFFERENT: samples"
    found, expected = parts(resumed), parts(whole)
    names = [name for name in found | expected if found.get(name) != expected.get(name)]
    if not names:
        return SAME
    off = max(abs(a["loss"] / b["loss"] - 1) for a, b in zip(ours, theirs, strict=True))
    if promised == CLOSE and off <= 1e-5:
        return f"{CLOSE}, at most {off:.0e}"
    return f"DIFFERENT: {', '.join(sorted(names))}; losses by up to {off:.0e}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", help="commit or folder that writes the checkpoints")
    parser.add_argument("new", help="commit or folder that resumes them")
    parser.add_argument(
        "--cases", default=",".join(CASES), help="cases to try (default: %(default)s)"
    )
    args, rows, began = parser.parse_args(), [], time.perf_counter()
    if unknown := set(args.cases.split(",")) - set(CASES):
        parser.error(f"unknown cases: {', '.join(sorted(unknown))}")
    with temporary() as folder:
        old, new = code_of(args.old, folder / "old"), code_of(args.new, folder / "new")
        write_photos(folder)
        for case in args.cases.split(","):
            label, words = CASES[case]
            config = "fsdp" if case == "fsdp" else "2cpu"
            if case == "features":
                train(old, 2, folder / "source", config, f"{BOTH} {SOURCE}")
            whole = train(old, 2, folder / f"{case}-whole", config, f"{BOTH} {words}")
            resume = f"--resume FOLDER/{case}-whole/checkpoints/step-{STOP:08}"
            for processes in (2, 1):
                resumed = train(new, processes, folder / f"{case}-on-{processes}", config, resume)
                promised = SAME if processes == 2 or case == "microbatches" else CLOSE
                seen = compare(whole, resumed, promised)
                rows.append([label, f"2, then {processes}", promised, seen])
    print(markdown(["case", "processes", "promised", f"{args.new} resumes {args.old}"], rows))
    print(f"\n{machine_line()}; {time.perf_counter() - began:.0f} s")
    sys.exit(any("DIFFERENT" in seen for *_, seen in rows))


if __name__ == "__main__":
    main()
