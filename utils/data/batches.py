"""Batches on the device: float images, augmented and mixed in training, and labels.

Mixup and CutMix mix neighbours in the order of the update, which are in the same microbatch on any
topology. Mixup: Zhang et al., 2017. CutMix: Yun et al., 2019.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import recursively_apply
from scipy.special import betaincinv
from torch import Tensor
from torch.utils.data import DataLoader

from utils.data.augment import Augmentation
from utils.data.datasets import Batch
from utils.data.draws import Draws
from utils.data.order import Microbatch
from utils.data.spec import InputSpec
from utils.settings.data import DataSettings
from utils.waiting import wait_for_items


class Mix(NamedTuple):
    """How the images of a batch are mixed; each field is a tensor with one entry, or row, for each
    image.

    * `partner`, int64 [n]: the position in the batch of the image to mix in; that of the image
      itself if it is not mixed
    * `weight`, float32 [n]: the partner's share of each pixel, inside the box
    * `share`, float32 [n]: the partner's share of the target
    * `box`, int64 [n, 4]: top, bottom, left, right; None for the whole image
    """

    partner: Tensor
    weight: Tensor
    share: Tensor
    box: Tensor | None = None

    def images(self, values: Tensor, channels: int) -> None:
        """Mix float images [n, H, W * C] in place."""
        weight = self.weight[:, None, None]
        if self.box is not None:
            top, bottom, left, right = self.box[:, :, None].unbind(1)
            rows = torch.arange(values.shape[1], device=values.device)
            columns = torch.arange(values.shape[2], device=values.device)
            inner_columns = (columns >= left * channels) & (columns < right * channels)
            inner_rows = (rows >= top) & (rows < bottom)
            weight = (weight * inner_rows[:, :, None]) * inner_columns[:, None].float()
        torch.lerp(values, values.index_select(0, self.partner), weight, out=values)

    def targets(self, labels: Tensor, outputs: int) -> Tensor:
        """The mixed targets, float32 [n, outputs], of classes, int64 [n], or rows, [n, outputs]."""
        rows = labels if labels.ndim == 2 else labels[:, None]
        if labels.ndim == 1 and outputs > 1:
            rows = torch.zeros(len(labels), outputs, device=labels.device).scatter_(1, rows, 1.0)
        return rows.float().lerp(rows.float().index_select(0, self.partner), self.share[:, None])


@dataclass
class Mixing:
    """Draws how the images of each microbatch are mixed; `outputs` is the length of a target."""

    config: DataSettings
    spec: InputSpec
    outputs: int

    def draw(self, microbatch: Microbatch) -> Mix | None:
        """How to mix a microbatch, on the host; None if nothing is mixed in its epoch.

        The samples 2k and 2k + 1 are a pair. A sample without a partner, or with itself as its
        partner, is not mixed.
        """
        config = self.config
        (_, epoch, _, indices, occurrences) = microbatch
        if config.mix_off_epoch is not None and epoch >= config.mix_off_epoch:
            return None
        first = np.arange(0, len(indices) - 1, 2)  # its draws are those of the pair
        first = first[indices[first] != indices[first + 1]]
        turns = None if occurrences is None else occurrences[first]
        streams = ("mix", "mix_which", "mix_share", "mix_row", "mix_column")
        random = Draws(config.seed, epoch, indices[first], turns).uniform(*streams).double().numpy()
        is_mixed = random[:, 0] < config.mix_prob
        first = first[is_mixed]
        (_, which, quantile, row, column) = random[is_mixed].T
        is_cut = np.zeros(len(first), bool)
        if config.cutmix:
            is_cut = (which < 0.5) | (config.mixup == 0)
        alpha = np.where(is_cut, config.cutmix, config.mixup)
        # a Beta variate, by its inverse CDF
        drawn = 1 - betaincinv(alpha, alpha, quantile)
        height, width = self.spec.size
        box = _boxes(self.spec.size, drawn, row, column)
        area = (box[:, 1] - box[:, 0]) * (box[:, 3] - box[:, 2])
        weight = np.where(is_cut, 1, drawn)
        share = np.where(is_cut, area / (height * width), drawn)
        box = np.where(is_cut[:, None], box, [0, height, 0, width])
        # Both images of a pair have the same numbers; those of unmixed images are 0.
        pairs = np.stack([first, first + 1])
        partner = np.arange(len(indices))
        partner[pairs] = pairs[::-1]
        weights, shares = np.zeros((2, len(indices)), np.float32)
        boxes = np.zeros((len(indices), 4), np.int64)
        weights[pairs] = weight
        shares[pairs] = share
        boxes[pairs] = box
        mixed = [torch.from_numpy(numbers) for numbers in (partner, weights, shares, boxes)]
        return Mix(*mixed) if config.cutmix else Mix(*mixed[:3])


def _boxes(
    size: tuple[int, int], share: np.ndarray, row: np.ndarray, column: np.ndarray
) -> np.ndarray:
    """Boxes with this share of the area around random centres, cut off at the edges of the image:
    int64 [m, 4].
    """
    box = []
    for side, centre in zip(size, (row, column), strict=True):
        middle = (centre * side).astype(np.int64)
        half = (np.sqrt(share) * side / 2).astype(np.int64)
        box += [np.maximum(middle - half, 0), np.minimum(middle + half, side)]
    return np.stack(box, 1)


class DeviceLoader:
    """The batches of a prepared loader as the model's float input on the device, augmented and
    mixed in training.

    `error` is set if this rank could not read a sample. `outputs`, the length of a mixed target, is
    only needed with Mixup or CutMix.
    """

    def __init__(
        self,
        loader: DataLoader,
        spec: InputSpec,
        config: DataSettings,
        device: torch.device,
        training: bool,
        outputs: int = 0,
    ):
        self.loader = loader  # as Accelerate wraps it
        self.device = device
        self.error: Exception | None = None
        self.what = "a training batch" if training else "an evaluation batch"
        dataset: Any = loader.dataset
        self.dataset = dataset  # its `labels` are those of the whole split
        self.no_labels = torch.tensor(dataset.labels[:0], device=device)
        # Accelerate would copy on the compute stream; `_upload` copies instead
        self.loader.device = None
        self.mixing = Mixing(config, spec, outputs) if training and config.mixes else None
        self.format = torch.channels_last if config.channels_last else torch.contiguous_format
        std = torch.tensor(spec.std, device=device)
        scale = 1 / (255 * std)
        shift = -torch.tensor(spec.mean, device=device) / std
        # One value for each channel of a whole row of pixels, so that inner loops are long.
        self.scale, self.shift = scale.repeat(spec.width), shift.repeat(spec.width)
        self.channels = spec.channels
        shape = (spec.channels, spec.height, spec.width)
        if dataset.source is not None:  # features
            shape = dataset.rows.shape[1:]
        self.no_images = torch.empty(0, *shape, device=device)  # an empty input of the model

    def check(self) -> None:
        """Raise the error of a sample that could not be read, whose batch was left empty."""
        if self.error:
            raise self.error

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        to_device = self._drawn if self.dataset.on_device else self._streamed
        for batch in to_device(wait_for_items(self.loader, self.what)):
            self.error = batch.error or self.error
            mix = None
            labels = batch.labels
            if self.mixing and (mix := _to(self.mixing.draw(batch.microbatch), self.device)):
                labels = mix.targets(labels, self.mixing.outputs)
            labels = labels.float() if labels.ndim == 2 else labels  # copied to the device as bytes
            images = batch.images
            if images.dtype == torch.uint8:  # not features
                images = self._normalise(images, mix)
            elif images.storage_offset() * 4 % 256:  # cuBLAS may choose a kernel by the address
                images = images.clone()
            yield batch._replace(images=images, labels=labels)

    def _streamed(self, loaded: Iterator[Batch]) -> Iterator[Batch]:
        """Batches on the device from batches of pixels, augmented."""
        augmentation = Augmentation() if self.dataset.in_loader else self.dataset.augmentation
        drawn = ((batch, augmentation.draw(batch.microbatch)) for batch in loaded)
        for batch, random in _upload(drawn, self.device):
            yield batch._replace(images=augmentation.apply(batch.images, random))

    def _drawn(self, loaded: Iterator[Batch]) -> Iterator[Batch]:
        """Batches drawn from images on the device, augmented, from batches without pixels."""
        all_rows, all_labels = self.dataset.on_device
        augmentation = self.dataset.augmentation
        for joined, parts in _upload(self.dataset.groups(loaded), self.device):
            images = all_rows.index_select(0, self.dataset.row_of(joined))
            labels = all_labels.index_select(0, joined.indices)
            images = augmentation.apply(images, augmentation.draw(joined))
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
            uploaded = _to(batch, device)
            copied = stream.record_event()
        yield _wait_for_copy(uploaded, copied, device)


def _to(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on the device."""

    def copy(tensor: Tensor) -> Tensor:
        # From pinned memory, so that the host does not wait for the copy.
        pinned = tensor.pin_memory() if device.type == "cuda" else tensor
        return pinned.to(device, non_blocking=True)

    return batch if device.type == "cpu" else recursively_apply(copy, batch)


def _wait_for_copy(batch: Any, copied: torch.cuda.Event, device: torch.device) -> Any:
    """Make the current stream wait until another stream has copied the batch."""
    stream = torch.cuda.current_stream(device)
    stream.wait_event(copied)
    # Keep the tensors' memory until the stream has used it, even if Python frees them earlier.
    recursively_apply(lambda tensor: tensor.record_stream(stream), batch)
    return batch
