"""Photographs that are reduced when they are first read, and the cache of their pixels."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torchvision
from torch import Tensor
from torchvision.transforms.v2.functional import resize

from utils.data.cache import cached, open_cached
from utils.data.decode import VERSION, decode_image
from utils.data.decoders import DECODERS
from utils.data.spec import InputSpec
from utils.data.splits import Files, Split, fingerprint_of
from utils.memory import usable_cores


@dataclass(frozen=True)
class ShrunkImages:
    """The images of a split with a shorter side of `side` pixels; smaller ones keep their size.

    In `folder`, each is a file of its own with its pixels, so a cache that is only partly filled is
    continued, and other splits of the same photographs use it too. Without a folder, the same
    pixels are computed each time.
    """

    split: Split
    channels: int
    side: int
    folder: str

    def many(self, rows: Sequence[int]) -> list[Tensor]:
        """The pixels of these images, uint8 [H, W, C], which are cached if they were not."""
        return [*map(self._cached if self.folder else self._shrink, rows)]

    def _cached(self, row: int) -> Tensor:
        images = self.split.images
        image = [self.split.fingerprint, row]
        if isinstance(images, Files):
            image = [images.path(row), *images.stamp(row)]
        decoders = VERSION, torchvision.__version__, *DECODERS.values()
        name = fingerprint_of(self.side, self.channels, self.split.bits, *image, *decoders)
        path = Path(self.folder, f"{name}.npy")
        array = open_cached(path, (), "|u1")
        if array is None:
            pixels = self._shrink(row).numpy()
            array = cached(path, pixels.shape, "|u1", [pixels])
        return torch.tensor(array)

    def _shrink(self, row: int) -> Tensor:
        pixels = decode_image(
            self.split, row, self.channels, shrink=lambda *size: min(size) / self.side
        )
        if min(pixels.shape[:2]) > self.side:
            pixels = resize(pixels.permute(2, 0, 1), [self.side]).permute(1, 2, 0)
        return pixels.contiguous()


def shrink(split: Split, spec: InputSpec, side: int | None, folder: str = "") -> Split:
    """The split with photographs of the size of --shrink."""
    if not side or spec.small:
        return split
    every = replace(split, image_index=np.arange(len(split.images)))  # a row is a position
    images = ShrunkImages(every, spec.channels, side, folder)
    return replace(split, images=images)  # type: ignore[arg-type]  # only `many` is used


def suggest_shrink(split: Split, images: int) -> list[str]:
    """A line about --shrink if it saves over a minute of a run that reads so many images."""
    if split.checksums is None:
        return []
    sizes = split.checksums[split.image_index] >> 32
    # Seconds of a core per byte, minus a constant: it is not suggested below a megabyte.
    seconds = (images - len(split)) * (sizes.mean() * 2.5e-8 - 0.025) / usable_cores()
    if seconds <= 60:
        return []
    line = f"--shrink SIDE saves about {seconds / 60:.0f} minutes of reading large photographs"
    return [f"{line}, but changes their pixels"]
