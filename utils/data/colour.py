"""Find colour images in a data set that `peek` classified as grey. Reads the headers of more images than `peek`."""

import io

import numpy as np
from PIL import Image

from utils.config.settings import TrainConfig
from utils.console import printable
from utils.data.class_counts import absent_classes, few_images
from utils.data.decode import decode
from utils.data.splits import Data, Files, Split

_HEADERS = 4096  # images whose headers are read: 0.1 s for MNIST
_BYTES = 2**28  # most bytes that are read, because a table returns whole images
_DECODED = 64  # images stored in colour that are decoded, because their pixels may be grey; as many as in `peek`


def remarks(data: Data, config: TrainConfig, channels: int) -> list[str]:
    """Lines to print about the data at the start of a run; `channels` is the number of input channels of the model."""
    lines = [*data.train.notes, *data.evaluation.notes, *absent_classes(data), *few_images(data)]
    if channels == 1 and config.channels is None:  # otherwise the user has chosen
        lines += [text for split in (data.train, data.evaluation) if (text := colour_lost(split))]
    return [printable(line) for line in dict.fromkeys(lines)]


def colour_lost(split: Split) -> str | None:
    """A line to print if a split for a model with grey input has colour images, else None.

    At most 4,096 evenly spread images are checked. Of those stored in colour, at most 64 are decoded.
    """
    stored, checked = _stored_in_colour(split)
    decoded = [stored[index] for index in _spread(len(stored), _DECODED)]
    coloured = [position for position in decoded if _has_colour(split, position)]
    if not coloured:
        return None
    is_exact = checked == len(split) and len(decoded) == len(stored)
    return (
        f"{'' if is_exact else 'at least '}{len(coloured)} of {checked} images of {split.name} will be converted from "
        f"colour to grey, such as {printable(split.describe(coloured[0]))}; --channels 3 keeps the colour"
    )


def _spread(count: int, most: int) -> np.ndarray:
    """At most `most` evenly spread numbers below `count`."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(int))


def _stored_in_colour(split: Split) -> tuple[list[int], int]:
    """The positions of images whose headers do not declare grey, and the number of images that were checked."""
    positions = _spread(len(split), _HEADERS)
    np.random.default_rng(0).shuffle(positions)  # evenly spread even if the byte limit ends the loop early
    stored: list[int] = []
    checked = read = 0
    for chunk in np.array_split(positions, -(-len(positions) // 64)):
        if read > _BYTES:
            break
        for position, image in zip(chunk.tolist(), _headers(split, chunk), strict=True):
            read += len(image) if isinstance(image, bytes) else 0
            if _may_be_colour(image):
                stored.append(position)
        checked += len(chunk)
    return sorted(stored), checked


def _headers(split: Split, positions: np.ndarray) -> list:
    """The path, bytes or array that shows whether each image is in colour; None if it must be decoded."""
    images, rows = split.images, split.rows[positions].tolist()
    if isinstance(images, Files):
        return [images.paths[row] for row in rows]
    if isinstance(images, np.ndarray):
        return [images[row] for row in rows]
    return split.read_ahead(positions.tolist())


def _may_be_colour(image) -> bool:
    """False if the header of an image (a path, the bytes of a file or an array) declares grey or cannot be read."""
    if isinstance(image, np.ndarray):
        return image.ndim == 3 and image.shape[0] > 1
    if image is None:
        return True
    try:
        with io.BytesIO(image) if isinstance(image, bytes) else open(image, "rb") as file:
            head = file.read(26)
            if head.startswith(b"\x89PNG"):  # the 26th byte is the colour type; Pillow takes ten times as long
                return head[25] not in (0, 4)
            with Image.open(file) as opened:
                return opened.mode not in ("1", "L", "LA", "La") and not opened.mode.startswith(("I", "F"))
    except Exception:  # Pillow raises errors of any class for damaged images, which are reported later
        return False


def _has_colour(split: Split, position: int) -> bool:
    try:
        pixels = decode(split, position, 3, shrink=lambda height, width: min(height, width) / 128)
    except ValueError:
        return False
    return not bool((pixels[..., :1] == pixels).all())
