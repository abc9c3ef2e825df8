"""From a split to the loader of its microbatches, for train.py and eval.py."""

from collections.abc import Callable, Sequence

import torch
from torch.utils.data import DataLoader

from utils.config.settings import TrainConfig
from utils.data.augment import make_augmentation
from utils.data.cache import decode_all
from utils.data.datasets import DecodedImages, EncodedImages, ImageDataset, ResidentImages
from utils.data.order import MicrobatchSampler
from utils.data.spec import InputSpec
from utils.data.splits import Split
from utils.data.workers import default_workers, move_to_shared_memory, worker_processes, workers_that_fit
from utils.launch.environment import local_rank_and_size


def make_dataset(
    split: Split, spec: InputSpec, config: TrainConfig, training: bool, progress: Callable
) -> ImageDataset:
    """Decode small images now, or load them from the cache. Photographs are decoded batch by batch."""
    augmentation = make_augmentation(config, spec, training)
    if spec.small:
        pixels = decode_all(split, spec.height, spec.width, spec.channels, config.cache_dir, progress)
        return DecodedImages(pixels, split.labels, augmentation)
    return EncodedImages(split, spec, augmentation)


def make_loader(
    dataset: ImageDataset, sampler: MicrobatchSampler, config: TrainConfig, threads: int, device: torch.device
) -> DataLoader:
    """`make_loaders` for a single loader."""
    return make_loaders([(dataset, sampler)], config, threads, device)[0]


def make_loaders(
    parts: Sequence[tuple[ImageDataset, MicrobatchSampler]], config: TrainConfig, threads: int, device: torch.device
) -> list[DataLoader]:
    """The loaders of a rank, for `Accelerator.prepare`. They are created together, because they share /dev/shm."""
    wanted = config.num_workers
    if wanted is None:
        wanted = default_workers(threads, local_rank_and_size()[1])
    # Otherwise a batch is one copy of small images, which is faster than passing it between processes.
    sizes = [each.largest * dataset.image_bytes for dataset, each in parts if dataset.in_loader]
    workers_each, ahead = workers_that_fit(sizes, wanted)
    loaders = []
    for dataset, sampler in parts:
        workers = workers_each if dataset.in_loader else 0
        loader = DataLoader(
            dataset,
            batch_sampler=sampler,
            collate_fn=move_to_shared_memory,
            **worker_processes(workers, ahead),
            persistent_workers=workers > 0,
            pin_memory=device.type == "cuda" and not isinstance(dataset, ResidentImages),
        )
        loaders.append(loader)
    return loaders
