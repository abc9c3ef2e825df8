"""The data set of a split, and the cache of small images: decoded once, into a memory map that all ranks of a machine
share.
"""

import errno
import hashlib
import math
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np
from torch.utils.data import DataLoader

from utils.config.settings import TrainConfig
from utils.data.augment import Augmentation, Center, make_augmentation
from utils.data.datasets import DecodedImages, EncodedImages, ImageDataset
from utils.data.decode import VERSION
from utils.data.order import BlockSampler
from utils.data.spec import SMALL, InputSpec
from utils.data.splits import Split
from utils.data.workers import choose_workers, move_to_shared_memory, worker_processes
from utils.errors import UserError, one_line
from utils.files import expand, naming_file
from utils.launch.environment import local_rank_and_size, print_for_machine
from utils.memory import bytes_text, free_memory, usable_cores
from utils.waiting import wait_for_items

_BLOCK = 2**24  # bytes that are hashed at once


def open_array(path: Path) -> np.memmap:
    """Map the file of an array into memory; `damage` checks it."""
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except OSError as error:
        if error.errno != errno.ENODEV:
            raise
        raise OSError(error.errno, "its file system cannot map files into memory", str(path)) from error


def damage(path: Path) -> str:
    """What is wrong with the file of an array; "" if nothing is. Raises OSError if it cannot be read."""
    try:
        mapped = open_array(path)
    except OSError:
        raise
    except Exception as error:  # numpy raises errors of any class for a damaged header
        return f"not an array: {one_line(error)[:100]}"
    end = mapped.offset + mapped.nbytes
    with naming_file(path), path.open("rb", buffering=0) as file:
        if os.pread(file.fileno(), 1000, end) == _footer(file, end):  # not mapped: a bad disk would raise SIGBUS
            return ""
    return "truncated, or changed since it was written"


