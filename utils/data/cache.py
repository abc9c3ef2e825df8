"""A whole small data set decoded once, into one memory map in the cache that all ranks of a machine share."""

import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from utils.data.decode import VERSION, BadImages, center, decode, shrink_to_center
from utils.data.pixels import damage, open_pixels, remove_leftovers, write_pixels
from utils.data.spec import SMALL
from utils.data.splits import Split, whole_split
from utils.data.worker_process import ShmFull, share, worker_processes
from utils.data.workers import choose_workers, usable_shm
from utils.errors import one_line
from utils.files import expand
from utils.launch.environment import on_this_machine, say_for_machine
from utils.memory import free_memory, usable_cores
from utils.waiting import awaited

_CHUNK, _CHUNK_BYTES = 256, 2**19  # images decoded at once; some wait in /dev/shm, which may be as small as 64 MB
_LEAST, _MOST = 2000, 32  # images for which a worker process pays, and the most of these


class Shared:
    """Few images that many samples share, fetched by the samples' positions as from an array."""

    def __init__(self, images: np.ndarray, rows: np.ndarray):
        self.images, self.rows = images, rows

    def __getitem__(self, positions: np.ndarray) -> np.ndarray:
        return self.images[self.rows[positions]]


class _Chunks(Dataset):
    """Runs of consecutive samples: decoded, uint8 [n, H, W, C], or {position: error} if any is unreadable."""

    def __init__(self, split: Split, shape: tuple[int, int, int]):
        self.split, self.shape, self.size = split, shape, max(1, min(_CHUNK, _CHUNK_BYTES // math.prod(shape)))

    def __len__(self) -> int:
        return -(-len(self.split) // self.size)

    def __getitem__(self, number: int) -> Tensor | dict[int, str]:
        height, width, channels = self.shape
        positions = range(number * self.size, min((number + 1) * self.size, len(self.split)))
        pixels, shrink, broken = np.empty((len(positions), *self.shape), np.uint8), shrink_to_center(height, width), {}
        try:
            encoded = self.split.read_ahead(positions)
        except Exception:  # a broken table; reading one by one finds the broken images
            encoded = [None] * len(positions)
        for row, position in enumerate(positions):
            if not self.split.readable[position]:
                pixels[row] = 0  # never used
                continue
            try:
                image = decode(self.split, position, channels, encoded[row], shrink)
                pixels[row] = center(image, height, width).numpy()
            except (ValueError, OSError) as error:  # as a value: a worker's exception would come with its traceback
                broken[position] = one_line(error)
        return broken or torch.from_numpy(pixels)


def decode_all(
    split: Split, height: int, width: int, channels: int, cache_dir: str, progress: Callable
) -> np.ndarray | Shared:
    """All samples as uint8 [N, H, W, C]: the split's own array where it is one, else a memory map kept in the cache.

    The file is named by the data's fingerprint, which for image files includes their paths, sizes and times. The first
    rank of a machine checks the pixels; a damaged file is deleted and rebuilt. If nothing can be cached, images that
    fit are decoded into memory. `progress` wraps an iterable (tqdm). Raises BadImages, OSError if neither the cache nor
    the memory has room, and ValueError for a damaged file that cannot be deleted.
    """
    shape = (height, width, channels)
    if len(split) > len(split.images):  # samples share images
        whole = whole_split(split.name, split.images, np.zeros(len(split.images)), split.fingerprint)
        try:
            return Shared(decode_all(whole, *shape, cache_dir, progress), split.rows)
        except BadImages as bad:
            found = {sample: bad.found[row] for sample, row in enumerate(split.rows.tolist()) if row in bad.found}
            raise BadImages(found or bad.found) from bad
    if isinstance(split.images, np.ndarray) and _shape(split.images) == shape:
        is_whole = np.array_equal(split.rows, np.arange(len(split.images)))
        images = split.images if is_whole else split.images[split.rows]
        return images[..., None] if images.ndim == 3 else images.transpose(0, 2, 3, 1)
    path = expand(cache_dir) / "decoded" / f"v{VERSION}-{split.cache_key}-{height}x{width}x{channels}.npy"
    try:
        if not _is_cached(path, (len(split), *shape)):
            path.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(path.parent)
            _check_room(path.parent, len(split) * math.prod(shape))
            write_pixels(path, (len(split), *shape), _decoded(split, shape, progress))
        return open_pixels(path)
    except OSError as error:
        return _decode_in_memory(split, shape, progress, one_line(error))


def _is_cached(path: Path, shape: tuple[int, ...]) -> bool:
    """Whether the file exists and is valid; a damaged file is deleted."""
    if not path.exists():
        return False
    wrong = damage(path, shape, thorough=on_this_machine()[0] == 0)  # the other ranks come after the first
    if not wrong:
        return True
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        fix = "delete it, or choose another --cache_dir"
        raise ValueError(f"{path}: damaged ({wrong}) and cannot be deleted ({error.strerror}); {fix}") from error
    say_for_machine(f"{path}: damaged ({wrong}); decoding the images again")
    return False


def _check_room(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if size > free:  # to be told now, not when the disk is full after long work
        raise OSError(f"{folder}: {_size(size)} needed for the decoded images, {_size(free)} free")


def _decoded(split: Split, shape: tuple[int, int, int], progress: Callable) -> Iterator[np.ndarray]:
    """Yield all images in order, in chunks, decoded on all processor cores while the machine's other ranks wait.

    Raises BadImages after all images have been tried.
    """
    # Processes, as threads wait for each other's Python here; forked like any loader's workers, as starting new ones
    # takes longer than MNIST. They give tensors: arrays would come through a pipe, where an orphan would wait for ever.
    workers = min(len(usable_cores()), _MOST, len(split) // _LEAST)
    runs = _Chunks(split, shape)
    [(workers, ahead)] = choose_workers([runs.size * math.prod(shape)], workers, 2, usable_shm())
    processes = worker_processes(workers, ahead) if workers > 1 else worker_processes(0)
    chunks, broken = DataLoader(runs, batch_size=None, collate_fn=_hand_over, **processes), {}
    for pixels in awaited(progress(chunks), "a decoded image"):
        if isinstance(pixels, ShmFull):
            raise pixels
        if isinstance(pixels, dict):
            broken |= pixels
        elif not broken:
            yield pixels.numpy()
    if broken:
        raise BadImages(broken)


def _hand_over(pixels: Tensor | dict) -> Tensor | dict | ShmFull:
    """In a worker, move the pixels to shared memory; returns the error if there is no room."""
    try:
        share([pixels] if isinstance(pixels, Tensor) else [])
    except ShmFull as error:
        return error
    return pixels


def _decode_in_memory(split: Split, shape: tuple[int, int, int], progress: Callable, reason: str) -> np.ndarray:
    """Decode images that could not be cached, for this reason, into memory if it is large enough."""
    (number, processes), size, (free, _) = on_this_machine(), len(split) * math.prod(shape), free_memory()
    need = _size(size) + f" in each of {processes} processes" * (processes > 1)
    if size * processes > free / 2 if number == 0 else size > free:  # the first process decides for all
        raise OSError(
            f"decoded images cannot be cached ({reason}) and do not fit in memory: {need} needed, {_size(free)} free; "
            f"choose another --cache_dir, or an --image_size above {SMALL} to decode images only when they are needed"
        )
    say_for_machine(
        f"decoded images cannot be cached ({reason}) and are kept in memory, {need}; "
        "choose another --cache_dir to cache them"
    )
    pixels, filled = np.empty((len(split), *shape), np.uint8), 0
    for chunk in _decoded(split, shape, progress):
        pixels[filled : filled + len(chunk)] = chunk
        filled += len(chunk)
    return pixels


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _shape(images: np.ndarray) -> tuple[int, int, int]:
    """(H, W, C) of an array [N, H, W] or [N, C, H, W]."""
    return (*images.shape[1:], 1) if images.ndim == 3 else (*images.shape[2:], images.shape[1])
