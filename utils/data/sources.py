"""Where images come from: --data resolved to two splits and the names of the classes."""

import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from utils.config import TrainConfig, absolute_data, expand
from utils.data.folders import image_folder
from utils.data.order import mix
from utils.data.splits import (
    EVAL_NAMES,
    Data,
    Source,
    Split,
    fingerprint_of,
    hold_out,
    listed,
    printable,
    random_subset,
    renumber,
    whole_split,
)
from utils.data.tables import has_tables, hugging_face, load_hub, read_table_files
from utils.data.vision import open_torchvision, torchvision_class

SYNTHETIC_IMAGES = 1024  # distinct images of the synthetic set; more samples share them


def check_source(config: TrainConfig) -> None:
    """Raise ValueError when --data names nothing that exists; opens nothing."""
    _check_names(config)
    name, (kind, _, rest) = config.data, config.data.partition("/")
    path = expand(name)
    if kind == "torchvision":
        torchvision_class(rest)
    elif name == "digits" or kind == "synthetic":
        return
    elif not path.exists() and (name.startswith((".", "/", "~")) or name.count("/") != 1):  # else it may be on the Hub
        raise ValueError(f"--data {name}: no such file, folder or data set; --help lists what it takes")
    elif not path.is_dir() or has_tables(path):
        import datasets  # noqa: F401  takes half a second: here for all ranks at once, in load_data for one by one


def _check_names(config: TrainConfig) -> None:
    """Raise ValueError for a path that config.yaml cannot hold: the run could not be resumed."""
    for name, value in (vars(config) | {"data": absolute_data(config.data)}).items():
        if isinstance(value, str) and not value.isascii() and value.encode("utf-8", "replace").decode() != value:
            raise ValueError(f"--{name} {printable(value)}: this name is not UTF-8; rename it")


def load_data(config: TrainConfig) -> Data:
    """Find the data set and its two splits; raises ValueError or OSError with the mend in its text."""
    source = _open(config)
    train, evaluation = _two_splits(source, config)
    if len(source.class_names) < 2:
        raise ValueError(f"--data {config.data} has one class, {listed(source.class_names)}; give at least two")
    return Data(train, evaluation, source.class_names)


def _two_splits(source: Source, config: TrainConfig) -> tuple[Split, Split]:
    """What to train on and what to evaluate on."""
    train_name = _train_name(source, config.train_split)
    train = source.split(train_name)
    eval_name = None if config.eval_fraction else _eval_name(source, train_name, config.eval_split)
    if eval_name is None:
        train, evaluation = hold_out(train, config.eval_fraction or 0.1, config.seed)
    else:
        evaluation = source.split(eval_name)
    train = random_subset(train, config.max_train_samples, config.seed)
    return train, random_subset(evaluation, config.max_eval_samples, config.seed)


def load_split(config: TrainConfig, name: str | None, class_names: list[str], own_data: bool = True) -> Split:
    """One split to evaluate, its labels counted as in `class_names`.

    Of the run's `own_data`, None means what the run evaluated on and "train" what it trained on, hold-outs included.
    Of other data, None means its evaluation split, or all there is if it has only one. Any other name is that split.
    """
    source = _open(config)
    if own_data and name in (None, "train"):
        train, evaluation = _two_splits(source, replace(config, max_train_samples=None, max_eval_samples=None))
        split = train if name == "train" else evaluation
    else:
        name = name or _eval_name(source, "", None) or _train_name(source, None)
        split = source.split(_known(source, name, "--split"))
    return renumber(random_subset(split, config.max_eval_samples, config.seed), source.class_names, class_names)


def _open(config: TrainConfig) -> Source:
    name = config.data
    kind, _, rest = name.partition("/")
    if name == "digits":
        return _digits()
    if kind == "synthetic":
        return _synthetic(rest)
    if kind == "torchvision":
        return open_torchvision(rest, config)
    path = expand(name)
    return _local(path, config) if path.exists() else load_hub(config)


def _digits() -> Source:
    # What load_digits of scikit-learn reads; importing that takes longer than all else of a start but PyTorch.
    file = Path(find_spec("sklearn").origin).with_name("datasets") / "data" / "digits.csv.gz"
    *columns, target = np.loadtxt(file, delimiter=",", unpack=True)
    pixels = np.round(np.stack(columns, 1).reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    split = whole_split("train", pixels, target, fingerprint_of("digits", pixels.tobytes()))
    return Source({"train": lambda: split}, [str(i) for i in range(10)])


def _synthetic(rest: str) -> Source:
    found = re.fullmatch(r"(\d+)x(\d+)x(\d+)", rest or "10x32x10000")
    if not found or min(map(int, found.groups())) < 1:
        raise ValueError(f"--data synthetic/{rest}: write synthetic/CLASSESxSIZExCOUNT, as in synthetic/10x32x10000")
    classes, size, count = map(int, found.groups())

    def make(name: str, count: int) -> Split:
        random = np.random.Generator(np.random.Philox(mix("synthetic", name)))
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


def _local(path: Path, config: TrainConfig) -> Source:
    if path.is_file() or has_tables(path):
        return hugging_face(read_table_files(path), config)
    return image_folder(path, config)


def _train_name(source: Source, wanted: str | None) -> str:
    if wanted is not None:
        return _known(source, wanted, "--train_split")
    if "train" in source.openers:
        return "train"
    if len(source.openers) == 1 and not set(source.openers) & set(EVAL_NAMES):
        return next(iter(source.openers))
    raise ValueError(f"no split called train; choose one with --train_split out of {listed(source.openers)}")


def _eval_name(source: Source, train_name: str, wanted: str | None) -> str | None:
    if wanted is not None:
        return _known(source, wanted, "--eval_split")
    return next((name for name in EVAL_NAMES if name in source.openers and name != train_name), None)


def _known(source: Source, name: str, flag: str) -> str:
    name = source.aliases.get(name, name)
    if name not in source.openers:
        raise ValueError(f"{flag} {name}: no such split; there are {listed(source.openers)}")
    return name
