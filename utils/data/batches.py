"""Batches on the device: float images, augmented and mixed in training, and labels."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import recursively_apply
from torch import Tensor
from torch.utils.data import DataLoader

from utils.config.settings import TrainConfig
from utils.data.augment import make_augmentation
from utils.data.datasets import DecodedImages, ResidentImages
from utils.data.mixing import Mix, make_mixing
from utils.data.spec import InputSpec
from utils.waiting import wait_for_items

_CACHE = 2**18  # floats that fit into a CPU cache of 1 MiB


class Batch(NamedTuple):
    """Images [n, C, H, W] float32, labels, and the samples' positions in their split [n] int64; n >= 0.

    Labels are classes, int64 [n], or multi-hot, float32 [n, classes]. With Mixup or CutMix, they are the share of each
    class, float32 [n, outputs]. `indices` are on the host. `update` and `number` are those of its microbatch.
    """

    images: Tensor
    labels: Tensor
    indices: Tensor
    update: int
    number: int


class Batches:
    """The batches of a prepared loader as the model's float input on the device, augmented in training.

    Samples that were found to be unreadable at the start are left out. `error` is set if this rank could not read
    another one. `outputs`, the length of a mixed target, is only needed with Mixup or CutMix.
    """

    def __init__(
        self,
        loader: DataLoader,
        spec: InputSpec,
        config: TrainConfig,
        device: torch.device,
        training: bool,
        outputs: int = 0,
    ):
        self.loader: Any = loader  # as Accelerate wraps it
        self.device = device
        self.error: Exception | None = None
        self.what = "a training batch" if training else "an evaluation batch"
        self.dataset: Any = self.loader.dataset
        self.resident = self.dataset if isinstance(self.dataset, ResidentImages) else None
        self.loader.device = None  # Accelerate would copy on the compute stream; `_upload` copies instead
        # Photographs are augmented when they are decoded, and with some operations, small images too.
        here = isinstance(self.dataset, DecodedImages) and self.dataset.augmentation is None
        augmentation = make_augmentation(config, spec, training)
        self.augmentation = augmentation if here and augmentation.operations else None
        self.mixing = make_mixing(config, spec, outputs) if training else None
        self.format = torch.channels_last if config.channels_last else torch.contiguous_format
        std = torch.tensor(spec.std, device=device)
        scale, shift = 1 / (255 * std), -torch.tensor(spec.mean, device=device) / std
        # One value for each channel of a whole row of pixels, so that inner loops are long.
        self.scale, self.shift = scale.repeat(spec.width), shift.repeat(spec.width)
        self.channels = spec.channels

    def check(self) -> None:
        """Raise the error of a sample that could not be read, whose batch was left empty."""
        if self.error is not None:
            raise self.error

    @property
    def labels(self) -> np.ndarray:
        """The labels of the whole split, as in Split."""
        return self.dataset.labels

    @property
    def readable(self) -> np.ndarray:
        """bool [N]: False for each sample of the split that is left out."""
        return self.dataset.readable

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        loaded, resident = wait_for_items(self.loader, self.what), self.resident
        for batch in self._streamed(loaded) if resident is None else self._drawn(loaded, resident):
            self.error = batch.get("error", self.error)
            mix, labels, microbatch = None, batch["labels"], batch["microbatch"]
            if self.mixing and "error" not in batch:
                mix = _to(self.mixing.draw(microbatch), self.device)
            if self.mixing and mix:
                labels = mix.targets(labels, self.mixing.outputs)
            labels = labels.float() if labels.ndim == 2 else labels  # copied to the device as bytes
            indices = torch.as_tensor(microbatch.indices)
            yield Batch(self._normalised(batch["images"], mix), labels, indices, microbatch.update, microbatch.number)

    def _streamed(self, loaded: Iterator[dict]) -> Iterator[dict]:
        """Batches on the device from batches of pixels, augmented."""
        for batch in _upload(map(self._prepared, loaded), self.device):
            if self.augmentation:
                batch["images"] = self.augmentation.batch(batch["images"], batch["prepared"])
            yield batch

    def _drawn(self, loaded: Iterator[dict], resident: ResidentImages) -> Iterator[dict]:
        """Batches drawn from images on the device, augmented, from batches without pixels."""
        for group in _upload(resident.groups(loaded), self.device):
            images, labels = resident.draw(group["microbatch"].indices)
            if self.augmentation:
                images = self.augmentation.batch(images, self.augmentation.prepare(group["microbatch"]))
            sizes = [len(part["microbatch"].indices) for part in group["parts"]]
            cuts = zip(images.split(sizes), labels.split(sizes), strict=True)
            for part, (pixels, classes) in zip(group["parts"], cuts, strict=True):
                yield part | {"images": pixels, "labels": classes}

    def _prepared(self, batch: dict) -> dict:
        """The batch with what the host computes for its augmentation."""
        if self.augmentation:
            batch["prepared"] = self.augmentation.prepare(batch["microbatch"])
        return batch

    def _normalised(self, images: Tensor, mix: Mix | None = None) -> Tensor:
        """The model's input from pixels [n, H, W, C], mixed."""
        if images.device.type == "cpu":
            values = self._normalised_in_parts(images, mix)
        else:  # one kernel
            values = torch.addcmul(self.shift, images.flatten(2), self.scale)
            if mix:
                mix.images(values, self.channels)
            values = values.view(images.shape)
        return values.permute(0, 3, 1, 2).contiguous(memory_format=self.format)

    def _normalised_in_parts(self, images: Tensor, mix: Mix | None = None) -> Tensor:
        """A few images at a time, whose floats stay in the CPU's cache between the steps."""
        values, pixels = torch.empty(images.shape), images.flatten(2)
        count, start = max(1, _CACHE // max(1, images[:1].numel())), 0
        while start < len(images):
            end = min(start + count, len(images))
            if mix and mix.partner[end - 1] == end:  # a pair is mixed in one part
                end += 1
            result = values[start:end].flatten(2)
            torch.addcmul(self.shift, result.copy_(pixels[start:end]), self.scale, out=result)
            if mix:
                mix.images(result, self.channels, start)
            start = end
        return values


def _upload(batches: Iterator[dict], device: torch.device) -> Iterator[dict]:
    """The batches with their tensors on the device.

    A GPU receives a batch while it still computes earlier ones, because the host does not wait for it.
    """
    if device.type != "cuda":
        yield from (_to(batch, device) for batch in batches)
        return
    stream = torch.cuda.Stream(device)
    for batch in batches:
        with torch.cuda.stream(stream):
            uploaded, copied = _to(batch, device), stream.record_event()
        yield _wait_for_copy(uploaded, copied, device)


def _to(batch: Any, device: torch.device) -> Any:
    """The batch, of nested dicts and tuples, with its tensors on the device."""

    def copy(tensor: Tensor) -> Tensor:
        # From pinned memory, so that the host does not wait for the copy.
        return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)

    return batch if device.type == "cpu" else recursively_apply(copy, batch)


def _wait_for_copy(batch: dict, copied: torch.cuda.Event, device: torch.device) -> dict:
    """Make the current stream wait until another stream has copied the batch."""
    stream = torch.cuda.current_stream(device)
    stream.wait_event(copied)
    # Keep the memory of the tensors until the stream has used it, even if Python frees them earlier.
    recursively_apply(lambda tensor: tensor.record_stream(stream), batch)
    return batch
