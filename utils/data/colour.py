"""Find colour images in a data set that `peek` took for grey, by the headers of more images than `peek` decodes."""

import io

import numpy as np
from PIL import Image

from utils.config.settings import TrainConfig
from utils.console import printable
from utils.data.decode import decode
from utils.data.splits import Data, Files, Split

_HEADERS = 4096  # images whose headers are read: 0.1 s for MNIST
_BYTES = 2**28  # read at most, if whole images are read for their headers
_DECODED = 64  # images stored in colour that are decoded, as their pixels may be grey; `peek` decodes as many


def remarks(data: Data, config: TrainConfig, channels: int) -> list[str]:
    """Lines to print about the data at the start of a run; `channels` are those of the model's input."""
    lines = [*data.train.notes, *data.evaluation.notes]
    if channels == 1 and config.channels is None:  # otherwise the user chose
        lines += [colour_lost(data.train), colour_lost(data.evaluation)]
    return [printable(line) for line in dict.fromkeys(lines) if line]


def colour_lost(split: Split) -> str | None:
    """A line to print if a split for a model with grey input has colour images; None if it has none.

    At most 4,096 images are checked, evenly spread; of those stored in colour, at most 64 are decoded.
    """
    stored, looked = _stored_in_colour(split)
    spread = np.unique(np.linspace(0, len(stored) - 1, min(len(stored), _DECODED)).astype(int))
    coloured = [stored[place] for place in spread if _has_colour(split, stored[place])]
    if not coloured:
        return None
    is_all = looked == len(split) and len(spread) == len(stored)
    return (
        f"{'' if is_all else 'at least '}{len(coloured)} of {looked} images of {split.name} will be converted from "
        f"colour to grey, such as {printable(split.describe(coloured[0]))}; --channels 3 keeps the colour"
    )


def _stored_in_colour(split: Split) -> tuple[list[int], int]:
    """The positions of images whose headers do not say grey, and how many images were checked."""
    positions = np.unique(np.linspace(0, len(split) - 1, min(len(split), _HEADERS)).astype(int))
    np.random.default_rng(0).shuffle(positions)  # evenly spread even if the byte limit ends the loop early
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
    """True unless the header of an image (a path, the bytes of a file or an array) says grey or cannot be read."""
    if isinstance(image, np.ndarray):
        return image.ndim == 3 and image.shape[0] > 1
    if image is None:  # only decoding it would tell
        return True
    try:
        if isinstance(image, bytes):
            head = image[:26]
        else:
            with open(image, "rb", buffering=0) as file:
                head = file.read(26)
        if head.startswith(b"\x89PNG"):  # the 26th byte is the colour type; Pillow takes ten times as long
            return head[25] not in (0, 4)
        with Image.open(io.BytesIO(image) if isinstance(image, bytes) else image) as opened:
            return opened.mode not in ("1", "L", "LA", "La") and not opened.mode.startswith(("I", "F"))
    except Exception:  # Pillow raises anything for broken data, which is reported when it is decoded
        return False


def _has_colour(split: Split, position: int) -> bool:
    try:
        pixels = decode(split, position, 3, shrink=lambda height, width: min(height, width) / 128)
    except ValueError:
        return False
    return not bool((pixels[..., :1] == pixels).all())
