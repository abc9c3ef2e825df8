"""Datasets that return one microbatch at a time, of decoded small images or of photographs."""

from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from utils.data.augment import Augmentation
from utils.data.cache import SharedImages
from utils.data.decode import center, center_factor, decode
from utils.data.order import Microbatch
from utils.data.spec import InputSpec
from utils.data.splits import Split
from utils.errors import UserError, one_line


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

    fix = "run the same command again, which checks the images again"

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
