"""The data set of a split, and the cache of small images: decoded once, into a memory map that all
ranks of a machine share.
"""

import errno
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
from torch.utils.data import DataLoader

from utils.config.settings import TrainConfig
from utils.console import say
from utils.data.augment import Augmentation, Center, make_augmentation
from utils.data.datasets import DecodedImages, EncodedImages, ImageDataset
from utils.data.decode import VERSION
from utils.data.order import BlockSampler
from utils.data.spec import InputSpec
from utils.data.splits import Split
from utils.data.workers import choose_workers, move_to_shared_memory, worker_processes
from utils.errors import UserError, one_line
from utils.files import expand, whole_file
from utils.memory import bytes_text, usable_cores
from utils.waiting import wait_for_items


def open_array(path: Path) -> np.memmap:
    """Map the file of an array into memory."""
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except OSError as error:
        if error.errno != errno.ENODEV:
            raise
        raise OSError(
            error.errno, "its file system cannot map files into memory", str(path)
        ) from error


def is_cached(path: Path, following: str, shape: tuple[int, ...] = (), dtype: str = "<f4") -> bool:
    """Whether the file is there and whole. If it is there but not whole, prints this and the next
    step, `following`.

    `shape` may have the first dimensions only. The next `write_array` replaces the file. Raises
    OSError if it cannot be read.
    """
    if _is_whole(path, shape, dtype):
        with suppress(OSError):  # for example if the file is another user's
            os.utime(path)  # so that `remove_unused` keeps it
        return True
    if path.exists():
        say(
            f"{path}: damaged (not a whole array of the expected shape); {following}",
            on_each_machine=True,
        )
    return False


def keep_array(path: Path, array: np.ndarray) -> np.ndarray:
    """The float32 array, mapped from the file.

    Unless it is whole, it is written; if that fails, returns the array.
    """
    try:
        if not _is_whole(path, array.shape, "<f4"):
            write_array(path, array.shape, [array], "<f4")
        return open_array(path)
    except OSError as error:
        where = f"features cannot be cached ({one_line(error)}) and are kept in memory, {bytes_text(array.nbytes)}"
        say(
            f"{where} in each process; choose another --cache_dir to cache them",
            on_each_machine=True,
        )
        return array


