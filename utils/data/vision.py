"""torchvision's classification data sets, by class name."""

import inspect
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torchvision

from utils.config import TrainConfig, expand
from utils.data.splits import Source, Split, fingerprint_of, whole_split
from utils.errors import one_line


class Items:
    """The images of a torchvision data set, which reads and decodes by itself."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int):
        return self.dataset[row][0]


def open_torchvision(name: str, config: TrainConfig) -> Source:

    cls = torchvision_class(name)
    parameters = inspect.signature(cls).parameters
    root = expand(config.data_dir or str(Path(config.cache_dir) / "torchvision"))
    fixed = {"root": str(root)} if "root" in parameters else {}
    if "target_types" in parameters:
        fixed["target_types"] = "category"
    if "train" in parameters:
        names = {"train": {"train": True}, "test": {"train": False}}
    elif "split" in parameters:
        names = {split: {"split": split} for split in _torchvision_splits(cls)}
    else:
        names = {"train": {}}
    class_names: list[str] = []

    def make(split: str) -> Split:
        dataset = _torchvision_dataset(cls, {**fixed, **names[split]}, "download" in parameters)
        labels = _torchvision_labels(dataset)
        known = [str(c) for c in getattr(dataset, "classes", [])]
        if not class_names:
            class_names.extend(known or [str(i) for i in range(int(labels.max()) + 1)])
        pixels = getattr(dataset, "data", None)
        images = np.asarray(pixels) if hasattr(pixels, "shape") and len(pixels) == len(labels) else Items(dataset)
        if isinstance(images, np.ndarray) and images.ndim == 4 and images.shape[-1] in (1, 3):
            images = images.transpose(0, 3, 1, 2)
        print_of = fingerprint_of(name, split, str(root), labels.tobytes(), _sample_bytes(images))
        return whole_split(split, images, labels, print_of)

    return Source(name, {split: (lambda split=split: make(split)) for split in names}, class_names)


def torchvision_class(name: str) -> type:
    """The class `torchvision.datasets.NAME`; ValueError when there is none."""
    cls = getattr(torchvision.datasets, name, None)
    if not (inspect.isclass(cls) and issubclass(cls, torchvision.datasets.VisionDataset)):
        raise ValueError(f"--data torchvision/{name}: torchvision.datasets has no such data set")
    return cls


def _torchvision_splits(cls) -> list[str]:
    """The names that the class's `split` parameter takes: those its own source checks against, common ones else."""
    text = inspect.getsource(cls)
    candidates = ("train", "trainval", "validation", "valid", "val", "test", "extra", "unlabeled")
    found = [name for name in candidates if re.search(rf"[\"']{name}[\"']", text)]
    return [name for name in found if name != "unlabeled"] or ["train", "test"]


def _torchvision_dataset(cls, arguments: dict, downloads: bool):
    try:
        return cls(**arguments)
    except (RuntimeError, OSError):
        if not downloads:
            raise
    try:
        return cls(**arguments, download=True)
    except Exception as error:
        raise ValueError(
            f"--data torchvision/{cls.__name__}: not in {arguments.get('root')}, and downloading it failed "
            f"({one_line(error)}); put it there or point --data_dir at it"
        ) from error


def _torchvision_labels(dataset) -> np.ndarray:
    for attribute in ("targets", "labels", "_labels"):
        values = getattr(dataset, attribute, None)
        if values is not None and len(values) == len(dataset):
            return np.asarray(values, dtype=np.int64)
    for attribute in ("samples", "_samples"):
        pairs = getattr(dataset, attribute, None)
        if pairs is not None and len(pairs) == len(dataset):
            return np.asarray([pair[1] for pair in pairs], dtype=np.int64)
    return np.asarray([int(dataset[i][1]) for i in range(len(dataset))], dtype=np.int64)


def _sample_bytes(images: Sequence) -> bytes:
    """A few images' bytes: enough to notice that an in-memory data set is another one."""
    if not isinstance(images, np.ndarray):
        return b""
    return b"".join(np.ascontiguousarray(images[i]).tobytes() for i in np.linspace(0, len(images) - 1, 16).astype(int))
