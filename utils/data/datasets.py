"""Datasets that return one microbatch at a time, of decoded small images or of photographs."""

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from utils.data.augment import Augmentation
from utils.data.cache import SharedImages
from utils.data.decode import BAD_IMAGE_FIX, Shrink, center, decode, shrink_to_center
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
        self.readable = None if readable is None or readable.all() else readable  # bool [N]

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def image_bytes(self) -> int:
        return self.pixels[np.arange(1)].nbytes

    def readable_part(self, microbatch: Microbatch) -> Microbatch:
        """The microbatch without unreadable samples."""
        return microbatch if self.readable is None else microbatch.take(self.readable[microbatch.indices])

    def __getitems__(self, microbatch: Microbatch) -> dict:
        requested, microbatch = len(microbatch.indices), self.readable_part(microbatch)
        images = torch.from_numpy(self.pixels[microbatch.indices])
        if self.augmentation is not None:
            random = self.augmentation.draw(microbatch)
            for place, pixels in enumerate(images):
                images[place] = self.augmentation.image(pixels, random, place)
        return _batch(microbatch, images, self.labels, requested)


class EncodedImages(Dataset):
    """Photographs, decoded and augmented for each batch.

    A batch leaves out images that are known to be unreadable. With `skip`, also those that cannot be decoded.
    """

    def __init__(self, split: Split, spec: InputSpec, augmentation: Augmentation, skip: bool = False):
        self.split, self.spec, self.augmentation = split, spec, augmentation
        self.skip, self.labels = skip, split.labels

    def __len__(self) -> int:
        return len(self.split)

    @property
    def image_bytes(self) -> int:
        return self.spec.height * self.spec.width * self.spec.channels

    def __getitems__(self, microbatch: Microbatch) -> dict:
        spec, requested = self.spec, len(microbatch.indices)
        microbatch = microbatch.take(self.split.readable[microbatch.indices])
        indices = microbatch.indices.tolist()
        images = torch.empty(len(indices), spec.height, spec.width, spec.channels, dtype=torch.uint8)
        random = self.augmentation.draw(microbatch)
        kept: list[int] = []
        bad: dict[int, str] = {}
        try:
            encoded = self.split.read_ahead(indices)
            for place, position in enumerate(indices):
                try:
                    shrink = self.augmentation.shrink(random, place)
                    pixels = decode(self.split, position, spec.channels, encoded[place], shrink)
                    images[len(kept)] = self.augmentation.image(pixels, random, place)
                    kept.append(place)
                except ValueError as error:
                    # Skip only images that cannot be decoded: a temporary disk error must not remove images.
                    if not self.skip or getattr(error.__cause__, "errno", None):
                        raise
                    bad[position] = one_line(error)
        except (ValueError, OSError) as error:  # returned: a worker's exception would include its traceback
            fix = "restore it, or resume the run, which leaves out missing files" if self.skip else BAD_IMAGE_FIX
            empty = _batch(microbatch.take([]), images[:0], self.labels, requested)
            return empty | {"error": UserError(one_line(error), fix)}
        if bad:
            microbatch, images = microbatch.take(kept), images[: len(kept)]
        return _batch(microbatch, images, self.labels, requested) | {"bad": bad}


class ImagesToPredict(EncodedImages):
    """Images of any size, decoded for each batch as in evaluation. A batch leaves out images that cannot be read."""

    def __getitems__(self, microbatch: Microbatch) -> dict:
        spec, requested = self.spec, len(microbatch.indices)
        random, images, kept, bad = self.augmentation.draw(microbatch), [], [], {}
        for place, position in enumerate(microbatch.indices.tolist()):
            try:
                if not self.split.readable[position]:  # opening a pipe could block forever
                    raise ValueError(self.split.bad[int(self.split.rows[position])])
                shrink = self._shrink(random, place)
                pixels = decode(self.split, position, spec.channels, shrink=shrink)
                if spec.small:
                    images.append(center(pixels, spec.height, spec.width))  # as in the cache of an evaluation
                else:
                    images.append(self.augmentation.image(pixels, random, place))
                kept.append(place)
            except (ValueError, OSError, RuntimeError) as error:
                named = " ".join(self.split.describe(position).split())  # as `one_line` has it
                bad[position] = one_line(error).removeprefix(f"{named}: ")
        pixels = torch.stack(images) if images else torch.empty(0, *spec.size, spec.channels, dtype=torch.uint8)
        return _batch(microbatch.take(kept), pixels, self.labels, requested) | {"bad": bad}

    def _shrink(self, random: dict, place: int) -> Shrink | None:
        return shrink_to_center(*self.spec.size) if self.spec.small else self.augmentation.shrink(random, place)


def _batch(microbatch: Microbatch, images: Tensor, labels: np.ndarray, requested: int) -> dict:
    """The batch of the `requested` samples that can be read."""
    return {
        "left_out": requested - len(images),
        "images": images,
        "labels": torch.from_numpy(labels[microbatch.indices]),
        "indices": microbatch.indices,  # an array, which is not copied to the device
        "update": microbatch.update,
        "number": microbatch.number,
        "microbatch": microbatch,
    }