def write_array(
    path: Path, shape: tuple[int, ...], chunks: Iterable[np.ndarray], dtype: str
) -> None:
    """Write the chunks of an array to the file, in order, completely or not at all; and delete
    unused files.

    Several processes may write the same file. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_unused(path.parent)
    size, free = math.prod(shape) * np.dtype(dtype).itemsize, shutil.disk_usage(path.parent).free
    if size > free:  # reported now, and not much later when the disk is full
        raise OSError(
            errno.ENOSPC, f"{bytes_text(size)} needed, {bytes_text(free)} free", str(path.parent)
        )
    with whole_file(path) as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": dtype, "fortran_order": False, "shape": shape}
        )
        for chunk in chunks:
            # not to a memory map, because a full disk would raise SIGBUS
            file.write(chunk.data)


def remove_unused(folder: Path) -> None:
    """Delete files that no run has used for 30 days, and partial files that are a day old.

    The latter are of killed processes. On a local disk, a run keeps the files that it has open.
    """
    for pattern, days in (("v*.npy", 30), ("*.partial", 1)):
        for path in folder.glob(pattern):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > days * 24 * 3600:
                    path.unlink()


def _is_whole(path: Path, shape: tuple[int, ...], dtype: str) -> bool:
    """Whether the file is an array of this type and these first dimensions, and has exactly its
    size.
    """
    try:
        array = open_array(path)
    except FileNotFoundError:
        return False
    except OSError:
        raise
    # numpy raises errors of any class for a damaged header, and for a file that is too short
    except Exception:
        return False
    is_expected = array.dtype == dtype and array.shape[: len(shape)] == shape
    return is_expected and path.stat().st_size == array.offset + array.nbytes


# Images and bytes of a chunk; /dev/shm, sometimes only 64 MB, holds several.
_CHUNK, _CHUNK_BYTES = 256, 2**19
_LEAST, _MOST = 2000, 32  # fewest images per worker process, and most worker processes


def make_dataset(
    split: Split, spec: InputSpec, config: TrainConfig, training: bool, progress: Callable
) -> ImageDataset:
    """Decode small images now, or load them from the cache.

    Photographs are decoded batch by batch.
    """
    augmentation = make_augmentation(config, spec, training)
    if spec.small:
        pixels = decode_all(
            split, spec.height, spec.width, spec.channels, config.cache_dir, progress
        )
        return DecodedImages(pixels, split.labels, augmentation)
    return EncodedImages(split, spec, augmentation)


def decode_all(
    split: Split, height: int, width: int, channels: int, cache_dir: str, progress: Callable
) -> np.ndarray:
    """All samples as uint8 [N, H, W, C]: the split's own array if it has one, else a memory-mapped
    file in the cache.

    The name of the file contains the fingerprint of the data. For image files, the fingerprint
    includes their paths, sizes and times. A file that is not whole is written again. `progress`
    wraps an iterable (tqdm). Raises UserError for an unreadable image, and if the cache cannot be
    read or written.
    """
    shape = (height, width, channels)
    if isinstance(split.images, np.ndarray) and _shape(split.images) == shape:
        is_whole = np.array_equal(split.image_index, np.arange(len(split.images)))
        images = split.images if is_whole else split.images[split.image_index]
        return images[..., None] if images.ndim == 3 else images.transpose(0, 2, 3, 1)
    path = (
        expand(cache_dir)
        / "decoded"
        / f"v{VERSION}-{split.cache_key}-{height}x{width}x{channels}.npy"
    )
    expected = (len(split), *shape)
    try:
        if not is_cached(path, "decoding the images again", expected, "|u1"):
            write_array(path, expected, _decoded(split, shape, progress), "|u1")
        return open_array(path)
    except OSError as error:
        problem = f"{path.parent}: decoded images cannot be cached ({error.strerror})"
        raise UserError(problem, "choose another folder with --cache_dir DIR") from error


def _decoded(split: Split, shape: tuple[int, int, int], progress: Callable) -> Iterator[np.ndarray]:
    """Yield all images in order, in chunks, decoded on all processor cores.

    The machine's other ranks wait.
    """
    # Processes, because threads would wait for each other's Python code. They are forked, because
    # starting new ones takes longer than decoding MNIST. They return tensors, because arrays would
    # be sent through a pipe, which would block a process forever if its rank has exited.
    spec = InputSpec(*shape, mean=[], std=[])
    images = EncodedImages(split, spec, Augmentation(0, {"center": Center(spec)}))
    chunks = BlockSampler(len(split), max(1, min(_CHUNK, _CHUNK_BYTES // math.prod(shape))))
    workers = min(usable_cores(), _MOST, len(split) // _LEAST)
    workers, ahead = choose_workers([chunks.block_size * math.prod(shape)], workers)
    processes = worker_processes(workers if workers > 1 else 0, ahead)
    loader = DataLoader(images, batch_sampler=chunks, collate_fn=move_to_shared_memory, **processes)
    try:
        for batch in wait_for_items(progress(loader), "a decoded image"):
            if batch.error is not None:
                raise batch.error
            yield batch.images.numpy()
    except OSError as error:  # for example, no process can be started; the cache is not the reason
        raise UserError(f"images cannot be decoded ({one_line(error)})") from error


def _shape(images: np.ndarray) -> tuple[int, int, int]:
    """(H, W, C) of an array [N, H, W] or [N, C, H, W]."""
    return (*images.shape[1:], 1) if images.ndim == 3 else (*images.shape[2:], images.shape[1])
