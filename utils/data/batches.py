"""Batches on the device: float images, augmented when training, and labels."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from utils.config.settings import TrainConfig
from utils.data.augment import row_starts, shift_and_flip, uniform
from utils.data.spec import InputSpec
from utils.waiting import awaited

_CACHE = 2**18  # floats that stay in a processor's cache of 1 MiB


class Batch(NamedTuple):
    """Images [n, C, H, W] float32, labels [n] int64, and the samples' positions in their split [n] int64; n >= 0."""

    images: Tensor
    labels: Tensor
    indices: Tensor


class Batches:
    """The batches of a prepared loader as the model's float input on the device, augmented when training.

    `left_out` counts the samples of the last pass that could not be read. `bad` maps the positions of newly found
    ones to the reasons; `told` has those that all ranks have agreed on.
    """

    def __init__(self, loader: DataLoader, spec: InputSpec, config: TrainConfig, device: torch.device, training: bool):
        self.loader, self.seed, self.device, self.error = loader, config.seed, device, None
        self.left_out, self.bad, self.agreed_bad = 0, {}, set()
        self.what = "a training batch" if training else "an evaluation batch"
        loader.device = None  # Accelerate would copy in the stream that computes; here `_upload` does
        self.padding = config.crop_padding if training and spec.small else 0
        self.flip = training and spec.small and config.flip
        self.format = torch.channels_last if config.channels_last else torch.contiguous_format
        std = torch.tensor(spec.std, device=device)
        scale, shift = 1 / (255 * std), -torch.tensor(spec.mean, device=device) / std
        self.scale, self.shift = scale.repeat(spec.width), shift.repeat(spec.width)  # of a row, as inner loops are long

    def check(self) -> None:
        """Raise ValueError if a sample could not be read; its batch was then given as an empty one."""
        if self.error is not None:
            raise ValueError(self.error)

    @property
    def labels(self) -> np.ndarray:
        """The true classes of the whole split, int64 [N]."""
        return self.loader.dataset.labels

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        self.left_out = 0
        for batch in _upload(map(self._draw, awaited(self.loader, self.what)), self.device):
            self.error = batch.get("error", self.error)
            self.left_out += batch["left_out"]
            self.bad |= batch.get("bad", {})
            yield self._without_agreed_bad(Batch(self._input(batch), batch["labels"], batch["indices"]))

    def _without_agreed_bad(self, batch: Batch) -> Batch:
        """The batch without images that can be read again: left out once, they stay left out, as after a resume."""
        if not self.agreed_bad:
            return batch
        kept = ~torch.isin(batch.indices, torch.tensor(sorted(self.agreed_bad), device=batch.indices.device))
        self.left_out += int((~kept).sum())
        return Batch(*(values[kept] for values in batch))

    def _draw(self, batch: dict) -> dict:
        if self.padding or self.flip:
            random, size = uniform(self.seed, batch["epoch"], batch["indices"].numpy(), 3), batch["images"].shape[1:3]
            batch["mirrored"], batch["starts"] = row_starts(random, *size, self.padding, self.flip)
        return batch

    def _input(self, batch: dict) -> Tensor:
        images = batch["images"]
        if "starts" in batch:
            images = shift_and_flip(images, batch["mirrored"], batch["starts"], self.padding)
        values = torch.empty(images.shape, device=images.device)
        # On a processor few images at a time, whose floats stay in its cache between the two steps.
        count = max(1, _CACHE // max(1, images[:1].numel())) if images.device.type == "cpu" else max(1, len(images))
        for pixels, result in zip(images.flatten(2).split(count), values.flatten(2).split(count), strict=True):
            torch.addcmul(self.shift, result.copy_(pixels), self.scale, out=result)
        return values.permute(0, 3, 1, 2).contiguous(memory_format=self.format)


def _upload(batches: Iterator[dict], device: torch.device) -> Iterator[dict]:
    """The batches with their tensors on the device; a GPU gets each while it computes on the one before."""
    if device.type != "cuda":
        yield from (_to(batch, device) for batch in batches)
        return
    stream, ready = torch.cuda.Stream(device), None
    for batch in batches:
        with torch.cuda.stream(stream):
            following = _to(batch, device), stream.record_event()
        if ready is not None:
            yield _hand_over(*ready)
        ready = following
    if ready is not None:
        yield _hand_over(*ready)


def _to(batch: dict, device: torch.device) -> dict:
    def move(value: Tensor) -> Tensor:  # from pinned memory the processor need not wait for the copy
        return (value.pin_memory() if device.type == "cuda" else value).to(device, non_blocking=True)

    return {name: move(value) if isinstance(value, Tensor) else value for name, value in batch.items()}


def _hand_over(batch: dict, copied: torch.cuda.Event) -> dict:
    """Let the current stream use what another has copied, once that is done."""
    stream = torch.cuda.current_stream(batch["images"].device)
    stream.wait_event(copied)
    for value in batch.values():
        if isinstance(value, Tensor):
            value.record_stream(stream)  # else its memory is reused as soon as Python lets go of it
    return batch
