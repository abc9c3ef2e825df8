"""The data set of a split; the cache of small images, which are decoded once, into a memory map
that all ranks of a machine share; and the cache of shrunk photographs.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from zlib import crc32

import numpy as np
import torch
import torchvision
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.transforms.v2.functional import resize

from utils.data.augment import make_augmentation
from utils.data.datasets import ArrayDataset, ImageDataset, PhotoDataset
from utils.data.decode import VERSION, decode_image, pixels_key
from utils.data.decoders import DECODERS
from utils.data.samplers import BlockSampler
from utils.data.spec import InputSpec
from utils.data.splits import Files, Split, fingerprint_of, stamp_of
from utils.data.workers import choose_workers, move_to_shared_memory, worker_processes
from utils.errors import UserError, one_line
from utils.files import expand, whole_file
from utils.memory import usable_cores
from utils.settings.data import DataSettings
from utils.waiting import wait_for_items

# the CRC-32 of any data followed by its own CRC-32
_UNCHANGED = 0x2144DF1C


def open_cached(path: Path, shape: tuple[int, ...], dtype: str) -> np.memmap | None:
    """The array in a file, mapped into memory; None if the file cannot be opened. A file that is
    damaged, or not an array of this type and these first dimensions, is deleted, and a line says so.
    """
    try:
        array = np.lib.format.open_memmap(path, mode="r")
        is_expected = array.dtype == dtype and array.shape[: len(shape)] == shape
        if is_expected and crc32(np.memmap(path, mode="r").data) == _UNCHANGED:
            return array
    except OSError:  # there is no file, or it may be sound
        return None
    except Exception:  # of any class, for a damaged header and for a file that is too short
        pass
    with suppress(OSError):  # one of several processes deletes it
        path.unlink()
        print(f"{path}: is not usable, and is computed again")
    return None


def cached(
    path: Path, shape: tuple[int, ...], dtype: str, chunks: Iterable[np.ndarray]
) -> np.memmap:
    """The array in a file, mapped into memory. If the file is missing or damaged, the `chunks` are
    written first.

    They are written in order, completely or not at all. Several processes may do so at once. Raises
    UserError if the file cannot be written or mapped.
    """
    if (array := open_cached(path, shape, dtype)) is not None:
        return array
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        header = {"descr": dtype, "fortran_order": False, "shape": shape}
        with whole_file(path) as file:
            np.lib.format.write_array_header_1_0(file, header)
            for chunk in chunks:
                # not to a memory map, because a full disk would raise SIGBUS
                file.write(chunk.data)
            file.flush()
            file.write(crc32(np.memmap(file.name, mode="r").data).to_bytes(4, "little"))
        return np.lib.format.open_memmap(path, mode="r")
    except OSError as error:
        problem = f"{path.parent}: cannot be used as a cache ({error.strerror})"
        raise UserError(problem, "choose another folder with --cache_dir DIR") from error


# Images and bytes of a chunk; /dev/shm, sometimes only 64 MB, holds several.
_CHUNK = 256
_CHUNK_BYTES = 2**19
_LEAST, _MOST = 2000, 32  # fewest images per worker process, and most worker processes


def make_dataset(
    split: Split, spec: InputSpec, config: DataSettings, training: bool, progress: Callable
) -> ImageDataset:
    """Decode small images now, or load them from the cache.

    Photographs are decoded batch by batch.
    """
    augmentation = make_augmentation(config, spec, training)
    if spec.small:
        pixels = decode_all(split, *spec.size, spec.channels, config.cache_dir, progress)
        return ArrayDataset(pixels, split.labels, augmentation)
    split = shrink(split, spec, config.shrink, f"{expand(config.cache_dir)}/shrunk")
    return PhotoDataset(split, spec, augmentation)


def decode_all(
    split: Split, height: int, width: int, channels: int, cache_dir: str, progress: Callable
) -> np.ndarray:
    """All samples as uint8 [N, H, W, C]: the split's own array if it has one, else a memory-mapped
    file in the cache.

    The name of the file contains the fingerprint of the data and the decoders. For image files, the fingerprint
    includes their paths, sizes and times. A file that is not whole is written again. `progress`
    wraps an iterable (tqdm). Raises UserError for an unreadable image, and if the cache cannot be
    read or written.
    """
    shape = height, width, channels
    if isinstance(split.images, np.ndarray):
        planes = split.images[:, None] if split.images.ndim == 3 else split.images
        images = planes.transpose(0, 2, 3, 1)
        if images.shape[1:] == shape:
            is_whole = np.array_equal(split.image_index, np.arange(len(images)))
            return images if is_whole else images[split.image_index]
    name = f"{pixels_key(split)}-{'x'.join(map(str, shape))}.npy"
    path = expand(cache_dir) / "decoded" / name
    return cached(path, (len(split), *shape), "|u1", _decoded(split, shape, progress))


def _decoded(split: Split, shape: tuple[int, int, int], progress: Callable) -> Iterator[np.ndarray]:
    """Yield all images in order, in chunks, decoded on all processor cores.

    The machine's other ranks wait.
    """
    # Processes, because threads would wait for each other's Python code. They are forked, because
    # starting new ones takes longer than decoding MNIST. They return tensors, because arrays would
    # be sent through a pipe, which would block a process forever if its rank has exited.
    images = PhotoDataset(split, InputSpec(*shape, mean=[], std=[]))
    chunks = BlockSampler(len(split), max(1, min(_CHUNK, _CHUNK_BYTES // math.prod(shape))))
    workers = min(usable_cores(), _MOST, len(split) // _LEAST)
    workers, ahead = choose_workers([chunks.block_size * math.prod(shape)], workers)
    processes = worker_processes(workers if workers > 1 else 0, ahead)
    loader = DataLoader(images, batch_sampler=chunks, collate_fn=move_to_shared_memory, **processes)
    try:
        for batch in wait_for_items(progress(loader), "a decoded image"):
            if batch.error:
                raise batch.error
            yield batch.images.numpy()
    except OSError as error:  # for example, no process can be started; the cache is not the reason
        raise UserError(f"images cannot be decoded ({one_line(error)})") from error


@dataclass(frozen=True)
class ShrunkImages:
    """The images of a split with a shorter side of `side` pixels; smaller ones keep their size.

    In `folder`, each is a file of its own with its pixels, so a cache that is only partly filled is
    continued, and other splits of the same photographs use it too. Without a folder, the same
    pixels are computed each time.
    """

    split: Split
    channels: int
    side: int
    folder: str

    def many(self, rows: Sequence[int]) -> list[Tensor]:
        """The pixels of these images, uint8 [H, W, C], which are cached if they were not."""
        return [*map(self._cached if self.folder else self._shrink, rows)]

    def _cached(self, row: int) -> Tensor:
        images = self.split.images
        image = [self.split.fingerprint, row]
        if isinstance(images, Files):
            image = [images.paths[row], *stamp_of(images.paths[row])]
        decoders = VERSION, torchvision.__version__, *DECODERS.values()
        name = fingerprint_of(self.side, self.channels, self.split.bits, *image, *decoders)
        path = Path(self.folder, f"{name}.npy")
        array = open_cached(path, (), "|u1")
        if array is None:
            pixels = self._shrink(row).numpy()
            array = cached(path, pixels.shape, "|u1", [pixels])
        return torch.tensor(array)

    def _shrink(self, row: int) -> Tensor:
        pixels = decode_image(
            self.split, row, self.channels, shrink=lambda *size: min(size) / self.side
        )
        if min(pixels.shape[:2]) > self.side:
            pixels = resize(pixels.permute(2, 0, 1), [self.side]).permute(1, 2, 0)
        return pixels.contiguous()


def shrink(split: Split, spec: InputSpec, side: int | None, folder: str = "") -> Split:
    """The split with photographs of the size of --shrink."""
    if not side or spec.small:
        return split
    every = replace(split, image_index=np.arange(len(split.images)))  # a row is a position
    images = ShrunkImages(every, spec.channels, side, folder)
    return replace(split, images=images)  # type: ignore[arg-type]  # only `many` is used


def suggest_shrink(split: Split, images: int) -> list[str]:
    """A line about --shrink if it saves over a minute of a run that reads so many images."""
    if split.checksums is None:
        return []
    sizes = split.checksums[split.image_index] >> 32
    # Seconds of a core for each byte, less some, so that it is not suggested below a megabyte.
    seconds = (images - len(split)) * (sizes.mean() * 2.5e-8 - 0.025) / usable_cores()
    line = f"--shrink SIDE saves about {seconds / 60:.0f} minutes of reading large photographs"
    return [f"{line}, but changes their pixels"] * bool(seconds > 60)
