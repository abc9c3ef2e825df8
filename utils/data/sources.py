"""Where images come from: --data resolved to two splits and the names of the classes."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np

from utils.config import TrainConfig, expand
from utils.data.order import mix
from utils.data.splits import (
    EVAL_NAMES,
    Data,
    Files,
    Source,
    Split,
    check_labels,
    fingerprint_of,
    hold_out,
    listed,
    random_subset,
    renumber,
    whole_split,
)
from utils.data.tables import TABLE_FILES, hugging_face, load_hub, read_table_files
from utils.data.vision import open_torchvision, torchvision_class

SYNTHETIC_IMAGES = 1024  # distinct images of the synthetic set; more samples repeat them


def check_source(config: TrainConfig) -> None:
    """Raise ValueError when --data names nothing that exists; opens nothing."""
    name, (kind, _, rest) = config.data, config.data.partition("/")
    if kind == "torchvision":
        torchvision_class(rest)
    elif name != "digits" and kind != "synthetic" and not expand(name).exists():
        if name.startswith((".", "/", "~")) or name.count("/") != 1:  # else it may be on the Hub
            raise ValueError(f"--data {name}: no such file, folder or data set; --help lists what it takes")


def load_data(config: TrainConfig) -> Data:
    """Find the data set and its two splits; raises ValueError or OSError with the mend in its text."""
    source = _open(config)
    train, evaluation = _two_splits(source, config)
    for split in (train, evaluation):
        check_labels(split, len(source.class_names))
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


def load_split(config: TrainConfig, name: str | None, class_names: list[str]) -> Split:
    """One split to evaluate, its labels counted as in `class_names`.

    None means what the run evaluated on, "train" what it trained on, any other name that split of the data set.
    """
    source = _open(config)
    if name in (None, "train"):
        train, evaluation = _two_splits(source, replace(config, max_train_samples=None))
        split = evaluation if name is None else random_subset(train, config.max_eval_samples, config.seed)
    else:
        split = source.split(_known(source, name, "--split"))
        split = random_subset(split, config.max_eval_samples, config.seed)
    check_labels(split, len(source.class_names))
    return renumber(split, source.class_names, class_names)


class Repeated:
    """A few arrays standing in for many samples."""

    def __init__(self, arrays: np.ndarray, count: int):
        self.arrays, self.count = arrays, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> np.ndarray:
        return self.arrays[row % len(self.arrays)]


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
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = np.round(digits.images * (255 / 16)).astype(np.uint8)
    split = whole_split("train", pixels, digits.target, fingerprint_of("digits", pixels.tobytes()))
    return Source("digits", {"train": lambda: split}, [str(i) for i in range(10)])


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
        labels = np.arange(count) % distinct % classes
        return whole_split(name, Repeated(pixels, count), labels, fingerprint_of("synthetic", name, rest))

    openers = {"train": lambda: make("train", count), "test": lambda: make("test", max(1, count // 10))}
    return Source("synthetic", openers, [str(i) for i in range(classes)])


def _local(path: Path, config: TrainConfig) -> Source:
    if path.is_file() or any(any(path.glob(name)) for name in TABLE_FILES):
        return hugging_face(read_table_files(path), config)
    return _image_folder(path, config)


def _image_folder(path: Path, config: TrainConfig) -> Source:
    names = [name for name in ("train", *EVAL_NAMES) if (path / name).is_dir()]
    names += [name for name in (config.train_split, config.eval_split) if name and (path / name).is_dir()]
    folders = {name: path / name for name in dict.fromkeys(names)} or {"train": path}
    first = folders[config.train_split if config.train_split in folders else next(iter(folders))]
    class_names = sorted(child.name for child in first.iterdir() if child.is_dir())
    if not class_names:
        raise ValueError(f"{first}: no class folders in it; an image folder holds CLASS/IMAGE.jpg")

    def make(name: str) -> Split:
        return _folder_split(name, folders[name], class_names)

    return Source(path.name, {name: (lambda name=name: make(name)) for name in folders}, class_names)


def _folder_split(name: str, folder: Path, class_names: list[str]) -> Split:
    from torchvision.datasets.folder import IMG_EXTENSIONS

    number = {class_name: index for index, class_name in enumerate(class_names)}
    paths, labels, stamps = [], [], []
    for child in sorted(child for child in folder.iterdir() if child.is_dir()):
        if child.name not in number:
            raise ValueError(f"{child}: a class that the training split does not have")
        files = sorted(file for file in child.rglob("*") if file.suffix.lower() in IMG_EXTENSIONS)
        paths += [str(file) for file in files]
        labels += [number[child.name]] * len(files)
        stamps += [f"{file.relative_to(folder)}:{s.st_size}:{s.st_mtime_ns}" for file in files for s in [file.stat()]]
    if not paths:
        raise ValueError(f"{folder}: no images in it; an image folder holds CLASS/IMAGE.jpg")
    return whole_split(name, Files(paths), np.asarray(labels), fingerprint_of(str(folder.resolve()), *stamps))


def _train_name(source: Source, wanted: str | None) -> str:
    if wanted is not None:
        return _known(source, wanted, "--train_split")
    if "train" in source.openers:
        return "train"
    if len(source.openers) == 1:
        return next(iter(source.openers))
    raise ValueError(f"no split called train; choose one with --train_split out of {listed(source.openers)}")


def _eval_name(source: Source, train_name: str, wanted: str | None) -> str | None:
    if wanted is not None:
        return _known(source, wanted, "--eval_split")
    return next((name for name in EVAL_NAMES if name in source.openers and name != train_name), None)


def _known(source: Source, name: str, flag: str) -> str:
    if name not in source.openers:
        raise ValueError(f"{flag} {name}: no such split; there are {listed(source.openers)}")
    return name
