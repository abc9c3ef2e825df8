"""torchvision's classification data sets, by class name."""

import difflib
import inspect
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torchvision
from torchvision.datasets import MNIST

from utils.config.settings import TrainConfig
from utils.data.splits import Files, Source, Split, fingerprint_of, whole_split
from utils.errors import one_line
from utils.files import expand


class Items:
    """The images of a torchvision data set, which reads and decodes by itself."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int):
        return self.dataset[row][0]


def open_torchvision(name: str, config: TrainConfig) -> Source:
    """The data set `torchvision.datasets.NAME`, read from --data_dir and downloaded there if it is missing."""
    cls = torchvision_class(name)
    parameters = inspect.signature(cls).parameters
    root = expand(config.data_dir or str(Path(config.cache_dir) / "torchvision"))
    fixed = {"root": str(root)} if "root" in parameters else {}
    if name == "EMNIST":  # what others call `split` is a choice of characters here
        fixed["split"] = config.data_subset or "balanced"
    if "train" in parameters or name == "EMNIST":
        names = {"train": {"train": True}, "test": {"train": False}}
    elif "split" in parameters:
        names = {split: {"split": split} for split in _torchvision_splits(cls, fixed)}
    else:
        names = {"train": {}}
    class_names: list[str] = []

    def make(split: str) -> Split:
        dataset = _torchvision_dataset(cls, {**fixed, **names[split]}, str(root))
        labels = _torchvision_labels(dataset)
        if not class_names:
            known = getattr(dataset, "classes", None) or range(int(labels.max(initial=-1)) + 1)
            class_names.extend(", ".join(c) if isinstance(c, tuple) else str(c) for c in known)
        images = _torchvision_images(dataset, len(labels), str(root))
        fingerprint = fingerprint_of(name, split, root.resolve(), labels.data, _sample_bytes(images))
        return whole_split(split, images, labels, fingerprint)

    return Source({split: (lambda split=split: make(split)) for split in names}, class_names)


def torchvision_class(name: str) -> type:
    """The class `torchvision.datasets.NAME`; ValueError when there is none."""
    known = {n.lower(): n for n in torchvision.datasets.__all__ if _is_dataset(getattr(torchvision.datasets, n))}
    if name not in known.values():
        near = [known[n] for n in difflib.get_close_matches(name.lower(), known, n=3)]
        fix = f"; did you mean {' or '.join(near)}" if near else ""
        raise ValueError(f"--data torchvision/{name}: torchvision.datasets has no such data set{fix}")
    return getattr(torchvision.datasets, name)


def _is_dataset(value) -> bool:
    return inspect.isclass(value) and issubclass(value, torchvision.datasets.VisionDataset)


def _torchvision_splits(cls: type, fixed: dict) -> list[str]:
    """The names that the class's `split` parameter takes, which it tells when it is given another."""
    try:
        cls(**fixed, split="")
    except Exception as error:
        told = re.search(r"Valid values are (.*)", one_line(error))
        return re.findall(r"'([^']+)'", told[1]) if told else ["train", "test"]
    return ["train", "test"]


def _torchvision_dataset(cls: type, arguments: dict, root: str):
    what = f"--data torchvision/{cls.__name__}"
    try:
        return cls(**arguments)
    except Exception as error:  # of many kinds: missing, damaged or half-extracted files
        if "download" not in inspect.signature(cls.__init__).parameters and not issubclass(cls, MNIST):
            raise ValueError(f"{what}: not readable in {root} ({one_line(error)[:200]}); see --data_dir") from error
    try:
        return cls(**arguments, download=True)
    except Exception as error:
        raise ValueError(
            f"{what}: not in {root}, and downloading it failed ({one_line(error)[:200]}); "
            "put it there or point --data_dir at it"
        ) from error


def _torchvision_labels(dataset) -> np.ndarray:
    try:
        for attribute in ("targets", "labels", "_labels"):
            values = getattr(dataset, attribute, None)
            if values is not None and np.shape(values) == (len(dataset),):
                return np.asarray(values, dtype=np.int64)
        for attribute in ("samples", "_samples"):
            pairs = getattr(dataset, attribute, None)
            if pairs is not None and len(pairs) == len(dataset):
                return np.asarray([pair[1] for pair in pairs], dtype=np.int64)
        return np.asarray([int(dataset[i][1]) for i in range(len(dataset))], dtype=np.int64)
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        raise ValueError(
            f"--data torchvision/{type(dataset).__name__}: not a classification data set ({one_line(error)[:100]})"
        ) from error


def _torchvision_images(dataset, count: int, root: str) -> Sequence:
    """Its array of uint8 [N, H, W] or [N, C, H, W] or its image files, if it has either; else the data set itself."""
    pixels = getattr(dataset, "data", None)
    if hasattr(pixels, "shape") and len(pixels) == count and len(pixels.shape) in (3, 4):
        pixels = np.asarray(pixels)
        if pixels.dtype == np.uint8:
            is_planes = pixels.ndim == 3 or pixels.shape[-1] not in (1, 3)
            return pixels if is_planes else pixels.transpose(0, 3, 1, 2)
    for attribute in ("samples", "_samples", "_image_files", "_images"):
        items = getattr(dataset, attribute, None) or []
        paths = [item[0] if isinstance(item, tuple) else item for item in items]
        if len(paths) == count and all(isinstance(path, str | Path) for path in paths):
            return Files([str(path) for path in paths], root if all(str(p).startswith(root) for p in paths) else "")
    return Items(dataset)


def _sample_bytes(images: Sequence) -> bytes:
    """A few images' bytes: enough to notice that an in-memory data set is another one."""
    if not isinstance(images, np.ndarray):
        return b""
    return b"".join(np.ascontiguousarray(images[i]).tobytes() for i in np.linspace(0, len(images) - 1, 16).astype(int))
