"""Colour images in a set that was taken for grey: a look at the headers of more images than `peek` decodes."""

import io

import numpy as np
from PIL import Image

from utils.config import TrainConfig
from utils.data.decode import decode
from utils.data.splits import Data, Files, Split, printable

_HEADERS = 4096  # images whose headers are looked at: 0.1 s for MNIST's
_BYTES = 2**28  # and no more where whole images are read for their headers
_DECODED = 64  # images stored in colour that are decoded, as some files hold grey pixels so; `peek` decodes as many


def remarks(data: Data, config: TrainConfig, channels: int) -> list[str]:
    """What to say of the data at the start of a run, a line each; `channels` are those of the model's input."""
    lines = [*data.train.notes, *data.evaluation.notes]
    if channels == 1 and config.channels is None:  # else somebody chose
        lines += [colour_lost(data.train), colour_lost(data.evaluation)]
    return [printable(line) for line in dict.fromkeys(lines) if line]


def colour_lost(split: Split) -> str | None:
    """One line when images of the split are in colour, which a model with grey input does not see; None if none is.

    At most 4,096 images are looked at, evenly spread; of those stored in colour, 64 are decoded.
    """
    stored, looked = _stored_in_colour(split)
    spread = np.unique(np.linspace(0, len(stored) - 1, min(len(stored), _DECODED)).astype(int))
    coloured = [stored[place] for place in spread if _has_colour(split, stored[place])]
    if not coloured:
        return None
    is_all = looked == len(split) and len(spread) == len(stored)
    return (
        f"{'' if is_all else 'at least '}{len(coloured)} of {looked} images of {split.name} are in colour and become "
        f"grey, such as {printable(split.describe(coloured[0]))}; --channels 3 keeps the colour"
    )


def _stored_in_colour(split: Split) -> tuple[list[int], int]:
    """The positions of images whose headers say colour, or nothing, and how many were looked at."""
    positions = np.unique(np.linspace(0, len(split) - 1, min(len(split), _HEADERS)).astype(int))
    np.random.default_rng(0).shuffle(positions)  # spread evenly, also if the bytes end it early
    stored, looked, read = [], 0, 0
    for chunk in np.array_split(positions, -(-len(positions) // 64)):
        if read > _BYTES:
            break
        is_files = isinstance(split.images, Files)
        encoded = [None] * len(chunk) if is_files else split.read_ahead(chunk.tolist())
        for position, raw in zip(chunk.tolist(), encoded, strict=True):
            row = int(split.rows[position])
            if is_files:
                raw = split.images.paths[row]
            elif raw is None and isinstance(split.images, np.ndarray):
                raw = split.images[row]
            read += len(raw) if isinstance(raw, bytes) else 0
            if _may_be_colour(raw):
                stored.append(position)
        looked += len(chunk)
    return sorted(stored), looked


def _may_be_colour(image) -> bool:
    """Whether the header of an image (a path, a file's bytes or an array) does not say that it is grey."""
    if isinstance(image, np.ndarray):
        return image.ndim == 3 and image.shape[0] > 1
    if image is None:  # at hand only by decoding it
        return True
    try:
        if isinstance(image, bytes):
            head = image[:26]
        else:
            with open(image, "rb", buffering=0) as file:
                head = file.read(26)
        if head.startswith(b"\x89PNG"):  # the type of colours stands in the 26th byte; asking Pillow takes ten times
            return head[25] not in (0, 4)
        with Image.open(io.BytesIO(image) if isinstance(image, bytes) else image) as opened:
            return opened.mode not in ("1", "L", "LA", "La") and not opened.mode.startswith(("I", "F"))
    except Exception:  # broken data make Pillow raise anything, and are named when they are decoded
        return False


def _has_colour(split: Split, position: int) -> bool:
    try:
        pixels = decode(split, position, 3, shrink=lambda height, width: min(height, width) / 128)
    except ValueError:
        return False
    return not bool((pixels[..., :1] == pixels).all())
