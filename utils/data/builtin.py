"""The data sets that need no files: digits and synthetic."""

import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import psutil

from utils.data.order import fold_in
from utils.data.splits import Source, Split, fingerprint_of, whole_split

SYNTHETIC_IMAGES = 1024  # distinct images of the synthetic set; more samples share them


def open_digits() -> Source:
    # What load_digits of scikit-learn reads; importing that takes longer than all else of a start but PyTorch.
    file = Path(find_spec("sklearn").origin).with_name("datasets") / "data" / "digits.csv.gz"
    *columns, target = np.loadtxt(file, delimiter=",", unpack=True)
    pixels = np.round(np.stack(columns, 1).reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    split = whole_split("train", pixels, target, fingerprint_of("digits", pixels.tobytes()))
    return Source({"train": lambda: split}, [str(i) for i in range(10)])


def open_synthetic(rest: str) -> Source:
    found = re.fullmatch(r"([0-9]{1,15})x([0-9]{1,15})x([0-9]{1,15})", rest or "10x32x10000")
    if not found or min(map(int, found.groups())) < 1:
        raise ValueError(f"--data synthetic/{rest}: write synthetic/CLASSESxSIZExCOUNT, as in synthetic/10x32x10000")
    classes, size, count = map(int, found.groups())
    _check_room(rest, classes, size, count)

    def make(name: str, count: int) -> Split:
        random = np.random.Generator(np.random.Philox(fold_in("synthetic", name)))
        distinct = min(count, SYNTHETIC_IMAGES)
        pixels = random.integers(0, 128, (distinct, 3, size, size), np.uint8)
        # A class is a brighter band, so that a network can learn something and a chart shows it.
        for row in range(distinct):
            band = row % classes * size // classes
            pixels[row, :, band : band + max(1, size // classes)] += 100
        rows = np.arange(count) % distinct
        return Split(name, pixels, rows % classes, rows, fingerprint_of("synthetic", name, rest))

    openers = {"train": lambda: make("train", count), "test": lambda: make("test", max(1, count // 10))}
    return Source(openers, [str(i) for i in range(classes)])


def _check_room(rest: str, classes: int, size: int, count: int) -> None:
    """Raise ValueError if a synthetic data set is above the limits or does not fit in the machine's memory."""
    for name, value, most in (("CLASSES", classes, 2**20), ("SIZE", size, 2**14), ("COUNT", count, 2**31 - 1)):
        if value > most:
            raise ValueError(f"--data synthetic/{rest[:80]}: {name} must be at most {most}")
    needs = 3 * size * size * min(count, SYNTHETIC_IMAGES) + 40 * count  # pixels; row, label and order of each sample
    has = psutil.virtual_memory().total
    if needs > has:
        raise ValueError(
            f"--data synthetic/{rest}: needs {needs / 1e9:.0f} GB of memory, and this machine has {has / 1e9:.0f} GB; "
            "lower SIZE or COUNT"
        )
