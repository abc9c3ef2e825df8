"""From a split to the loader of its microbatches; train.py and eval.py both go this way."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from utils.config.settings import TrainConfig
from utils.data.cache import decode_all
from utils.data.datasets import Decoded, Encoded
from utils.data.spec import InputSpec
from utils.data.splits import Split
from utils.data.worker_process import ShmFull, share, worker_processes
from utils.data.workers import AHEAD, most_workers, workers_that_fit
from utils.errors import one_line


def make_dataset(split: Split, spec: InputSpec, config: TrainConfig, training: bool, progress: Callable) -> Dataset:
    """Small images decoded now, from the cache if they are there; photographs decoded when their turn comes."""
    if spec.small:
        pixels = decode_all(split, spec.height, spec.width, spec.channels, config.cache_dir, progress)
        return Decoded(pixels, split.labels, split.readable)
    skip = config.bad_images == "skip"
    return Encoded(split, spec, config.seed, config.min_scale if training else None, training and config.flip, skip)


def make_loader(dataset: Dataset, batch_sampler, config: TrainConfig, threads: int, device: torch.device) -> DataLoader:
    """A loader to hand to `Accelerator.prepare`; its sampler emits one `Microbatch` a batch."""
    return make_loaders({"its batches": (dataset, batch_sampler)}, config, threads, device)[0]


def make_loaders(parts: dict[str, tuple], config: TrainConfig, threads: int, device: torch.device) -> list[DataLoader]:
    """The loaders of a run, made together as they share /dev/shm; `parts` has each (dataset, sampler) by name."""
    wanted = min(8, threads) if config.num_workers is None else config.num_workers
    wanted = min(wanted, most_workers())  # settings may come from a larger machine
    # A batch of small images is one copy; passing it between processes would take longer.
    sizes = {name: _bytes(*part) for name, part in parts.items() if not isinstance(part[0], Decoded)}
    choices = dict(zip(sizes, workers_that_fit(sizes, wanted), strict=True))
    return [_make_loader(*part, *choices.get(name, (0, AHEAD)), device) for name, part in parts.items()]


def _bytes(dataset: Dataset, batch_sampler) -> int:
    """Bytes of the images in the largest batch."""
    spec = dataset.spec
    most = batch_sampler.largest if hasattr(batch_sampler, "largest") else max(len(p.indices) for p in batch_sampler)
    return most * spec.height * spec.width * spec.channels


def _make_loader(dataset: Dataset, batch_sampler, workers: int, ahead: int, device: torch.device) -> DataLoader:
    return DataLoader(
        dataset,
        batch_sampler=batch_sampler,
        collate_fn=_hand_over_to_rank,
        **worker_processes(workers, ahead),
        persistent_workers=workers > 0,
        pin_memory=device.type == "cuda",
    )


def _hand_over_to_rank(batch: dict) -> dict:
    """In a worker, move the batch to shared memory; returns an empty batch with the error if there is no room."""
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    try:
        share(tensors.values())
    except ShmFull as error:
        tensors, batch = {name: value[:0] for name, value in tensors.items()}, batch | {"error": one_line(error)}
    # An empty view would send all of its memory along, a copy does not.
    return batch | {name: value if value.numel() else value.clone() for name, value in tensors.items()}
