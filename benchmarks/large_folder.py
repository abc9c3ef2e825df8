"""Start and resume a run on as many images as ImageNet has, on two processes: seconds, and memory
of each rank, on a folder and on a tar archive of it.

    python benchmarks/large_folder.py                        1,281,167 images
    python benchmarks/large_folder.py --before CHECKOUT      beside another checkout, on the folder
    python benchmarks/large_folder.py --images 20000         shorter

The images are hard links to one thousand JPEG files of 100x120 pixels, in 1,000 classes, so that
they take minutes to make, and no disk is read: a first start on a cold disk takes longer. Seconds
are those of a whole command, which trains one update, evaluates 16 images and writes a checkpoint.
A start has no cached results, a resume has those of the start. Memory is the most that a rank had
for itself, without what it shares with others. Below the table: the processor time that the index
of the archive takes, beside that of `tarfile` alone.
"""

import json
import os
import sys
import tarfile
import time
from io import BytesIO
from pathlib import Path
from threading import Event, Thread

import numpy as np
import psutil
from common import ROOT, flags, launch, machine_line, markdown, parse_flags, run, temporary
from PIL import Image
from tqdm import trange

CLASSES = 1000


def make_images(folder: Path, count: int) -> None:
    """images/train and images/val in `folder`, and images.tar with the same files."""
    random = np.random.default_rng(0)
    sources = []
    (folder / "sources").mkdir()
    for number in range(1000):
        coarse = Image.fromarray(random.integers(0, 256, (6, 5, 3), np.uint8))
        sources.append(folder / "sources" / f"{number}.jpg")
        coarse.resize((100, 120)).save(sources[-1])
    contents = [path.read_bytes() for path in sources]
    with tarfile.open(folder / "images.tar", "w") as archive:
        for split, images in (("train", count), ("val", CLASSES)):
            for number in trange(images, desc=split):
                name = f"{split}/n{number % CLASSES:04}/{number:07}.jpg"
                path = folder / "images" / name
                if number < CLASSES:
                    path.parent.mkdir(parents=True)
                os.link(sources[number % 1000], path)
                member = tarfile.TarInfo(name)
                member.size = len(contents[number % 1000])
                archive.addfile(member, BytesIO(contents[number % 1000]))
                archive.members = []


def measure(code: Path, data: Path, folder: Path, steps: int) -> tuple[float, float]:
    """Train until update `steps`; returns the seconds, and the most GB of a rank."""
    words = flags(data=data, model="mlp", image_size=104, global_batch_size=16, max_steps=steps)
    words += flags(output_dir=folder, cache_dir=folder / "cache", run_name="run", resume="auto")
    words += flags(threads=1, num_workers=0, max_eval_samples=16, save_every=1, report=False)
    most = [0]
    is_over = Event()

    def watch() -> None:
        while not is_over.wait(0.2):
            for process in psutil.Process().children(recursive=True):
                try:
                    memory = process.memory_info()
                    most[0] = max(most[0], memory.rss - memory.shared)
                except psutil.Error:
                    pass  # it has ended

    watching = Thread(target=watch)
    watching.start()
    try:
        _, seconds = run(
            [*launch(2), code / "train.py", *words], env={"CUDA_VISIBLE_DEVICES": "-1"}
        )
    finally:
        is_over.set()
        watching.join()
    return seconds, most[0] / 1e9


def index_seconds(archive: Path, folder: Path) -> tuple[float, float]:
    """The processor time of the index of an archive, and of `tarfile` alone."""
    sys.path.insert(0, str(ROOT))
    from utils.data.archive_index import read_index

    began = time.process_time()
    read_index([str(archive)], str(folder / "index"))
    ours = time.process_time() - began
    began = time.process_time()
    with tarfile.open(archive) as file:
        for _ in file:
            file.members = []
    return ours, time.process_time() - began


def main() -> None:
    before = (Path, "another checkout")
    images = (1_281_167, "training images")
    args = parse_flags(__doc__, rounds=None, before=before, images=images, json=(Path, "results"))
    sides = [("folder", ROOT, "images"), ("tar", ROOT, "images.tar")]
    if args.before:
        sides.insert(0, ("folder, before", args.before.resolve(), "images"))
    results = {}
    with temporary() as folder:
        began = time.perf_counter()
        make_images(folder, args.images)
        print(f"made in {time.perf_counter() - began:.0f} s", file=sys.stderr)
        for name, code, data in sides:
            place = folder / name.replace(", ", "-")
            for step, kind in ((1, "start"), (2, "resume")):
                results[f"{name}, {kind}"] = measure(code, folder / data, place, step)
                print(f"{name}, {kind}: {results[f'{name}, {kind}']}", file=sys.stderr, flush=True)
        index = index_seconds(folder / "images.tar", folder)
    rows = [(name, f"{s:.0f}", f"{memory:.2f}") for name, (s, memory) in results.items()]
    print(markdown(("data, command", "seconds", "GB of a rank"), rows))
    print(f"\nindex: {index[0]:.1f} s of processor time; tarfile alone: {index[1]:.1f} s")
    print(f"\n{args.images:,} images; {machine_line()}")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
