"""Datasets that return one microbatch at a time: decoded small images, also on the device, and photographs."""

import warnings
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from utils.config.settings import TrainConfig
from utils.data.augment import Augmentation
from utils.data.cache import SharedImages
from utils.data.decode import center, center_factor, decode
from utils.data.order import Microbatch
from utils.data.spec import InputSpec
from utils.data.splits import Split
from utils.errors import UserError, one_line
from utils.memory import bytes_text


class DecodedImages(Dataset):
    """Images decoded beforehand, uint8 [N, H, W, C]; a batch is one indexed copy.

    With an `augmentation`, the images are changed one by one as well. Otherwise the batch is changed on the device.
    """

    def __init__(
        self,
        pixels: np.ndarray | SharedImages,
        labels: np.ndarray,
        readable: np.ndarray | None = None,
        augmentation: Augmentation | None = None,
    ):
        self.pixels, self.labels, self.augmentation = pixels, labels, augmentation
        self.readable = np.ones(len(labels), bool) if readable is None else readable  # bool [N]

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def image_bytes(self) -> int:
        return self.pixels[np.arange(1)].nbytes

    def readable_part(self, microbatch: Microbatch) -> Microbatch:
        """The microbatch without unreadable samples."""
        return microbatch.take(self.readable[microbatch.indices])

    def __getitems__(self, microbatch: Microbatch) -> dict:
        microbatch = self.readable_part(microbatch)
        images = torch.from_numpy(self.pixels[microbatch.indices])
        if self.augmentation is not None:
            random = self.augmentation.draw(microbatch)
            for place, pixels in enumerate(images):
                images[place] = self.augmentation.image(pixels, random, place)
        return _batch(microbatch, images, self.labels)


class EncodedImages(Dataset):
    """Photographs, decoded and augmented for each batch, without those that are known to be unreadable."""

    fix = "fix it, or start or resume with --bad_images skip, which leaves it out"

    def __init__(self, split: Split, spec: InputSpec, augmentation: Augmentation):
        self.split, self.spec, self.augmentation = split, spec, augmentation
        self.labels, self.readable = split.labels, split.readable

    def __len__(self) -> int:
        return len(self.split)

    @property
    def image_bytes(self) -> int:
        return self.spec.height * self.spec.width * self.spec.channels

    def __getitems__(self, microbatch: Microbatch) -> dict:
        spec, microbatch = self.spec, microbatch.take(self.readable[microbatch.indices])
        indices = microbatch.indices.tolist()
        images = torch.empty(len(indices), spec.height, spec.width, spec.channels, dtype=torch.uint8)
        random = self.augmentation.draw(microbatch)
        try:
            encoded = self.split.read_ahead(indices)
            for place, position in enumerate(indices):
                images[place] = self._image(position, encoded[place], random, place)
        except (ValueError, OSError) as error:  # returned: a worker's exception would include its traceback
            empty = _batch(microbatch.take([]), images[:0], self.labels)
            return empty | {"error": UserError(one_line(error), self.fix)}
        return _batch(microbatch, images, self.labels)

    def _image(self, position: int, raw: bytes | None, random: dict, place: int) -> Tensor:
        """The decoded and augmented pixels of one sample."""
        shrink = self.augmentation.shrink(random, place)
        pixels = decode(self.split, position, self.spec.channels, raw, shrink)
        return self.augmentation.image(pixels, random, place)


class ImagesToPredict(EncodedImages):
    """Images of any size, decoded for each batch as in evaluation."""

    fix = "run the command again; it will check the images again and leave this one out"

    def _image(self, position: int, raw: bytes | None, random: dict, place: int) -> Tensor:
        if not self.spec.small:
            return super()._image(position, raw, random, place)
        shrink = partial(center_factor, height=self.spec.height, width=self.spec.width)
        pixels = decode(self.split, position, self.spec.channels, raw, shrink)
        return center(pixels, *self.spec.size)  # as in the cache of an evaluation


def _batch(microbatch: Microbatch, images: Tensor, labels: np.ndarray) -> dict:
    return {
        "images": images,
        "labels": torch.from_numpy(labels[microbatch.indices]),
        "microbatch": microbatch,  # its arrays are not copied to the device
    }


_SHARE = 1 / 4  # of a GPU's free memory that --data_on_device auto uses at most
_GROUP = 2**25  # most bytes of pixels that are drawn together


