"""Batches on the device: float images, augmented and mixed in training, and labels."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from accelerate.utils import recursively_apply
from torch import Tensor
from torch.utils.data import DataLoader

from utils.config.settings import TrainConfig
from utils.data.datasets import Batch, Features, ResidentImages
from utils.data.mixing import Mix, Mixing
from utils.data.spec import InputSpec
from utils.waiting import wait_for_items


class Batches:
    """The batches of a prepared loader as the model's float input on the device, augmented and
    mixed in training.

    `error` is set if this rank could not read a sample. `outputs`, the length of a mixed target, is
    only needed with Mixup or CutMix.
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
        # Accelerate would copy on the compute stream; `_upload` copies instead
        self.loader.device = None
        self.mixing = Mixing(config, spec, outputs) if training and config.mixes else None
        self.format = torch.channels_last if config.channels_last else torch.contiguous_format
        std = torch.tensor(spec.std, device=device)
        scale, shift = 1 / (255 * std), -torch.tensor(spec.mean, device=device) / std
        # One value for each channel of a whole row of pixels, so that inner loops are long.
        self.scale, self.shift = scale.repeat(spec.width), shift.repeat(spec.width)
        self.channels = spec.channels
        shape: tuple[int, ...] = (spec.channels, spec.height, spec.width)
        if isinstance(self.dataset, Features):
            shape = self.dataset.views.shape[2:]
        self.no_images = torch.empty(0, *shape, device=device)  # an empty input of the model

    def check(self) -> None:
        """Raise the error of a sample that could not be read, whose batch was left empty."""
        if self.error is not None:
            raise self.error

    @property
    def labels(self) -> np.ndarray:
        """The labels of the whole split, as in Split."""
        return self.dataset.labels

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        loaded = wait_for_items(self.loader, self.what)
        is_resident, are_features = (
            isinstance(self.dataset, kind) for kind in (ResidentImages, Features)
        )
        for batch in self._drawn(loaded) if is_resident else self._streamed(loaded):
            self.error = batch.error or self.error
            mix, labels = None, batch.labels
            if self.mixing and (mix := _to(self.mixing.draw(batch.microbatch), self.device)):
                labels = mix.targets(labels, self.mixing.outputs)
            labels = labels.float() if labels.ndim == 2 else labels  # copied to the device as bytes
            images = batch.images if are_features else self._normalise(batch.images, mix)
            yield batch._replace(images=images, labels=labels)

    def _streamed(self, loaded: Iterator[Batch]) -> Iterator[Batch]:
        """Batches on the device from batches of pixels, augmented."""
        if self.dataset.in_loader or isinstance(self.dataset, Features):
            yield from _upload(loaded, self.device)
            return
        augmentation = self.dataset.augmentation
        prepared = ((batch, augmentation.prepare(batch.microbatch)) for batch in loaded)
        for batch, inputs in _upload(prepared, self.device):
            yield batch._replace(images=augmentation.batch(batch.images, inputs))

    def _drawn(self, loaded: Iterator[Batch]) -> Iterator[Batch]:
        """Batches drawn from images on the device, augmented, from batches without pixels."""
        for joined, parts in _upload(self.dataset.groups(loaded), self.device):
            images, labels = self.dataset.draw(joined.indices)
            images = self.dataset.augmentation.batch(
                images, self.dataset.augmentation.prepare(joined)
            )
            sizes = [len(part.indices) for part in parts]
            yield from map(Batch, images.split(sizes), labels.split(sizes), parts)

    def _normalise(self, images: Tensor, mix: Mix | None = None) -> Tensor:
        """The model's input from pixels [n, H, W, C], mixed."""
        values = torch.addcmul(self.shift, images.flatten(2), self.scale)
        if mix:
            mix.images(values, self.channels)
        return values.view(images.shape).permute(0, 3, 1, 2).contiguous(memory_format=self.format)


def _upload(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """The batches, of nested dicts and tuples, with their tensors on the device.

    A GPU receives a batch while it still computes earlier ones, because the host does not wait for
    it.
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
    """The batch with its tensors on the device."""

    def copy(tensor: Tensor) -> Tensor:
        # From pinned memory, so that the host does not wait for the copy.
        return (tensor.pin_memory() if device.type == "cuda" else tensor).to(
            device, non_blocking=True
        )

    return batch if device.type == "cpu" else recursively_apply(copy, batch)


def _wait_for_copy(batch: Any, copied: torch.cuda.Event, device: torch.device) -> Any:
    """Make the current stream wait until another stream has copied the batch."""
    stream = torch.cuda.current_stream(device)
    stream.wait_event(copied)
    # Keep the memory of the tensors until the stream has used it, even if Python frees them
    # earlier.
    recursively_apply(lambda tensor: tensor.record_stream(stream), batch)
    return batch
