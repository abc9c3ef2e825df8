"""The data sets that need no files from the user: digits and synthetic."""

import re
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import psutil

from utils.config.settings import TrainConfig
from utils.data.order import fold_in
from utils.data.splits import Source, Split, fingerprint_of, whole_split
from utils.errors import UserError

SYNTHETIC_IMAGES = 1024  # distinct images of a synthetic data set; samples above this number share them


def open_digits(_rest: str, _config: TrainConfig) -> Source:
    """The 1,797 handwritten digits of scikit-learn, 8x8 pixels."""
    # The file that load_digits reads, without the slow import of scikit-learn.
    package = find_spec("sklearn")
    assert package is not None and package.origin is not None  # requirements.txt has it
    file = Path(package.origin).with_name("datasets") / "data" / "digits.csv.gz"
    *columns, target = np.loadtxt(file, delimiter=",", unpack=True)
    pixels = np.round(np.stack(columns, 1).reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    split = whole_split("train", pixels, target, fingerprint_of("digits", pixels.tobytes()))
    return Source({"train": lambda: split}, [str(i) for i in range(10)])


def open_synthetic(numbers: str, _config: TrainConfig) -> Source:
    """Generated images, optionally with CLASSESxSIZExCOUNT after the slash."""
    found = re.fullmatch(r"([0-9]{1,15})x([0-9]{1,15})x([0-9]{1,15})", numbers or "10x32x10000")
    if not found or min(map(int, found.groups())) < 1:
        raise UserError(
            f"--data synthetic/{numbers}: must be synthetic/CLASSESxSIZExCOUNT, each number at least 1",
            "for example synthetic/10x32x10000",
        )
    classes, size, count = map(int, found.groups())
    # Of the pixels; of the row, label and order of each sample; and of the names of the classes.
    needs = 3 * size * size * min(count, SYNTHETIC_IMAGES) + 40 * count + 100 * classes
    has = psutil.virtual_memory().total
    if needs > has:
        gigabytes = f"needs {needs / 1e9:.0f} GB of memory, and this machine has {has / 1e9:.0f} GB"
        raise UserError(f"--data synthetic/{numbers}: {gigabytes}", "lower these numbers")

    def make(name: str, count: int) -> Split:
        random = np.random.Generator(np.random.Philox(fold_in("synthetic", name)))
        distinct = min(count, SYNTHETIC_IMAGES)
        pixels = random.integers(0, 128, (distinct, 3, size, size), np.uint8)
        # Each class has a brighter band at a different height, so that a network can learn the classes.
        for row in range(distinct):
            band = row % classes * size // classes
            pixels[row, :, band : band + max(1, size // classes)] += 100
        rows = np.arange(count) % distinct
        return Split(name, pixels, rows % classes, rows, fingerprint_of("synthetic", name, numbers))

    openers = {"train": partial(make, "train", count), "test": partial(make, "test", max(1, count // 10))}
    return Source(openers, [str(i) for i in range(classes)])
