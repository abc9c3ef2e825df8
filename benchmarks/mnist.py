"""Make MNIST in both forms that the benchmarks read: IDX files, and parquet files with PNG images.

    python benchmarks/mnist.py build/mnist                      torchvision downloads it
    python benchmarks/mnist.py build/mnist --parquet FOLDER     from the files of the Hub
    python benchmarks/mnist.py build/mnist --generated          without a network

FOLDER has train-*.parquet and test-*.parquet, as the data set ylecun/mnist on the Hub. --generated
writes the images of `--data synthetic/10x28x60000` in grey, in place of MNIST; this is enough to
compare speeds. torchvision.datasets.MNIST(build/mnist) reads the IDX files.
"""

import argparse
import io
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import datasets
import numpy as np
import pandas
from common import ROOT
from datasets import ClassLabel, Dataset, Features
from PIL import Image
from torchvision.datasets import MNIST
from tqdm import tqdm

sys.path.insert(0, str(ROOT))
from utils.data.sources import open_synthetic
from utils.settings.data import DataSettings

PREFIXES = {"train": "train", "test": "t10k"}  # of the IDX files
NOTE = "about.txt"  # beside the files: what they are
# Each split, its images, uint8 [n, 28, 28], and its labels, [n].
Splits = Iterator[tuple[str, np.ndarray, np.ndarray]]


def downloaded(folder: Path) -> Splits:
    """The images that torchvision downloads."""
    for split in PREFIXES:
        found = MNIST(folder, train=split == "train", download=True)
        yield split, found.data.numpy(), found.targets.numpy()


def from_parquet(folder: Path) -> Splits:
    """The images in the Hub's files."""
    for split in PREFIXES:
        frame = pandas.read_parquet(next(folder.rglob(f"{split}-*.parquet")))
        opened = (Image.open(io.BytesIO(stored["bytes"])) for stored in frame["image"])
        yield split, np.stack([*map(np.asarray, opened)]), frame["label"].to_numpy()


def generated(count: int = 60_000) -> Splits:
    """Generated images, of which a tenth more are for testing."""
    source = open_synthetic(f"10x28x{count}", DataSettings())
    for split in PREFIXES:
        found = source.split(split)
        pixels = np.stack([found.images[row][0] for row in range(len(found.images))])
        yield split, pixels[found.image_index], found.labels


def make(folder: Path, parquet: Path | None = None, generate: bool = False) -> None:
    """Write both forms of MNIST, from `parquet`, generated, or downloaded."""
    if generate:
        write(folder, generated(), "generated images in place of MNIST")
    elif parquet:
        write(folder, from_parquet(parquet), "MNIST")
    else:
        write(folder, downloaded(folder), "MNIST")


def write(folder: Path, splits: Splits, note: str) -> None:
    """Write both forms of these images, and what they are into a text file."""
    (folder / "MNIST/raw").mkdir(parents=True, exist_ok=True)
    for split, images, labels in splits:
        labels = labels.astype(np.uint8)
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
            target = folder / "MNIST/raw" / f"{PREFIXES[split]}-{kind}-ubyte"
            target.write_bytes(header + array.tobytes())
        rows = {"image": [*map(as_png, tqdm(images, split))], "label": labels.astype(int)}
        features = Features(image=datasets.Image(), label=ClassLabel(names=[*"0123456789"]))
        Dataset.from_dict(rows, features).to_parquet(folder / f"{split}-00000-of-00001.parquet")
    (folder / NOTE).write_text(note + "\n")


def as_png(image: np.ndarray) -> dict[str, bytes | None]:
    """An image as a PNG file in a row of a parquet file."""
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return {"bytes": file.getvalue(), "path": None}


def ready(folder: Path) -> str:
    """What the images of the folder are. If it has none, MNIST is downloaded, or images are
    generated if there is no network.
    """
    if not (folder / NOTE).exists():
        try:
            make(folder)
        except (OSError, RuntimeError) as error:  # torchvision raises both
            print(f"MNIST was not downloaded ({error}); images are generated", file=sys.stderr)
            make(folder, generate=True)
    return (folder / NOTE).read_text().strip()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="new folder, such as build/mnist")
    parser.add_argument("--parquet", type=Path, help="the Hub's files, in place of a download")
    parser.add_argument("--generated", action="store_true", help="generate images instead")
    args = parser.parse_args()
    if args.parquet or args.generated:
        make(args.folder, args.parquet, args.generated)
    print(f"{args.folder}: {ready(args.folder)}")


if __name__ == "__main__":
    main()