class ResidentImages(DecodedImages):
    """Decoded images on the device. Microbatches are loaded without pixels, and drawn there in groups.

    Drawing takes about fifty kernels. For a single microbatch, a GPU would run them faster than the host launches them,
    so consecutive microbatches share them.
    """

    def __init__(self, decoded: DecodedImages, device: torch.device):
        super().__init__(decoded.pixels, decoded.labels, decoded.readable)
        pixels, rows = _distinct(decoded.pixels)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*not writable")  # the map of the cache; it is only read
            self.images = torch.from_numpy(pixels).to(device).contiguous()
        self.rows = None if rows is None else torch.from_numpy(rows).to(device)
        self.targets = torch.tensor(decoded.labels, device=device)

    def __getitems__(self, microbatch: Microbatch) -> dict:
        return {"microbatch": self.readable_part(microbatch)}

    def groups(self, batches: Iterator[dict]) -> Iterator[dict]:
        """Join microbatches of one epoch; tensors are copied to the device."""
        most = _GROUP // max(1, self.images[:1].numel())
        group: list[dict] = []
        count = 0  # samples in the group
        for batch in batches:
            microbatch = batch["microbatch"]
            count += len(microbatch.indices)
            if group and (microbatch.epoch != group[0]["microbatch"].epoch or count > most):
                yield _joined(group)
                group, count = [], len(microbatch.indices)
            group.append(batch)
        if group:
            yield _joined(group)

    def draw(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """The images [n, H, W, C] and labels [n] of samples; all on the device."""
        rows = indices if self.rows is None else self.rows.index_select(0, indices)
        return self.images.index_select(0, rows), self.targets.index_select(0, indices)


def keep_on_device(
    sets: Sequence[DecodedImages | EncodedImages], config: TrainConfig, device: torch.device
) -> list[DecodedImages | EncodedImages]:
    """The data sets of a run, with decoded images on the device as --data_on_device says.

    Images that loader processes augment stay in host memory.
    """
    decoded = [each for each in sets if isinstance(each, DecodedImages) and each.augmentation is None]
    size, cuda = sum(map(_size, decoded)), device.type == "cuda"
    if not decoded or config.data_on_device == "no":
        return list(sets)
    free = torch.cuda.mem_get_info(device)[0] if cuda else size  # on a CPU they are already there
    if config.data_on_device == "auto" and size > _SHARE * free:
        return list(sets)
    if size > free:
        problem = f"--data_on_device yes: {bytes_text(size)} of images, but {device} has {bytes_text(free)} free"
        raise UserError(problem, "use auto or no")
    return [ResidentImages(each, device) if each in decoded else each for each in sets]


def describe_place(sets: Sequence[DecodedImages | EncodedImages]) -> str:
    """Where the images of a run are, and their size, for the table at the start of the run."""
    decoded = [each for each in sets if isinstance(each, DecodedImages)]
    if not decoded:
        return "photographs, decoded for each batch"
    places = {f"on {each.images.device}" if isinstance(each, ResidentImages) else "in host memory" for each in decoded}
    by_loader = ", augmented by loader processes" * any(each.augmentation is not None for each in decoded)
    others = "; the larger images of the other split are decoded for each batch" * (len(decoded) < len(sets))
    return f"decoded, {bytes_text(sum(map(_size, decoded)))} {' and '.join(sorted(places))}{by_loader}{others}"


def _size(decoded: DecodedImages) -> int:
    return _distinct(decoded.pixels)[0].nbytes


def _distinct(pixels: np.ndarray | SharedImages) -> tuple[np.ndarray, np.ndarray | None]:
    """The stored images, and the row of each sample, int64 [N]; None if every sample has its own."""
    rows = None
    while isinstance(pixels, SharedImages):
        rows, pixels = pixels.rows if rows is None else pixels.rows[rows], pixels.images
    return pixels, rows


def _joined(group: list[dict]) -> dict:
    """The microbatches as one, with its samples as tensors; `parts` has the batches."""
    parts = [batch["microbatch"] for batch in group]
    joined = {
        name: torch.from_numpy(np.concatenate([getattr(part, name) for part in parts]))
        for name in ("indices", "occurrences")
        if getattr(parts[0], name) is not None  # the occurrences of all microbatches, or of none
    }
    return {"microbatch": parts[0]._replace(**joined), "parts": group}
