"""Find what --data names, and open it as the source of its splits.

To add a source, add a function `(rest, config)` that returns a `Source` (splits.py) to `SOURCES`. A
key is a name, a prefix that ends in a slash, or a file suffix such as ".csv". `rest` is the part of
--data after it, or a file's path.
"""

import os
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torchvision

from utils.config import Registry, require, suggestion
from utils.console import join_names
from utils.data.folders import image_folder, left_out_notes
from utils.data.listing import holds_archives, is_archive, visible_in
from utils.data.order import fold_in
from utils.data.parquet_files import has_tables, read_table_files
from utils.data.splits import EVAL_NAMES, Source, Split, fingerprint_of, whole_split
from utils.errors import UserError, one_line
from utils.files import expand
from utils.settings.data import DataSettings

# distinct images of a synthetic data set; samples above this number share them
SYNTHETIC_IMAGES = 1024
# torchvision keeps these in memory
TORCHVISION = ("MNIST", "FashionMNIST", "KMNIST", "CIFAR10", "CIFAR100")


def open_digits(_rest: str, _config: DataSettings) -> Source:
    """The 1,797 handwritten digits of scikit-learn, 8x8 pixels."""
    # The file that load_digits reads, without the slow import of scikit-learn.
    package = find_spec("sklearn")
    assert package and package.origin  # requirements.txt has it
    file = Path(package.origin).with_name("datasets") / "data" / "digits.csv.gz"
    *columns, target = np.loadtxt(file, delimiter=",", unpack=True)
    pixels = np.round(np.stack(columns, 1).reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    split = whole_split("train", pixels, target, fingerprint_of("digits", pixels))
    return Source({"train": lambda: split}, list("0123456789"))


def open_synthetic(numbers: str, _config: DataSettings) -> Source:
    """Generated images, optionally with CLASSESxSIZExCOUNT after the slash."""
    words = (numbers or "10x32x10000").split("x")
    sizes = [int(word) for word in words if all(map(str.isdecimal, words))]
    require(
        len(sizes) == 3 and min(sizes) > 0,
        f"--data synthetic/{numbers}: must be synthetic/CLASSESxSIZExCOUNT, each number at least 1",
        "for example synthetic/10x32x10000",
    )
    classes, size, count = sizes
    counts = {"train": count, "test": max(1, count // 10)}

    def make(name: str) -> Split:
        random = np.random.Generator(np.random.Philox(fold_in("synthetic", name)))
        distinct = min(counts[name], SYNTHETIC_IMAGES)
        pixels = random.integers(0, 128, (distinct, 3, size, size), np.uint8)
        # Each class has a brighter band at a different height, so that a network can learn the
        # classes.
        for row in range(distinct):
            band = row % classes * size // classes
            pixels[row, :, band : band + max(1, size // classes)] += 100
        rows = np.arange(counts[name]) % distinct
        return Split(name, pixels, rows % classes, rows, fingerprint_of("synthetic", name, numbers))

    return Source({name: partial(make, name) for name in counts}, [*map(str, range(classes))])


def open_torchvision(name: str, config: DataSettings) -> Source:
    """MNIST, FashionMNIST, KMNIST, CIFAR10 or CIFAR100 of torchvision, downloaded to --data_dir if
    it is missing.
    """
    cls = getattr(torchvision.datasets, name)
    root = str(expand(config.data_dir or f"{config.cache_dir}/torchvision"))
    try:
        # does nothing if the files are there
        sets = {
            split: cls(root, train=split == "train", download=True) for split in ("train", "test")
        }
    except Exception as error:  # of any class
        problem = f"not in {root}, and the download failed ({one_line(error)[:200]})"
        fix = "put it there, or choose another --data_dir"
        raise UserError(f"--data torchvision/{name}: {problem}", fix) from error

    def make(split: str) -> Split:
        pixels = np.asarray(sets[split].data)
        planes = pixels if pixels.ndim == 3 else pixels.transpose(0, 3, 1, 2)
        return whole_split(split, planes, sets[split].targets, fingerprint_of(name, split, pixels))

    class_names = [*map(str, sets["train"].classes)]
    return Source({split: partial(make, split) for split in sets}, class_names)


SOURCES = Registry(
    "data",
    {
        "digits": open_digits,
        "synthetic/": open_synthetic,
        "torchvision/": open_torchvision,
        ".csv": "utils.data.csv_file:open_csv",
        ".tsv": "utils.data.csv_file:open_csv",
        ".tar": "utils.data.archives:open_archives",
        ".zip": "utils.data.archives:open_archives",
    },
    others="a Hub id such as ylecun/mnist, an image folder, a folder of tar or zip files, a folder "
    "of parquet or arrow files, a save_to_disk folder",
)
# all other sources, also those of plug-ins, may have columns
_WITHOUT_COLUMNS = ("digits", "synthetic/", "torchvision/", ".tar", ".zip")


def _find(data: str) -> tuple[str, str]:
    """The key of SOURCES that --data matches, or "" if it is a path or a Hub id, and what follows
    the key.

    For a suffix, this is the path.
    """
    path = expand(data)
    for key in SOURCES:
        if data == key or (f"{data}/".startswith(key) and key.endswith("/")):
            return key, data[len(key) :]
        if key.startswith(".") and path.suffix.lower() == key and path.is_file():
            return key, str(path)
    if path.is_file() and is_archive(path.name):  # compressed, and refused with a fix
        return ".tar", str(path)
    return "", data


def absolute_data(name: str) -> str:
    """The value of --data with an absolute path, for use from any folder; other names are
    unchanged.
    """
    key = _find(name)[0]
    path = expand(name)
    if key.startswith("."):
        return os.path.abspath(path)  # the target of a link may have no suffix
    return str(path.resolve()) if not key and path.exists() else name


def has_columns(data: str) -> bool:
    """Whether the images and labels of this --data are columns of a table."""
    key = _find(data)[0]
    path = expand(data)
    if key:
        return key not in _WITHOUT_COLUMNS
    return not path.is_dir() or has_tables(path)


def is_image_folder(data: str) -> bool:
    """Whether --data names a folder of image files."""
    path = expand(data)
    is_folder = not _find(data)[0] and path.is_dir() and not has_tables(path)
    return is_folder and not holds_archives(path)


def check_source(config: DataSettings) -> None:
    """Raise ValueError if what --data names does not exist, or does not use a given --data_dir.

    It is not opened.
    """
    key, rest = _find(config.data)
    path = expand(config.data)
    is_torchvision = key == "torchvision/"
    problem = "--data_dir is for --data torchvision/NAME only"
    require(is_torchvision or not config.data_dir, problem, "name a folder of your own with --data")
    problem = f"--data {config.data}: no such"
    if is_torchvision and rest not in TORCHVISION:
        fix = f"use {', '.join(TORCHVISION)} (others are on the Hugging Face Hub)"
        raise UserError(f"{problem} data set", suggestion(rest, TORCHVISION, fix))
    may_be_hub_id = not config.data.startswith((".", "/", "~")) and config.data.count("/") == 1
    if not key and not path.exists() and not may_be_hub_id:
        names = [key for key in SOURCES if not key.startswith(".")]
        known = ", ".join(f"a {key} file" if key.startswith(".") else key for key in SOURCES)
        fix = suggestion(config.data, names, f"use {known}, {SOURCES.others}")
        raise UserError(f"{problem} file, folder or data set", fix)
    if not key and has_columns(config.data):
        # takes half a second; load_data would import it on one rank after the other
        import datasets  # noqa: F401


def open_source(config: DataSettings) -> Source:
    """The data set that --data names. Raises ValueError or OSError if it cannot be read."""
    key, rest = _find(config.data)
    path = expand(config.data)
    if key:
        source = SOURCES[key](rest, config)
        if not key.startswith(".") and path.exists():
            line = f"--data {config.data} is a bundled data set; for the folder of this name, use"
            source.notes = (f"{line} --data ./{config.data}",)
        return source
    if is_image_folder(config.data):
        source = image_folder(path, config)
        names = (entry.name for entry in visible_in(path))
        line = "archives beside folders of images are not read"
        source.notes += left_out_notes(path, {line: join_names(filter(is_archive, names))})
        return source
    if path.is_dir() and not has_tables(path):
        return SOURCES[".tar"](str(path), config)
    from utils.data.hf_datasets import load_hub, table_source

    return table_source(read_table_files(path), config) if path.exists() else load_hub(config)


def train_split_name(source: Source, wanted: str | None) -> str:
    """The split to train on: the `wanted` one, or train, or the only one."""
    if wanted is not None:
        return known_split(source, wanted, "--train_split")
    if "train" in source.openers:
        return "train"
    first = next(iter(source.openers))
    if len(source.openers) == 1 and first not in EVAL_NAMES:
        return first
    fix = f"set --train_split to one of {join_names(source.openers)}"
    raise UserError("no split called train", fix)


def eval_split_name(source: Source, train_name: str, wanted: str | None) -> str | None:
    """The split to evaluate on: the `wanted` one, or one of EVAL_NAMES besides `train_name`."""
    if wanted is not None:
        return known_split(source, wanted, "--eval_split")
    return next((n for n in EVAL_NAMES if n in source.openers and n != train_name), None)


def known_split(source: Source, name: str, flag: str) -> str:
    """The name of the split that `name`, or an alias, refers to.

    Raises ValueError, with `flag`, if there is none.
    """
    name = source.aliases.get(name, name)
    fix = f"use one of {join_names(source.openers)}"
    require(name in source.openers, f"{flag} {name}: no such split", fix)
    return name
