"""Small data sets for the tests, written on the fly: images, folders, tables, IDX files."""

import io
import struct
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from PIL import Image

CPU = SimpleNamespace(device=torch.device("cpu"), threads=1)  # what a loader asks of the ranks


def pictures(
    count: int, size: tuple[int, int] = (8, 8), channels: int = 3, seed: int = 0
) -> np.ndarray:
    """Random pixels: uint8 [count, H, W, 3], or [count, H, W] for one channel."""
    shape = (count, *size, 3) if channels == 3 else (count, *size)
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def smooth(height: int, width: int) -> np.ndarray:
    """A colour picture without edges, as JPEG compresses it well: uint8 [H, W, 3]."""
    y, x = np.mgrid[0:height, 0:width]
    planes = (
        x * 255 // max(1, width - 1),
        y * 255 // max(1, height - 1),
        (x + y) * 255 // max(1, width + height - 2),
    )
    return np.stack(planes, -1).astype(np.uint8)


def encoded(image, kind: str, **options) -> bytes:
    """An array or a Pillow image as a file's bytes."""
    file = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(
        file, kind, **options
    )
    return file.getvalue()


def heic(orientation: int = 6) -> bytes:
    """`smooth(24, 40)` as a phone stores it that was turned: 1, 3, 6 or 8, as in EXIF data.

    The rotation stands in the box `irot`, in quarters anticlockwise, and again in the EXIF data.
    pi-heif cannot encode, so turned.heic was made once with pillow-heif 1.8.1, in an environment of
    its own: `image.save("turned.heic", quality=95, exif=exif.tobytes())`, with orientation 6.
    """
    raw = Path(__file__).with_name("turned.heic").read_bytes()
    tag = b"\x01\x12\0\3\0\0\0\1\0"
    raw = raw.replace(b"irot\3", b"irot" + bytes([(1, 8, 3, 6).index(orientation)]))
    return raw.replace(tag + b"\6", tag + bytes([orientation]))


def image_folder(
    root: str | Path, counts: dict[str, int], size=(8, 8), kind: str = "png", seed: int = 0
) -> list[Path]:
    """Write root/CLASS/N.kind with so many images for each class; returns their paths in order."""
    images, paths = iter(pictures(sum(counts.values()), size, seed=seed)), []
    for name, count in sorted(counts.items()):
        folder = Path(root) / name
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(count):
            paths.append(folder / f"{number:03}.{kind}")
            Image.fromarray(next(images)).save(paths[-1])
    return paths


def table(labels: list, feature, images=None, image_column: str = "image", **columns):
    """A Hugging Face data set with an image and a label column; further columns as (values,
    feature).
    """
    from datasets import Dataset, Features
    from datasets import Image as ImageFeature

    images = list(pictures(len(labels))) if images is None else images
    values = {image_column: images, "label": labels} | {
        name: column[0] for name, column in columns.items()
    }
    features = {image_column: ImageFeature(), "label": feature} | {
        name: column[1] for name, column in columns.items()
    }
    return Dataset.from_dict(values, features=Features(features))


def parquet(folder: str | Path, **splits) -> Path:
    """Write the data sets as the Hub lays them out, folder/SPLIT-00000-of-00001.parquet."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, dataset in splits.items():
        file = str(Path(folder) / f"{name}-00000-of-00001.parquet")
        dataset.to_parquet(file, batch_size=100)  # datasets 4.3 chooses none for an empty table
    return Path(folder)


def mnist_files(root: str | Path, **splits: tuple[np.ndarray, np.ndarray]) -> None:
    """Write root/MNIST/raw/*-ubyte of `train` and `t10k` images [N, H, W] and labels [N]."""
    raw = Path(root) / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for name, arrays in splits.items():
        for array, kind in zip(arrays, ("images-idx3", "labels-idx1"), strict=True):
            header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
            (raw / f"{name}-{kind}-ubyte").write_bytes(header + array.astype(np.uint8).tobytes())