def write_array(path: Path, shape: tuple[int, ...], chunks: Iterable[np.ndarray], dtype: str = "|u1") -> None:
    """Write the chunks of an array to the file, in order, completely or not at all.

    An OSError names the file.
    """
    partial = path.with_suffix(f".{uuid.uuid4().hex}.partial")
    try:
        with naming_file(path), partial.open("x+b") as file:
            header = {"descr": dtype, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            for chunk in chunks:
                file.write(chunk.data)  # not to a memory map, because a full disk would raise SIGBUS
            file.flush()
            file.write(_footer(file, file.tell()))
            file.flush()
            os.fsync(file.fileno())
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def remove_unused(folder: Path) -> None:
    """Delete files that no run has used for 30 days, and partial files that are a day old.

    The latter are of killed processes. On a local disk, a run keeps the files that it has open.
    """
    for pattern, days in (("v*.npy", 30), ("*.partial", 1)):
        for path in folder.glob(pattern):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > days * 24 * 3600:
                    path.unlink()


def _footer(file: BinaryIO, end: int) -> bytes:
    """What follows the array: the SHA-256 of all before it."""
    digest, fileno = hashlib.sha256(), file.fileno()
    for start in range(0, end, _BLOCK):
        digest.update(os.pread(fileno, min(_BLOCK, end - start), start))
    return b"\ncontent %s\n" % digest.hexdigest().encode()


# Images and bytes of a chunk; /dev/shm, sometimes only 64 MB, holds several.
_CHUNK, _CHUNK_BYTES = 256, 2**19
_LEAST, _MOST = 2000, 32  # fewest images per worker process, and most worker processes


def make_dataset(
    split: Split, spec: InputSpec, config: TrainConfig, training: bool, progress: Callable
) -> ImageDataset:
    """Decode small images now, or load them from the cache. Photographs are decoded batch by batch."""
    augmentation = make_augmentation(config, spec, training)
    if spec.small:
        pixels = decode_all(split, spec.height, spec.width, spec.channels, config.cache_dir, progress)
        return DecodedImages(pixels, split.labels, augmentation)
    return EncodedImages(split, spec, augmentation)


def decode_all(split: Split, height: int, width: int, channels: int, cache_dir: str, progress: Callable) -> np.ndarray:
    """All samples as uint8 [N, H, W, C]: the split's own array if it has one, else a memory-mapped file in the cache.

    The name of the file contains the fingerprint of the data. For image files, the fingerprint includes their paths,
    sizes and times. The first rank of a machine checks the pixels. A damaged file is deleted and written again. If the
    images cannot be cached, they are decoded into memory if they fit. `progress` wraps an iterable (tqdm). Raises
    UserError for an unreadable image, if the images fit neither in the cache nor in memory, or if a damaged file cannot
    be deleted.
    """
    shape = (height, width, channels)
    if isinstance(split.images, np.ndarray) and _shape(split.images) == shape:
        is_whole = np.array_equal(split.rows, np.arange(len(split.images)))
        images = split.images if is_whole else split.images[split.rows]
        return images[..., None] if images.ndim == 3 else images.transpose(0, 2, 3, 1)
    path = expand(cache_dir) / "decoded" / f"v{VERSION}-{split.cache_key}-{height}x{width}x{channels}.npy"
    try:
        if not is_cached(path, "decoding the images again"):
            _prepare_folder(path.parent, len(split) * math.prod(shape))
            write_array(path, (len(split), *shape), _decoded(split, shape, progress))
        return open_array(path)
    except OSError as error:
        return _decode_in_memory(split, shape, progress, one_line(error))


def keep_array(path: Path, array: np.ndarray) -> np.ndarray:
    """The float32 array, mapped from the file. A missing file is written; if this fails, returns the array itself."""
    try:
        if not path.exists():
            _prepare_folder(path.parent, array.nbytes)
            write_array(path, array.shape, [array], "<f4")
        return open_array(path)
    except OSError as error:
        where = f"features cannot be cached ({one_line(error)}) and are kept in memory, {bytes_text(array.nbytes)}"
        print_for_machine(f"{where} in each process; choose another --cache_dir to cache them")
        return array


def is_cached(path: Path, following: str) -> bool:
    """Whether the file exists and is valid. Deletes a damaged file, and prints this and the next step, `following`."""
    if not path.exists():
        return False
    is_first = local_rank_and_size()[0] == 0  # the other ranks run this after the first one
    wrong = damage(path) if is_first else ""
    if not wrong:
        with suppress(OSError):  # for example if the file is another user's
            os.utime(path)  # so that `remove_unused` keeps it
        return True
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        problem = f"{path}: damaged ({wrong}) and cannot be deleted ({error.strerror})"
        raise UserError(problem, "delete it, or choose another --cache_dir") from error
    print_for_machine(f"{path}: damaged ({wrong}); {following}")
    return False


def _prepare_folder(folder: Path, size: int) -> None:
    """Create the folder of a new file, and delete unused files. Raises OSError if less than `size` bytes are free."""
    folder.mkdir(parents=True, exist_ok=True)
    remove_unused(folder)
    free = shutil.disk_usage(folder).free
    if size > free:  # reported now, and not much later when the disk is full
        raise OSError(f"{folder}: {bytes_text(size)} needed, {bytes_text(free)} free")


def _decoded(split: Split, shape: tuple[int, int, int], progress: Callable) -> Iterator[np.ndarray]:
    """Yield all images in order, in chunks, decoded on all processor cores. The machine's other ranks wait."""
    # Processes, because threads would wait for each other's Python code. They are forked, because starting new ones
    # takes longer than decoding MNIST. They return tensors, because arrays would be sent through a pipe, which would
    # block a process forever if its rank has exited.
    spec = InputSpec(*shape, mean=[], std=[])
    images = EncodedImages(split, spec, Augmentation(0, {"center": Center(spec)}))
    chunks = BlockSampler(len(split), max(1, min(_CHUNK, _CHUNK_BYTES // math.prod(shape))))
    workers = min(len(usable_cores()), _MOST, len(split) // _LEAST)
    workers, ahead = choose_workers([chunks.block_size * math.prod(shape)], workers)
    processes = worker_processes(workers if workers > 1 else 0, ahead)
    loader = DataLoader(images, batch_sampler=chunks, collate_fn=move_to_shared_memory, **processes)
    for batch in wait_for_items(progress(loader), "a decoded image"):
        if batch.error is not None:
            raise batch.error
        yield batch.images.numpy()


def _decode_in_memory(split: Split, shape: tuple[int, int, int], progress: Callable, reason: str) -> np.ndarray:
    """Decode images into memory if it is large enough; `reason` is why they could not be cached."""
    (number, processes), size, (free, _) = local_rank_and_size(), len(split) * math.prod(shape), free_memory()
    need = bytes_text(size) + f" in each of {processes} processes" * (processes > 1)
    problem = f"decoded images cannot be cached ({reason})"
    if size * processes > free / 2 if number == 0 else size > free:  # the first process checks for all
        raise UserError(
            f"{problem} and do not fit in memory: {need} needed, {bytes_text(free)} free",
            f"choose another --cache_dir, or an --image_size above {SMALL}, which decodes each image when it is needed",
        )
    print_for_machine(f"{problem} and are kept in memory, {need}; choose another --cache_dir to cache them")
    pixels, filled = np.empty((len(split), *shape), np.uint8), 0
    for chunk in _decoded(split, shape, progress):
        pixels[filled : filled + len(chunk)] = chunk
        filled += len(chunk)
    return pixels


def _shape(images: np.ndarray) -> tuple[int, int, int]:
    """(H, W, C) of an array [N, H, W] or [N, C, H, W]."""
    return (*images.shape[1:], 1) if images.ndim == 3 else (*images.shape[2:], images.shape[1])
