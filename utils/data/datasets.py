"""Datasets that return one microbatch at a time, of decoded small images or of photographs."""

from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from utils.data.augment import crop_box, uniform
from utils.data.cache import SharedImages
from utils.data.decode import BAD_IMAGE_FIX, EVAL_CROP, center, decode, resize, shrink_to_center, shrink_to_part
from utils.data.order import Microbatch
from utils.data.spec import InputSpec
from utils.data.splits import Split
from utils.errors import UserError, one_line


class DecodedImages(Dataset):
    """Images decoded beforehand, uint8 [N, H, W, C]; a batch is one indexed copy."""

    def __init__(self, pixels: np.ndarray | SharedImages, labels: np.ndarray, readable: np.ndarray | None = None):
        self.pixels, self.labels = pixels, labels
        self.readable = None if readable is None or readable.all() else readable  # bool [N]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, microbatch: Microbatch) -> dict:
        requested = len(microbatch.indices)
        if self.readable is not None:
            microbatch = microbatch._replace(indices=microbatch.indices[self.readable[microbatch.indices]])
        return _batch(microbatch, torch.from_numpy(self.pixels[microbatch.indices]), self.labels, requested)


class EncodedImages(Dataset):
    """Photographs, decoded for each batch. The crop is random with `min_scale` (see `crop_box`), else at the centre.

    A batch leaves out images that are known to be unreadable. With `skip`, also those that cannot be decoded.
    """

    def __init__(
        self, split: Split, spec: InputSpec, seed: int, min_scale: float | None, flip: bool = False, skip: bool = False
    ):
        self.split, self.spec, self.seed, self.min_scale, self.flip = split, spec, seed, min_scale, flip
        self.skip, self.labels = skip, split.labels

    def __len__(self) -> int:
        return len(self.split)

    def __getitems__(self, microbatch: Microbatch) -> dict:
        spec, requested = self.spec, len(microbatch.indices)
        indices = microbatch.indices[self.split.readable[microbatch.indices]]
        images = torch.empty(len(indices), spec.height, spec.width, spec.channels, dtype=torch.uint8)
        random = uniform(self.seed, microbatch.epoch, indices, 8).tolist()
        kept: list[int] = []
        bad: dict[int, str] = {}
        try:
            encoded = self.split.read_ahead(indices)
            for place, position in enumerate(indices.tolist()):
                try:
                    images[len(kept)] = self._image(position, encoded[place], random[place])
                    kept.append(place)
                except ValueError as error:
                    # Skip only images that cannot be decoded: a temporary disk error must not remove images.
                    if not self.skip or getattr(error.__cause__, "errno", None):
                        raise
                    bad[position] = one_line(error)
        except (ValueError, OSError) as error:  # returned: a worker's exception would include its traceback
            nothing = Microbatch(microbatch.epoch, indices[:0])
            fix = "restore it, or resume the run, which leaves out missing files" if self.skip else BAD_IMAGE_FIX
            return _batch(nothing, images[:0], self.labels, requested) | {"error": UserError(one_line(error), fix)}
        if bad:
            indices, images = indices[kept], images[: len(kept)]
        return _batch(Microbatch(microbatch.epoch, indices), images, self.labels, requested) | {"bad": bad}

    def _image(self, position: int, encoded, random: list[float]) -> Tensor:
        height, width = self.spec.height, self.spec.width
        if self.min_scale is None or self.min_scale == 1:
            shrink = shrink_to_center(height, width, EVAL_CROP)
            pixels = decode(self.split, position, self.spec.channels, encoded, shrink)
            pixels = center(pixels, height, width, EVAL_CROP)
        else:
            box = partial(crop_box, random=random[4:], min_scale=self.min_scale)
            pixels = decode(self.split, position, self.spec.channels, encoded, shrink_to_part(box, height, width))
            top, left, rows, columns = box(*pixels.shape[:2])
            pixels = resize(pixels[top : top + rows, left : left + columns], height, width)
        return pixels.flip(1) if self.flip and random[2] < 0.5 else pixels


def _batch(microbatch: Microbatch, images: Tensor, labels: np.ndarray, requested: int) -> dict:
    """The batch of the `requested` samples that can be read."""
    return {
        "left_out": requested - len(images),
        "images": images,
        "labels": torch.from_numpy(labels[microbatch.indices]),
        "indices": torch.from_numpy(microbatch.indices),
        "epoch": microbatch.epoch,
    }
