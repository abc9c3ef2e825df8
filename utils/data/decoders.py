"""The libraries that decode images. Their versions stand in the names of cached files and in the
record of a run, because pixels may differ by a level from one to another.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, BinaryIO

import PIL
import torchvision
from PIL import Image

from utils.errors import UserError


def find_jpeg_decoder() -> tuple[str, Callable[..., Any]]:
    """The library that decodes JPEG and its version, and its function.

    The function takes the encoded bytes as a uint8 tensor, and `mode`, "RGB" or "GRAY". It returns
    uint8 [C, H, W] with the orientation in the EXIF data applied, and raises RuntimeError.
    """
    try:
        import torchcodec
        from torchcodec.decoders import decode_jpeg
    except Exception:  # of any class; it may have no wheel, or not fit this build of PyTorch
        decode = partial(torchvision.io.decode_jpeg, apply_exif_orientation=True)
        return f"torchvision {torchvision.__version__}", decode
    return f"torchcodec {torchcodec.__version__}", decode_jpeg


_jpeg, decode_jpeg = find_jpeg_decoder()
DECODERS = {"JPEG decoder": _jpeg, "image decoder": f"Pillow {PIL.__version__}"}
with suppress(PackageNotFoundError):
    DECODERS["HEIC decoder"] = f"pi-heif {version('pi-heif')}"


def is_heic(start: bytes) -> bool:
    """Whether a file with this start is HEIC, which Pillow does not read. AVIF begins like it."""
    return start[4:8] == b"ftyp" and b"avif" not in start[8:32]


def open_image(file: BinaryIO) -> Image.Image:
    """An image that is decoded when it is loaded.

    HEIC is then upright: the rotation that phones write is applied. Raises UserError if the package
    for it is not installed.
    """
    start = file.read(32)
    file.seek(0)
    if not is_heic(start):
        return Image.open(file)
    try:
        import pi_heif
    except ImportError as error:
        fix = "pip install pi-heif, or convert the file to JPEG"
        raise UserError("HEIC needs pi-heif, which is not installed", fix) from error
    pi_heif.options.DECODE_THREADS = 1  # loader processes use the other cores
    return pi_heif.HeifImageFile(file)
