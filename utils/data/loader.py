"""From splits to batches on the device: what a rank is to compute next, as float images and labels."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from utils.config import TrainConfig
from utils.data.augment import crop_box, row_starts, shift_and_flip, uniform
from utils.data.cache import Shared, decode_all
from utils.data.decode import EVAL_CROP, SMALL, WAY_OUT, center, decode, resize, shrink_to_center, shrink_to_part
from utils.data.order import Piece
from utils.data.splits import Split
from utils.data.workers import AHEAD, most_workers, workers_that_fit
from utils.distributed import Ranks
from utils.errors import one_line
from utils.host import worker_processes
from utils.shared_memory import NoRoom, share
from utils.waiting import awaited

_CACHE = 2**18  # floats that stay in a processor's cache of 1 MiB


@dataclass(frozen=True)
class InputSpec:
    """What the model is fed: image shape in pixels, and the mean and deviation per channel of pixels in 0..1."""

    height: int
    width: int
    channels: int
    mean: list[float]
    std: list[float]

    @classmethod
    def from_dict(cls, values: dict) -> "InputSpec":
        """The spec that `asdict` wrote; ValueError when it is none."""
        try:
            spec = cls(**values)
            fits = all(type(n) is int and 0 < n < 2**16 for n in (spec.height, spec.width, spec.channels))
            fits = fits and len(spec.mean) == len(spec.std) == spec.channels and min(spec.std) > 0
            fits = fits and bool(np.isfinite([*spec.mean, *spec.std]).all())
        except TypeError:
            fits = False
        if not fits:
            raise ValueError("'input' is missing or malformed")
        return spec

    def describe(self) -> str:
        return f"{self.height}x{self.width} {'grey' if self.channels == 1 else 'colour'}"

    @property
    def small(self) -> bool:
        return max(self.height, self.width) <= SMALL


class Decoded(Dataset):
    """Samples decoded beforehand, uint8 [N, H, W, C]; a batch is one indexed copy."""

    def __init__(self, pixels: np.ndarray | Shared, labels: np.ndarray, readable: np.ndarray | None = None):
        self.pixels, self.labels = pixels, labels
        self.readable = None if readable is None or readable.all() else readable  # bool [N]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, piece: Piece) -> dict:
        asked = len(piece.indices)
        if self.readable is not None:
            piece = piece._replace(indices=piece.indices[self.readable[piece.indices]])
        return _batch(piece, torch.from_numpy(self.pixels[piece.indices]), self.labels, asked)


class Encoded(Dataset):
    """Photographs, decoded and cropped when asked for; in training a random part of each, else the centre.

    A batch leaves out images known to be unreadable, and with `skip` also those that turn out to be unreadable.
    """

    def __init__(
        self,
        split: Split,
        spec: InputSpec,
        seed: int,
        min_scale: float | None,
        flip: bool = False,
        skip: bool = False,
    ):
        self.split, self.spec, self.seed, self.min_scale, self.flip = split, spec, seed, min_scale, flip
        self.skip, self.labels = skip, split.labels

    def __len__(self) -> int:
        return len(self.split)

    def __getitems__(self, piece: Piece) -> dict:
        spec, asked = self.spec, len(piece.indices)
        indices = piece.indices[self.split.readable[piece.indices]]
        images = torch.empty(len(indices), spec.height, spec.width, spec.channels, dtype=torch.uint8)
        random = uniform(self.seed, piece.epoch, indices, 8).tolist()
        kept, bad = [], {}
        try:
            encoded = self.split.read_ahead(indices)
            for place, position in enumerate(indices.tolist()):
                try:
                    images[len(kept)] = self._image(position, encoded[place], random[place])
                    kept.append(place)
                except ValueError as error:
                    # A disk that is away for a while must not cost its images: only what cannot be decoded is skipped.
                    if not self.skip or getattr(error.__cause__, "errno", None):
                        raise
                    bad[position] = one_line(error)
        except (ValueError, OSError) as error:  # as a value: a worker's exception would arrive wrapped in its traceback
            nothing = Piece(piece.epoch, indices[:0])
            fix = "bring it back, or resume: missing files are then left out" if self.skip else WAY_OUT
            text = f"{one_line(error)}; {fix}"
            return _batch(nothing, images[:0], self.labels, asked) | {"error": text}
        if bad:
            indices, images = indices[kept], images[: len(kept)]
        return _batch(Piece(piece.epoch, indices), images, self.labels, asked) | {"bad": bad}

    def _image(self, position: int, encoded, random: list[float]) -> Tensor:
        height, width = self.spec.height, self.spec.width
        if self.min_scale is None or self.min_scale == 1:
            shrink = shrink_to_center(height, width, EVAL_CROP)
            pixels = decode(self.split, position, self.spec.channels, encoded, shrink)
            pixels = center(pixels, height, width, EVAL_CROP)
        else:
            part = partial(crop_box, random=random[4:], min_scale=self.min_scale)
            pixels = decode(self.split, position, self.spec.channels, encoded, shrink_to_part(part, height, width))
            top, left, rows, columns = part(*pixels.shape[:2])
            pixels = resize(pixels[top : top + rows, left : left + columns], height, width)
        return pixels.flip(1) if self.flip and random[2] < 0.5 else pixels


def _batch(piece: Piece, images: Tensor, labels: np.ndarray, asked: int) -> dict:
    """A batch for `asked` samples; `piece` has those that can be read."""
    indices = torch.from_numpy(piece.indices)
    return {
        "left_out": asked - len(images),
        "images": images,
        "labels": torch.from_numpy(labels[piece.indices]),
        "indices": indices,
        "epoch": piece.epoch,
    }


def make_dataset(split: Split, spec: InputSpec, config: TrainConfig, training: bool, progress: Callable) -> Dataset:
    """Small images decoded now, from the cache if they are there; photographs decoded when their turn comes."""
    if spec.small:
        pixels = decode_all(split, spec.height, spec.width, spec.channels, config.cache_dir, progress)
        return Decoded(pixels, split.labels, split.readable)
    skip = config.bad_images == "skip"
    return Encoded(split, spec, config.seed, config.min_scale if training else None, training and config.flip, skip)


def make_loader(dataset: Dataset, batch_sampler, config: TrainConfig, ranks: Ranks) -> DataLoader:
    """A loader to hand to `Accelerator.prepare`; its sampler emits one `Piece` a batch."""
    return make_loaders({"its batches": (dataset, batch_sampler)}, config, ranks)[0]


def make_loaders(parts: dict[str, tuple], config: TrainConfig, ranks: Ranks) -> list[DataLoader]:
    """The loaders of a run, made together as they share /dev/shm; `parts` has each (dataset, sampler) by name."""
    wanted = min(8, ranks.threads) if config.num_workers is None else config.num_workers
    wanted = min(wanted, most_workers())  # settings may come from a larger machine
    # A batch of small images is one copy; passing it between processes would take longer.
    sizes = {name: _bytes(*part) for name, part in parts.items() if not isinstance(part[0], Decoded)}
    choices = dict(zip(sizes, workers_that_fit(sizes, wanted), strict=True))
    return [_make_loader(*part, *choices.get(name, (0, AHEAD)), ranks) for name, part in parts.items()]


def _bytes(dataset: Dataset, batch_sampler) -> int:
    """Bytes of the images in the largest batch."""
    spec = dataset.spec
    most = batch_sampler.largest if hasattr(batch_sampler, "largest") else max(len(p.indices) for p in batch_sampler)
    return most * spec.height * spec.width * spec.channels


def _make_loader(dataset: Dataset, batch_sampler, workers: int, ahead: int, ranks: Ranks) -> DataLoader:
    return DataLoader(
        dataset,
        batch_sampler=batch_sampler,
        collate_fn=_hand_over_to_rank,
        **worker_processes(workers, ahead),
        persistent_workers=workers > 0,
        pin_memory=ranks.device.type == "cuda",
    )


def _hand_over_to_rank(batch: dict) -> dict:
    """In a worker, move the batch to shared memory; returns an empty batch with the error if there is no room."""
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    try:
        share(tensors.values())
    except NoRoom as error:
        tensors, batch = {name: value[:0] for name, value in tensors.items()}, batch | {"error": one_line(error)}
    # An empty view would send all of its memory along, a copy does not.
    return batch | {name: value if value.numel() else value.clone() for name, value in tensors.items()}


class Batch(NamedTuple):
    """Images [n, C, H, W] float32, labels [n] int64, and the samples' positions in their split [n] int64; n >= 0."""

    images: Tensor
    labels: Tensor
    indices: Tensor


