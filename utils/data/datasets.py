"""Data sets that return one microbatch at a time: decoded small images or features of images, also
on the device, and photographs.
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


_SHARE = 1 / 4  # of a GPU's free memory that --data_on_device auto uses at most
_GROUP = 2**25  # most bytes of pixels that are drawn together


@dataclass(eq=False)
class ArrayDataset(Dataset):
    """Decoded images, uint8 [N, H, W, C], or features: the outputs of frozen layers for V views of
    each image, float32 [V * N, ...], all samples of the first view first.

    A sample has view (epoch + occurrence) modulo V; its occurrence in the epoch counts from 0. A
    batch is one indexed copy. It is augmented on the device, or `in_loader` if the augmentation has
    transforms of single images.
    """

    rows: np.ndarray
    labels: np.ndarray  # of the N samples
    augmentation: Augmentation = field(default_factory=Augmentation)
    origin: str = "decoded"  # how the rows were made, or where they were found
    source: "ImageDataset | None" = None  # of features: the images that they were computed from
    # positions of the samples in `source`; None if they are the same
    source_rows: np.ndarray | None = None
    thumbnails: Any = None  # small grey images of the samples, float32 [N, D], where they are known
    on_device: tuple[Tensor, Tensor] | None = None  # the rows and labels, after `move`

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def in_loader(self) -> bool:
        return not all(transform.batched for transform in self.augmentation.transforms)

    @property
    def image_bytes(self) -> int:
        return self.rows[:1].nbytes

    @property
    def place(self) -> str:
        where = "in host memory" if self.source is None else "cached"
        if self.on_device:
            where = f"on {self.on_device[0].device}"
        how = ", augmented by loader processes" if self.in_loader else ""
        return f"{self.origin}, {bytes_text(self.rows.nbytes)} {where}{how}"

    def row_of(self, microbatch: Microbatch) -> Any:
        """The row of each sample, int64 [n], an array or a tensor like its indices."""
        if len(self.rows) == len(self):
            return microbatch.indices
        views = len(self.rows) // len(self)
        turns = 0 if microbatch.occurrences is None else microbatch.occurrences
        return (microbatch.epoch + turns) % views * len(self) + microbatch.indices

    def __getitems__(self, microbatch: Microbatch) -> Batch:
        if self.on_device:  # drawn there, in groups
            return Batch(torch.empty(0), torch.empty(0), microbatch)
        images = torch.from_numpy(self.rows[self.row_of(microbatch)])
        if self.in_loader:
            images = self.augmentation.apply(images, self.augmentation.draw(microbatch))
        return Batch(images, torch.from_numpy(self.labels[microbatch.indices]), microbatch)

    def move(self, device: torch.device) -> None:
        """Copy the rows and labels to the device. From now on, batches are loaded without them."""
        with warnings.catch_warnings():
            # the map of the cache; it is only read
            warnings.filterwarnings("ignore", message=".*not writable")
            rows = torch.from_numpy(self.rows).to(device).contiguous()
        self.on_device = rows, torch.tensor(self.labels, device=device)

    def groups(self, batches: Iterable[Batch]) -> Iterator[tuple[Microbatch, list[Microbatch]]]:
        """Groups of microbatches of one epoch, to be drawn on the device: joined into one, with its
        samples as tensors, and as a list.

        Drawing takes about fifty kernels. For a single microbatch, a GPU would run them faster than
        the host launches them, so consecutive microbatches share them.
        """
        most = _GROUP // max(1, self.image_bytes)
        group: list[Microbatch] = []
        count = 0  # samples in the group
        for microbatch in (batch.microbatch for batch in batches):
            count += len(microbatch.indices)
            if group and (microbatch.epoch != group[0].epoch or count > most):
                yield _joined(group), group
                group = []
                count = len(microbatch.indices)
            group.append(microbatch)
        if group:
            yield _joined(group), group


def _joined(group: list[Microbatch]) -> Microbatch:
    """The microbatches as one, with its samples as tensors."""
    joined: dict = {"indices": torch.from_numpy(np.concatenate([part.indices for part in group]))}
    if group[0].occurrences is not None:  # those of all microbatches, or of none
        occurrences = [np.asarray(part.occurrences) for part in group]
        joined["occurrences"] = torch.from_numpy(np.concatenate(occurrences))
    return group[0]._replace(**joined)


class PhotoDataset(Dataset):
    """Photographs, decoded and augmented for each batch; by default, their centre."""

    in_loader = True
    place = "decoded for each batch"
    # as in ArrayDataset
    source = None
    thumbnails = None
    on_device = None

    def __init__(self, split: Split, spec: InputSpec, augmentation: Augmentation | None = None):
        self.split = split
        self.spec = spec
        self.labels = split.labels
        self.augmentation = augmentation or Augmentation(0, [Center(spec)])

    def __len__(self) -> int:
        return len(self.labels)

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


ImageDataset = ArrayDataset | PhotoDataset


def keep_on_device(
    sets: Sequence[ImageDataset], config: DataSettings, device: torch.device
) -> None:
    """Move the decoded images and features of a run to the device, as --data_on_device says.

    Images that loader processes augment stay in host memory.
    """
    kept = [each for each in sets if isinstance(each, ArrayDataset) and not each.in_loader]
    size = sum(each.rows.nbytes for each in kept)
    how = config.data_on_device
    # on a CPU they are already there
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else size
    if how == "no" or (how == "auto" and size > _SHARE * free):
        return
    problem = f"{bytes_text(size)} of images or features, but {device} has {bytes_text(free)} free"
    require(size <= free, f"--data_on_device yes: {problem}", "use auto or no")
    for each in kept:
        each.move(device)


def describe_place(sets: Sequence[ImageDataset]) -> str:
    """Where the images or features of training and evaluation are, for the table at the start."""
    places = [each.place for each in sets]
    if len(set(places)) == 1:
        return places[0]
    return f"training: {places[0]}; evaluation: {places[1]}"
