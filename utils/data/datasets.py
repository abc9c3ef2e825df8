"""Data sets that return one microbatch at a time: small images that are already decoded, also on
the device, photographs, and features of images.
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from utils.config import require
from utils.data.augment import Augmentation, Center
from utils.data.decode import decode_image
from utils.data.order import Microbatch
from utils.data.spec import InputSpec
from utils.data.splits import Split
from utils.errors import UserError, one_line
from utils.memory import bytes_text
from utils.settings.data import DataSettings


class Batch(NamedTuple):
    """A microbatch, from its data set to the model; n >= 0.

    `images` are uint8 [n, H, W, C] and become float32 [n, C, H, W], or they are features, float32
    [n, ...]. `labels` are classes, int64 [n], or multi-hot, [n, classes]. With Mixup or CutMix,
    they become the share of each class, float32 [n, outputs]. `error` is why a sample could not be
    read; the batch is then empty.
    """

    images: Tensor
    labels: Tensor
    microbatch: Microbatch
    error: Exception | None = None

    @property
    def indices(self) -> Tensor:
        """The positions of the samples in their split, int64 [n], on the host."""
        return torch.as_tensor(self.microbatch.indices)

    @property
    def update(self) -> int:
        return self.microbatch.update

    @property
    def number(self) -> int:
        return self.microbatch.number

    def failed(self, error: Exception) -> "Batch":
        """The batch without its samples."""
        microbatch = self.microbatch._replace(indices=self.microbatch.indices[:0], occurrences=None)
        # Copies, because PyTorch would send the whole memory of an empty view to another process.
        return Batch(self.images[:0].clone(), self.labels[:0].clone(), microbatch, error)


class _Labelled(Dataset):
    """A data set whose length is that of its labels."""

    labels: np.ndarray
    thumbnails: Any = None  # small grey images of the samples, float32 [N, D], where they are known

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(eq=False)
class CachedDataset(_Labelled):
    """Images decoded beforehand, uint8 [N, H, W, C]; a batch is one indexed copy.

    The batch is augmented on the device, or `in_loader` if the augmentation has transforms of
    single images.
    """

    pixels: np.ndarray
    labels: np.ndarray
    augmentation: Augmentation = field(default_factory=Augmentation)

    @property
    def in_loader(self) -> bool:
        return not all(transform.batched for transform in self.augmentation.transforms)

    @property
    def image_bytes(self) -> int:
        return self.pixels[:1].nbytes

    @property
    def nbytes(self) -> int:
        return self.pixels.nbytes

    @property
    def place(self) -> str:
        how = ", augmented by loader processes" if self.in_loader else ""
        return f"decoded, {bytes_text(self.nbytes)} in host memory{how}"

    def __getitems__(self, microbatch: Microbatch) -> Batch:
        images = torch.from_numpy(self.pixels[microbatch.indices])
        if self.in_loader:
            images = self.augmentation.apply(images, self.augmentation.draw(microbatch))
        return Batch(images, torch.from_numpy(self.labels[microbatch.indices]), microbatch)


class PhotoDataset(_Labelled):
    """Photographs, decoded and augmented for each batch; by default, their centre."""

    in_loader = True
    place = "decoded for each batch"

    def __init__(self, split: Split, spec: InputSpec, augmentation: Augmentation | None = None):
        self.split, self.spec, self.labels = split, spec, split.labels
        self.augmentation = augmentation or Augmentation(0, [Center(spec)])

    @property
    def image_bytes(self) -> int:
        return self.spec.height * self.spec.width * self.spec.channels

    def __getitems__(self, microbatch: Microbatch) -> Batch:
        spec = self.spec
        indices = microbatch.indices.tolist()
        images = torch.empty(len(indices), *spec.size, spec.channels, dtype=torch.uint8)
        batch = Batch(images, torch.from_numpy(self.labels[microbatch.indices]), microbatch)
        random = self.augmentation.draw(microbatch)
        crop = self.augmentation.transforms[0]
        try:
            encoded = self.split.read_ahead(indices)
            for place, (position, raw) in enumerate(zip(indices, encoded, strict=True)):
                shrink = partial(crop.shrink, random[0][place])
                pixels = decode_image(self.split, position, spec.channels, raw, shrink)
                images[place] = crop.image(pixels, random[0][place])
        # returned: a worker's exception would include its traceback
        except (ValueError, OSError) as error:
            return batch.failed(UserError(one_line(error)))
        return batch._replace(images=self.augmentation.apply(images, random, 1))


_SHARE = 1 / 4  # of a GPU's free memory that --data_on_device auto uses at most
_GROUP = 2**25  # most bytes of pixels that are drawn together


class OnDevice(_Labelled):
    """Decoded images or features on the device. Microbatches are loaded without them, and drawn
    there in groups.

    Drawing takes about fifty kernels. For a single microbatch, a GPU would run them faster than the
    host launches them, so consecutive microbatches share them.
    """

    def keep(self, rows: np.ndarray, labels: np.ndarray, device: torch.device) -> None:
        """Copy the images or features, and as many labels, to the device."""
        with warnings.catch_warnings():
            # the map of the cache; it is only read
            warnings.filterwarnings("ignore", message=".*not writable")
            self.on_device = torch.from_numpy(rows).to(device).contiguous()
        self.targets = torch.tensor(labels, device=device)

    def rows(self, microbatch: Microbatch) -> np.ndarray:
        """The row of each sample on the device, int64 [n]."""
        return microbatch.indices

    @property
    def where(self) -> str:
        return f"{bytes_text(self.on_device.nbytes)} on {self.on_device.device}"

    def __getitems__(self, microbatch: Microbatch) -> Batch:
        return Batch(torch.empty(0), torch.empty(0), microbatch)

    def groups(self, batches: Iterable[Batch]) -> Iterator[tuple[Microbatch, list[Microbatch]]]:
        """Groups of microbatches of one epoch: joined into one, with its samples as tensors, and as
        a list.
        """
        most = _GROUP // max(1, self.on_device[:1].nbytes)
        group: list[Microbatch] = []
        count = 0  # samples in the group
        for microbatch in (batch.microbatch for batch in batches):
            count += len(microbatch.indices)
            if group and (microbatch.epoch != group[0].epoch or count > most):
                yield self._joined(group), group
                group = []
                count = len(microbatch.indices)
            group.append(microbatch)
        if group:
            yield self._joined(group), group

    def _joined(self, group: list[Microbatch]) -> Microbatch:
        """The microbatches as one, with its rows on the device as tensors."""
        joined: dict = {"indices": torch.from_numpy(np.concatenate([*map(self.rows, group)]))}
        if group[0].occurrences is not None:  # those of all microbatches, or of none
            occurrences = [np.asarray(part.occurrences) for part in group]
            joined["occurrences"] = torch.from_numpy(np.concatenate(occurrences))
        return group[0]._replace(**joined)


class DeviceDataset(OnDevice, CachedDataset):
    """Decoded images on the device."""

    def __init__(self, decoded: CachedDataset, device: torch.device):
        CachedDataset.__init__(self, decoded.pixels, decoded.labels, decoded.augmentation)
        self.keep(decoded.pixels, decoded.labels, device)

    @property
    def place(self) -> str:
        return f"decoded, {self.where}"


ImageDataset = CachedDataset | PhotoDataset


class Features(_Labelled):
    """The outputs of frozen layers for K views of the images of a split, float32 [K, N, ...].

    A sample has view (epoch + occurrence) modulo K; its occurrence in the epoch counts from 0.
    `images` is the data set from which the features were computed; `image_rows`, if it is not None,
    are the positions of the samples in it. `origin` describes the views, and says whether they were
    computed or found in the cache.
    """

    in_loader = False
    image_rows: np.ndarray | None = None
    augmentation = Augmentation()
    image_bytes = 0  # not sent between processes

    def __init__(self, views: np.ndarray, images: ImageDataset, thumbnails: Any, origin: str):
        self.views, self.images, self.labels, self.origin = views, images, images.labels, origin
        self.thumbnails = thumbnails

    @property
    def place(self) -> str:
        numbers = " x ".join(map(str, self.views.shape[2:]))
        return f"{self.origin}, {numbers} features of each view, {self.where}"

    @property
    def nbytes(self) -> int:
        return self.views.nbytes

    @property
    def where(self) -> str:
        return f"{bytes_text(self.nbytes)} cached"

    def __getitems__(self, microbatch: Microbatch) -> Batch:
        indices = microbatch.indices
        rows = torch.from_numpy(self.views[self._choose(microbatch), indices])
        return Batch(rows, torch.from_numpy(self.labels[indices]), microbatch)

    def pixels(self, microbatch: Microbatch, most: int) -> Tensor:
        """The images from which the first features of a microbatch were computed, uint8 [n, H, W,
        C], n <= `most`.
        """
        indices = microbatch.indices
        if self.image_rows is not None:
            indices = self.image_rows[indices]
        chosen = zip(indices[:most, None], self._choose(microbatch).tolist(), strict=False)
        return torch.cat([self._image(Microbatch(0, view, 0, index)) for index, view in chosen])

    def _image(self, microbatch: Microbatch) -> Tensor:
        images = self.images.__getitems__(microbatch).images
        augmentation = self.images.augmentation
        if self.images.in_loader:
            return images
        return augmentation.apply(images, augmentation.draw(microbatch))

    def _choose(self, microbatch: Microbatch) -> np.ndarray:
        """The view of each sample, int64 [n]."""
        occurrences = 0 if microbatch.occurrences is None else microbatch.occurrences
        zeros = np.zeros_like(microbatch.indices)
        return (microbatch.epoch + occurrences + zeros) % len(self.views)


class DeviceFeatures(OnDevice, Features):
    """Features on the device, float32 [K * N, ...]."""

    def __init__(self, cached: Features, device: torch.device):
        vars(self).update(vars(cached))
        views = cached.views
        labels = np.concatenate([cached.labels] * len(views))
        self.keep(views.reshape(-1, *views.shape[2:]), labels, device)

    def rows(self, microbatch: Microbatch) -> np.ndarray:
        return self._choose(microbatch) * len(self.labels) + microbatch.indices


AnyDataset = ImageDataset | Features


def keep_on_device(
    sets: Sequence[AnyDataset], config: DataSettings, device: torch.device
) -> list[AnyDataset]:
    """The data sets of a run, with decoded images and features on the device as --data_on_device
    says.

    Images that loader processes augment stay in host memory.
    """
    kept = [
        each for each in sets if isinstance(each, CachedDataset | Features) and not each.in_loader
    ]
    size = sum(each.nbytes for each in kept)
    how = config.data_on_device
    # on a CPU they are already there
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else size
    if how == "no" or (how == "auto" and size > _SHARE * free):
        return list(sets)
    problem = f"{bytes_text(size)} of images or features, but {device} has {bytes_text(free)} free"
    require(size <= free, f"--data_on_device yes: {problem}", "use auto or no")
    return [_on_device(each, device) if each in kept else each for each in sets]


def _on_device(dataset: Any, device: torch.device) -> AnyDataset:
    kind = DeviceFeatures if isinstance(dataset, Features) else DeviceDataset
    return kind(dataset, device)


def describe_place(sets: Sequence[AnyDataset]) -> str:
    """Where the images or features of training and evaluation are, for the table at the start."""
    places = [each.place for each in sets]
    if len(set(places)) == 1:
        return places[0]
    return f"training: {places[0]}; evaluation: {places[1]}"
