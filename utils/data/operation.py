"""The base class of random changes of training images."""

from typing import Any

import numpy as np
from torch import Tensor

from utils.data.draws import Array


class Operation:
    """An augmentation of uint8 images. Each image has one random number in [0, 1) from each of the `streams`.

    Streams are names that no other operation uses. The numbers of an image are float32 [len(streams)].
    """

    streams: tuple[str, ...] = ()
    # Whether it has `prepare` and `batch`. If one operation of a run lacks them, all images of the run are changed one
    # by one, in loader processes.
    batched = False

    def image(self, pixels: Tensor, random: np.ndarray) -> Tensor:
        """The changed image [H, W, C], not in place."""
        raise NotImplementedError

    def prepare(self, random: Array) -> Any:
        """Compute the input of `batch` from the random numbers [n, len(streams)], which are on the host or the device.

        If it is a dict, its tensors are copied to the device. It must not wait for a GPU.
        """
        raise NotImplementedError

    def batch(self, images: Tensor, prepared: Any) -> Tensor:
        """The changed images [n, H, W, C] on the device: those of `image`, bit for bit on a CPU.

        It must not wait for a GPU.
        """
        raise NotImplementedError

    def shrink(self, random: np.ndarray, height: int, width: int) -> float:
        """How many times smaller the first operation makes a photograph of this size; below 2 it is decoded whole."""
        return 1.0
