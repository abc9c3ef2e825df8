"""The data set of a split. Small images are decoded once, into a memory map that all ranks of a
machine share.
"""

import math
from collections.abc import Callable, Iterator

import numpy as np
from torch.utils.data import DataLoader

from utils.data.augment import make_augmentation
from utils.data.cache import cached
from utils.data.datasets import ArrayDataset, ImageDataset, PhotoDataset
from utils.data.decode import pixels_key
from utils.data.samplers import BlockSampler
from utils.data.shrunk import shrink
from utils.data.spec import InputSpec
from utils.data.splits import Split
from utils.data.workers import choose_workers, move_to_shared_memory, worker_processes
from utils.errors import UserError, one_line
from utils.files import expand
from utils.memory import usable_cores
from utils.settings.data import DataSettings
from utils.waiting import wait_for_items

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

    The name of the file contains the fingerprint of the data and the decoders. For image files, the
    fingerprint includes their paths, sizes and times. A file that is not whole is written again.
    `progress` wraps an iterable (tqdm). Raises UserError for an unreadable image, and if the cache
    cannot be read or written.
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
