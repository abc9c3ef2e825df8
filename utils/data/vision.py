"""The classification data sets of torchvision, by class name."""

import inspect
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torchvision
from torchvision.datasets import MNIST

from utils.config.settings import TrainConfig
from utils.config.table import suggestion
from utils.data.splits import Files, Images, Source, Split, fingerprint_of, whole_split
from utils.errors import UserError, one_line
from utils.files import expand


class DecodedItems:
    """The images of a torchvision data set that returns only decoded images."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int):
        return self.dataset[row][0]


def open_torchvision(name: str, config: TrainConfig) -> Source:
    """The data set torchvision.datasets.NAME, downloaded to --data_dir if it is missing."""
    cls = torchvision_class(name)
    parameters = inspect.signature(cls).parameters
    root = expand(config.data_dir or str(Path(config.cache_dir) / "torchvision"))
    fixed = {"root": str(root)} if "root" in parameters else {}
    if name == "EMNIST":  # its parameter `split` selects a set of characters
        fixed["split"] = config.data_subset or "balanced"
    arguments: dict[str, dict[str, Any]] = {"train": {}}  # of each split
    if "train" in parameters or name == "EMNIST":
        arguments = {"train": {"train": True}, "test": {"train": False}}
    elif "split" in parameters:
        arguments = {split: {"split": split} for split in _split_names(cls, fixed)}
    class_names: list[str] = []

    def make(split: str) -> Split:
        dataset = _open_dataset(cls, {**fixed, **arguments[split]}, str(root))
        labels = _labels(dataset)
        if not class_names:
            known = getattr(dataset, "classes", None) or range(int(labels.max(initial=-1)) + 1)
            class_names.extend(", ".join(c) if isinstance(c, tuple) else str(c) for c in known)
        images = _images(dataset, len(labels), str(root))
        fingerprint = fingerprint_of(name, split, root.resolve(), labels.data, _sample_bytes(images))
        return whole_split(split, images, labels, fingerprint)

    return Source({split: partial(make, split) for split in arguments}, class_names)


def torchvision_class(name: str) -> type:
    """The class `torchvision.datasets.NAME`. Raises ValueError if there is none."""
    known = [name for name in torchvision.datasets.__all__ if _is_dataset(getattr(torchvision.datasets, name))]
    if name not in known:
        problem = f"--data torchvision/{name}: torchvision.datasets has no such data set"
        raise UserError(problem, suggestion(name, known, "choose a classification data set"))
    return getattr(torchvision.datasets, name)


def _is_dataset(value) -> bool:
    return inspect.isclass(value) and issubclass(value, torchvision.datasets.VisionDataset)


def _split_names(cls: type, fixed: Mapping[str, Any]) -> list[str]:
    """The valid values of the class's `split` parameter, which its error message for an invalid value lists."""
    try:
        cls(**fixed, split="")
    except Exception as error:
        valid = re.search(r"Valid values are (.*)", one_line(error))
        return re.findall(r"'([^']+)'", valid[1]) if valid else ["train", "test"]
    return ["train", "test"]


def _open_dataset(cls: type, arguments: Mapping[str, Any], root: str):
    can_download = "download" in inspect.signature(cls).parameters or issubclass(cls, MNIST)
    try:
        try:
            return cls(**arguments)
        except Exception:  # of any class, for files that are missing, damaged or partly extracted
            if not can_download:
                raise
        return cls(**arguments, download=True)
    except Exception as error:
        problem = f"not in {root}, and the download failed" if can_download else f"cannot be read in {root}"
        raise UserError(
            f"--data torchvision/{cls.__name__}: {problem} ({one_line(error)[:200]})",
            "put it there, or choose another --data_dir",
        ) from error


def _labels(dataset) -> np.ndarray:
    """The labels of all samples, int64 [N]. Raises ValueError if the data set has none."""
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
        what = f"--data torchvision/{type(dataset).__name__}: not a classification data set"
        raise UserError(f"{what} ({one_line(error)[:100]})", "choose another data set") from error


def _images(dataset, count: int, root: str) -> Images:
    """The images as an array, uint8 [N, H, W] or [N, C, H, W], or as files, if possible; else as DecodedItems."""
    pixels: Any = getattr(dataset, "data", None)
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
    return DecodedItems(dataset)


def _sample_bytes(images: Images) -> bytes:
    """The bytes of a few images, to detect that an in-memory data set has changed."""
    if not isinstance(images, np.ndarray):
        return b""
    return b"".join(np.ascontiguousarray(images[i]).tobytes() for i in np.linspace(0, len(images) - 1, 16).astype(int))
