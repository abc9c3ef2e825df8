"""Mixup and CutMix of neighbours in the order of the update, which are in the same microbatch on
any topology.

Mixup: Zhang et al., 2017. CutMix: Yun et al., 2019.
"""

from typing import NamedTuple

import numpy as np
import torch
from scipy.special import betaincinv
from torch import Tensor

from utils.config.settings import TrainConfig
from utils.data.draws import Draws
from utils.data.order import Microbatch
from utils.data.spec import InputSpec


class Mix(NamedTuple):
    """How the images of a batch are mixed; each field is a tensor with one entry, or row, for each
    image.

    * `partner`, int64 [n]: the position in the batch of the image to mix in; that of the image itself if it is not
      mixed
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
        """The mixed targets, float32 [n, outputs], of classes, int64 [n], or of rows, [n, outputs]."""
        rows = labels if labels.ndim == 2 else labels[:, None]
        if labels.ndim == 1 and outputs > 1:
            rows = torch.zeros(len(labels), outputs, device=labels.device).scatter_(1, rows, 1.0)
        return rows.float().lerp(rows.float().index_select(0, self.partner), self.share[:, None])


class Mixing:
    """Draws how the images of each microbatch are mixed; `outputs` is the length of a target."""

    def __init__(self, config: TrainConfig, spec: InputSpec, outputs: int):
        self.mixup, self.cutmix, self.probability = config.mixup, config.cutmix, config.mix_prob
        self.off_epoch, self.seed, self.outputs = config.mix_off_epoch, config.seed, outputs
        self.height, self.width = spec.height, spec.width

    def draw(self, microbatch: Microbatch) -> Mix | None:
        """How to mix a microbatch, on the host; None if nothing is mixed in its epoch.

        The samples 2k and 2k + 1 are a pair. A sample without a partner, or with itself as its
        partner, is not mixed.
        """
        if self.off_epoch is not None and microbatch.epoch >= self.off_epoch:
            return None
        indices, occurrences = microbatch.indices, microbatch.occurrences
        first = np.arange(0, len(indices) - 1, 2)  # its draws are those of the pair
        first = first[indices[first] != indices[first + 1]]
        draws = Draws(
            self.seed,
            microbatch.epoch,
            indices[first],
            None if occurrences is None else occurrences[first],
        )
        streams = ("mix", "mix_which", "mix_share", "mix_row", "mix_column")
        random = draws.uniform(*streams).astype(np.float64)
        is_mixed = random[:, 0] < self.probability
        first, (_, which, quantile, row, column) = first[is_mixed], random[is_mixed].T
        is_cut = which < 0.5 if self.mixup and self.cutmix else np.full(len(first), self.cutmix > 0)
        alpha = np.where(is_cut, self.cutmix, self.mixup)
        # a Beta variate, by its inverse CDF
        weight = share = 1 - betaincinv(alpha, alpha, quantile)
        box = self._boxes(share, row, column)
        area = (box[:, 1] - box[:, 0]) * (box[:, 3] - box[:, 2])
        weight, share = (
            np.where(is_cut, 1, weight),
            np.where(is_cut, area / (self.height * self.width), share),
        )
        box = np.where(is_cut[:, None], box, [0, self.height, 0, self.width])
        # Both images of a pair have the same numbers; those of unmixed images are 0.
        count, partner = len(indices), np.arange(len(indices))
        partner[first], partner[first + 1] = first + 1, first
        weights, shares = np.zeros(count, np.float32), np.zeros(count, np.float32)
        boxes = np.zeros((count, 4), np.int64)
        for place in (first, first + 1):
            weights[place], shares[place], boxes[place] = weight, share, box
        mixed = [torch.from_numpy(numbers) for numbers in (partner, weights, shares, boxes)]
        return Mix(*mixed) if self.cutmix else Mix(*mixed[:3])

    def _boxes(self, share: np.ndarray, row: np.ndarray, column: np.ndarray) -> np.ndarray:
        """Boxes with this share of the area around random centres, cut off at the edges of the
        image: int64 [m, 4].
        """
        box = []
        for size, centre in ((self.height, row), (self.width, column)):
            middle, half = (
                (centre * size).astype(np.int64),
                (np.sqrt(share) * size / 2).astype(np.int64),
            )
            box += [np.maximum(middle - half, 0), np.minimum(middle + half, size)]
        return np.stack(box, 1)