class Batches:
    """The batches of a prepared loader as the model's float input on the device, augmented when training.

    `left_out` counts the samples of the last pass that could not be read. `bad` maps the positions of newly found
    ones to the reasons; `told` has those that all ranks have agreed on.
    """

    def __init__(self, loader: DataLoader, spec: InputSpec, config: TrainConfig, device: torch.device, training: bool):
        self.loader, self.seed, self.device, self.error = loader, config.seed, device, None
        self.left_out, self.bad, self.told = 0, {}, set()
        self.what = "a training batch" if training else "an evaluation batch"
        loader.device = None  # Accelerate would copy in the stream that computes; here `_upload` does
        self.padding = config.crop_padding if training and spec.small else 0
        self.flip = training and spec.small and config.flip
        self.format = torch.channels_last if config.channels_last else torch.contiguous_format
        std = torch.tensor(spec.std, device=device)
        scale, shift = 1 / (255 * std), -torch.tensor(spec.mean, device=device) / std
        self.scale, self.shift = scale.repeat(spec.width), shift.repeat(spec.width)  # of a row, as inner loops are long

    def check(self) -> None:
        """Raise ValueError if a sample could not be read; its batch was then given as an empty one."""
        if self.error is not None:
            raise ValueError(self.error)

    @property
    def labels(self) -> np.ndarray:
        """The true classes of the whole split, int64 [N]."""
        return self.loader.dataset.labels

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        self.left_out = 0
        for batch in _upload(map(self._draw, awaited(self.loader, self.what)), self.device):
            self.error = batch.get("error", self.error)
            self.left_out += batch["left_out"]
            self.bad |= batch.get("bad", {})
            yield self._without_told(Batch(self._input(batch), batch["labels"], batch["indices"]))

    def _without_told(self, batch: Batch) -> Batch:
        """The batch without images that can be read again: left out once, they stay left out, as after a resume."""
        if not self.told:
            return batch
        kept = ~torch.isin(batch.indices, torch.tensor(sorted(self.told), device=batch.indices.device))
        self.left_out += int((~kept).sum())
        return Batch(*(values[kept] for values in batch))

    def _draw(self, batch: dict) -> dict:
        if self.padding or self.flip:
            random, size = uniform(self.seed, batch["epoch"], batch["indices"].numpy(), 3), batch["images"].shape[1:3]
            batch["mirrored"], batch["starts"] = row_starts(random, *size, self.padding, self.flip)
        return batch

    def _input(self, batch: dict) -> Tensor:
        images = batch["images"]
        if "starts" in batch:
            images = shift_and_flip(images, batch["mirrored"], batch["starts"], self.padding)
        values = torch.empty(images.shape, device=images.device)
        # On a processor few images at a time, whose floats stay in its cache between the two steps.
        count = max(1, _CACHE // max(1, images[:1].numel())) if images.device.type == "cpu" else max(1, len(images))
        for pixels, result in zip(images.flatten(2).split(count), values.flatten(2).split(count), strict=True):
            torch.addcmul(self.shift, result.copy_(pixels), self.scale, out=result)
        return values.permute(0, 3, 1, 2).contiguous(memory_format=self.format)


def _upload(batches: Iterator[dict], device: torch.device) -> Iterator[dict]:
    """The batches with their tensors on the device; a GPU gets each while it computes on the one before."""
    if device.type != "cuda":
        yield from (_to(batch, device) for batch in batches)
        return
    stream, ready = torch.cuda.Stream(device), None
    for batch in batches:
        with torch.cuda.stream(stream):
            following = _to(batch, device), stream.record_event()
        if ready is not None:
            yield _hand_over(*ready)
        ready = following
    if ready is not None:
        yield _hand_over(*ready)


def _to(batch: dict, device: torch.device) -> dict:
    def move(value: Tensor) -> Tensor:  # from pinned memory the processor need not wait for the copy
        return (value.pin_memory() if device.type == "cuda" else value).to(device, non_blocking=True)

    return {name: move(value) if isinstance(value, Tensor) else value for name, value in batch.items()}


def _hand_over(batch: dict, copied: torch.cuda.Event) -> dict:
    """Let the current stream use what another has copied, once that is done."""
    stream = torch.cuda.current_stream(batch["images"].device)
    stream.wait_event(copied)
    for value in batch.values():
        if isinstance(value, Tensor):
            value.record_stream(stream)  # else its memory is reused as soon as Python lets go of it
    return batch
