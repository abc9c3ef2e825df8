"""Decode images from bytes to uint8 pixels [H, W, C], and resize them."""

import io
import math
import re
import warnings
from collections.abc import Callable
from contextlib import suppress
from statistics import median

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps
from PIL.JpegImagePlugin import JpegImageFile
from torch import Tensor
from torch.nn.functional import interpolate
from torchvision.transforms.v2 import functional as F

from utils.data.decoders import DECODERS, decode_jpeg, is_heic, open_heic
from utils.data.spec import InputSpec
from utils.data.splits import Split, fingerprint_of
from utils.errors import UserError, one_line

LARGE = 200_000  # bytes; for a larger file, reading the image's size first saves time
_FIX = "fix or remove it (train.py and eval.py leave it out with --bad_images skip)"
_IO_FIX = "check the disk or the network, then run it again, or resume"
VERSION = 6  # of the decoded pixels; raise it when they change, so that old caches are not used
# from an image's (height, width): how many times smaller it will become
Shrink = Callable[[int, int], float]

# PyTorch warns not to write to such a tensor, and this code does not
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.frombuffer(b"JPEG", dtype=torch.uint8)


def pixels_key(split: Split) -> str:
    """Identifies the pixels of a split; part of the names of cached files that depend on them."""
    return fingerprint_of(VERSION, *DECODERS.values(), split.cache_key)


def decode(
    split: Split, position: int, channels: int, raw=None, shrink: Shrink | None = None
) -> Tensor:
    """Decode sample `position` to uint8 [H, W, C]. Raises UserError, which names it, if it cannot
    be read.

    `raw` is its encoded image, if that has already been read. The orientation in its EXIF or XMP
    data is applied, and transparency is dropped. If `shrink` returns at least 2, a large JPEG is
    decoded at 1/2, 1/4 or 1/8 of its sides, which is faster.
    """
    try:
        raw = split.images[int(split.image_index[position])] if raw is None else raw
        return _pixels(raw, channels, shrink, split.bits)
    except Exception as error:  # decoders raise any type of error for damaged bytes
        if isinstance(error, OSError) and error.errno:  # Pillow's own errors have no errno
            raise UserError(f"{split.describe(position)}: {error.strerror}", _IO_FIX) from error
        problem = f"{split.describe(position)}: not a readable image ({_reason(error)})"
        raise UserError(problem, _FIX) from error


def why_unreadable(split: Split, position: int) -> str | None:
    """The error in decoding the image of sample `position`; None if it can be decoded."""
    try:
        _pixels(split.images[int(split.image_index[position])], 3, None)
    except Exception as error:
        return _reason(error)
    return None


def _reason(error: Exception) -> str:
    return re.sub(r" <_io\.BytesIO[^>]*>", "", one_line(error))[:120]  # Pillow names its buffer


def _pixels(raw, channels: int, shrink: Shrink | None, bits: int = 16) -> Tensor:
    mode = "L" if channels == 1 else "RGB"
    if isinstance(raw, bytes):
        raw = _opened(raw, mode, shrink)
    if isinstance(raw, Tensor):
        return raw
    if isinstance(raw, Image.Image):
        raw = np.array(_eight_bit(_upright(raw), raw.format, bits).convert(mode))
        return torch.from_numpy(raw.reshape(*raw.shape[:2], channels))
    if not isinstance(raw, np.ndarray):
        raise ValueError("there is no image")
    planes = torch.from_numpy(np.array(raw, dtype=np.uint8))
    planes = planes.unsqueeze(0) if planes.ndim == 2 else planes
    if channels == 1 and len(planes) == 3:
        planes = F.rgb_to_grayscale(planes)
    return planes.expand(channels, -1, -1).permute(1, 2, 0)


def _opened(raw: bytes, mode: str, shrink: Shrink | None) -> Tensor | Image.Image:
    """The pixels of a JPEG, twice as fast as with Pillow; other images with Pillow.

    torchvision's decoders of other formats crash on damaged files.
    """
    if is_heic(raw):
        return open_heic(raw)
    if not raw.startswith(b"\xff\xd8"):
        return Image.open(io.BytesIO(raw))
    if shrink and len(raw) >= LARGE and (image := _reduced(raw, mode, shrink)):
        return image
    with suppress(RuntimeError):  # Pillow reads more files, and its errors are clearer
        if not _turned_by_xmp(raw):
            data = torch.frombuffer(raw, dtype=torch.uint8)
            return decode_jpeg(data, mode="GRAY" if mode == "L" else mode).permute(1, 2, 0)
    return Image.open(io.BytesIO(raw))


