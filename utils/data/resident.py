"""Small images that stay on the device, where batches are drawn by index."""

import warnings
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from utils.config.settings import TrainConfig
from utils.data.cache import SharedImages
from utils.data.datasets import DecodedImages, EncodedImages
from utils.data.order import Microbatch
from utils.errors import UserError
from utils.memory import bytes_text

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