def _reduced(raw: bytes, mode: str, shrink: Shrink) -> Image.Image | None:
    """A JPEG image set to be decoded at 1/2, 1/4 or 1/8 of its sides; None to decode it whole."""
    with suppress(Exception):  # damaged: decoding the whole image works, or raises a clear error
        image = JpegImageFile(io.BytesIO(raw))
        turned = int(image.getexif().get(ExifTags.Base.Orientation, 1)) in (5, 6, 7, 8)
        factor = int(shrink(*(image.size if turned else image.size[::-1])))
        if factor >= 2:
            image.draft(mode, (image.width // factor, image.height // factor))
            return image
    return None


def _turned_by_xmp(raw: bytes) -> bool:
    """Whether a JPEG has its orientation only in XMP data, which decoders do not read."""
    if b"http://ns.adobe.com/xap/1.0/\0" in raw and b"tiff:Orientation" in raw:
        with suppress(Exception):  # decoders ignore damaged EXIF data
            # of the EXIF data alone; `getexif` adds the orientation in the XMP data
            exif = Image.Exif()
            exif.load(JpegImageFile(io.BytesIO(raw)).info.get("exif", b""))
            return ExifTags.Base.Orientation not in exif
    return False


def _upright(image: Image.Image) -> Image.Image:
    image.load()  # a PNG may have EXIF data after its pixels
    # A search for EXIF data would take an eighth of the decoding time of MNIST's PNG images, which
    # have no metadata.
    return image if image.format == "PNG" and not image.info else ImageOps.exif_transpose(image)


def _eight_bit(image: Image.Image, file_format: str | None, bits: int) -> Image.Image:
    """Scale 16-bit grey, of which `bits` are used, to 8 bits; Pillow's own conversion would clip it
    to white.
    """
    if image.mode.startswith("I;16") or (image.mode == "I" and file_format in ("PNG", "PPM")):
        grey = np.asarray(image).astype(np.uint32) >> bits - 8
        return Image.fromarray(grey.clip(0, 255).astype(np.uint8))
    if image.mode in ("I", "F"):
        problem = f"32-bit pixels (mode {image.mode}) have no fixed range"
        raise UserError(problem, "save the image with 8 or 16 bits")
    return image


def peek(split: Split) -> tuple[int, tuple[int, int] | None, int, float]:
    """What some images are like: channels (1 if all are grey, else 3), size, largest value, and
    typical shape.

    The size is (height, width), or None if they differ; the shape is the median of height / width.
    Raises UserError for an image that cannot be read.
    """
    sizes = []
    grey = True
    largest = 0
    for position in np.unique(np.linspace(0, len(split) - 1, 64).astype(int)).tolist():
        pixels = decode(split, position, 3)
        sizes.append((pixels.shape[0], pixels.shape[1]))
        grey = grey and bool((pixels[..., :1] == pixels).all())
        largest = max(largest, int(pixels.max()))
    ratio = median(height / width for height, width in sizes)
    return (1 if grey else 3), (sizes[0] if len(set(sizes)) == 1 else None), largest, ratio


def center_factor(whole_height: int, whole_width: int, height: int, width: int) -> float:
    """The factor by which an image of the first size is reduced, so that one side has the second
    size and the other one is at least as long.
    """
    return min(whole_height / height, whole_width / width)


def center(pixels: Tensor, spec: InputSpec) -> Tensor:
    """The centre of an image in the model's input size; uint8 [H, W, C].

    For photographs, the same as `Resize(spec.resize)` and `CenterCrop` of torchvision, which timm
    uses too.
    """
    whole_height, whole_width, _ = pixels.shape
    shorter = min(spec.size)
    resized = spec.resize or shorter / spec.crop
    if spec.small:
        if (whole_height, whole_width) == spec.size:
            return pixels
        scale = 1 / center_factor(whole_height, whole_width, *spec.size)
        height = max(spec.height, round(whole_height * scale))
        width = max(spec.width, round(whole_width * scale))
    elif spec.squash:
        height, width = (round(side * resized / shorter) for side in spec.size)
    else:
        scale = max(spec.height / whole_height, spec.width / whole_width) * resized / shorter
        height, width = (math.floor(side * scale + 1e-6) for side in pixels.shape[:2])
    planes = resize(pixels, height, width, spec.interpolation).permute(2, 0, 1)
    return F.center_crop(planes, list(spec.size)).permute(1, 2, 0)


def resize(pixels: Tensor, height: int, width: int, interpolation: str = "bilinear") -> Tensor:
    """Resize an image with antialiasing; uint8 [H, W, C]."""
    # The batch dimension is added first: PyTorch only then detects the channels-last layout, which
    # is faster.
    planes = pixels[None].permute(0, 3, 1, 2)
    planes = interpolate(planes, (height, width), mode=interpolation, antialias=True)
    return planes[0].permute(1, 2, 0)
