"""Decode images from bytes to uint8 pixels [H, W, C], and resize them."""

import io
import math
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps
from PIL.JpegImagePlugin import JpegImageFile
from torch import Tensor
from torch.nn.functional import interpolate
from torchvision.transforms.v2 import functional as F

from utils.data.decoders import DECODERS, decode_jpeg, open_image
from utils.data.spec import InputSpec
from utils.data.splits import Split, fingerprint_of
from utils.errors import UserError, one_line

LARGE = 200_000  # bytes; for a larger file, reading the image's size first saves time
_FIX = "fix or remove it (train.py and eval.py leave it out with --bad_images skip)"
_IO_FIX = "check the disk or the network, then run it again, or resume"
VERSION = 6  # of the decoded pixels; raise it when they change, so that old caches are not used
_MODES = {1: "L", 3: "RGB"}  # Pillow's names of grey and colour
# from an image's (height, width): how many times smaller it will become
Shrink = Callable[[int, int], float]


def pixels_key(split: Split) -> str:
    """Identifies the pixels of a split; part of the names of cached files that depend on them."""
    return fingerprint_of(VERSION, *DECODERS.values(), split.cache_key)


def decode_image(
    split: Split, position: int, channels: int, raw=None, shrink: Shrink | None = None
) -> Tensor:
    """Decode sample `position` to uint8 [H, W, C]. Raises UserError, which names it, if it cannot
    be read.

    `raw` is its encoded image, if that has already been read. The orientation in its EXIF or XMP
    data is applied, and a transparent image is composed on white. If `shrink` returns at least 2, a
    large JPEG is decoded at 1/2, 1/4 or 1/8 of its sides, which is faster.
    """
    try:
        raw = split.images[int(split.image_index[position])] if raw is None else raw
        return _pixels(raw, channels, shrink, split.bits)[0]
    except Exception as error:  # decoders raise any type of error for damaged bytes
        if isinstance(error, OSError) and error.errno:  # Pillow's own errors have no errno
            raise UserError(f"{split.describe(position)}: {error.strerror}", _IO_FIX) from error
        problem = f"{split.describe(position)}: not a readable image ({reason_of(error)})"
        raise UserError(problem, _FIX) from error


def reason_of(error: Exception) -> str:
    """An error of a decoder on one line."""
    return re.sub(r" <_io\.BytesIO[^>]*>", "", one_line(error))[:120]  # Pillow names its buffer


def _pixels(raw: Any, channels: int, shrink: Shrink | None, bits: int) -> tuple[Tensor, bool, bool]:
    """The pixels; whether the image is transparent; and whether it has other frames or pages, which
    are not read.
    """
    image = _open(raw, channels, shrink) if isinstance(raw, bytes) else raw
    if isinstance(image, Image.Image):
        return _pixels_of_image(image, channels, bits)
    if isinstance(image, np.ndarray):
        image = _pixels_of_array(image, channels)
    if not isinstance(image, Tensor):
        raise ValueError("there is no image")
    return image, False, False


def _pixels_of_image(opened: Image.Image, channels: int, bits: int) -> tuple[Tensor, bool, bool]:
    has_frames = _has_frames(opened)
    image = _upright(_eight_bit(opened, bits))
    is_transparent = False
    if image.has_transparency_data:
        image, is_transparent = _on_white(image)
    pixels = torch.from_numpy(np.array(image.convert(_MODES[channels])))
    return pixels.view(image.height, image.width, channels), is_transparent, has_frames


def _pixels_of_array(array: np.ndarray, channels: int) -> Tensor:
    planes = torch.from_numpy(np.array(array, dtype=np.uint8))
    planes = planes.view(-1, *planes.shape[-2:])
    if channels == 1 and len(planes) == 3:
        planes = F.rgb_to_grayscale(planes)
    return planes.expand(channels, -1, -1).permute(1, 2, 0)


def _open(raw: bytes, channels: int, shrink: Shrink | None) -> Tensor | Image.Image:
    """The pixels of a JPEG, twice as fast as with Pillow; other images with Pillow.

    torchvision's decoders of other formats crash on damaged files.
    """
    if not raw.startswith(b"\xff\xd8"):
        return open_image(io.BytesIO(raw))
    if shrink and len(raw) >= LARGE and (image := _reduced(raw, channels, shrink)):
        return image
    with suppress(RuntimeError):  # Pillow reads more files, and its errors are clearer
        if not _turned_by_xmp(raw):
            # a copy, because PyTorch warns of tensors that must not be written to
            data = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
            mode = "GRAY" if channels == 1 else "RGB"
            return decode_jpeg(data, mode=mode).permute(1, 2, 0)
    return Image.open(io.BytesIO(raw))


def _reduced(raw: bytes, channels: int, shrink: Shrink) -> Image.Image | None:
    """A JPEG image set to be decoded at 1/2, 1/4 or 1/8 of its sides; None to decode it whole."""
    with suppress(Exception):  # damaged: decoding the whole image works, or raises a clear error
        image = JpegImageFile(io.BytesIO(raw))
        factor = int(shrink(*_upright_size(image)))
        if factor >= 2:
            image.draft(_MODES[channels], (image.width // factor, image.height // factor))
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


def _upright_size(image: Image.Image) -> tuple[int, int]:
    """The height and width that an image will have, without loading it."""
    exif = Image.Image.getexif(image)  # PngImageFile.getexif would load the pixels
    turned = int(exif.get(ExifTags.Base.Orientation, 1)) in (5, 6, 7, 8)
    return image.size if turned else image.size[::-1]


def _on_white(image: Image.Image) -> tuple[Image.Image, bool]:
    """The image composed on white, and whether a pixel of it is transparent."""
    image = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
    white = Image.new("RGB", image.size, "white")
    white.paste(image, mask=image)
    return white, image.getchannel("A").getextrema() != (255, 255)


def _eight_bit(image: Any, bits: int) -> Image.Image:
    """Scale 16-bit grey, of which `bits` are used, to 8 bits; Pillow's own conversion would clip it
    to white. Of 16-bit colours, Pillow reads the high bytes.
    """
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        values = np.asarray(image).astype(np.uint32)
        grey = (values >> bits - 8).clip(0, 255).astype(np.uint8)
        if getattr(image, "tag_v2", {}).get(ExifTags.Base.PhotometricInterpretation) == 0:
            grey = 255 - grey  # white is 0
        # transparent pixels become white
        grey[values == image.info.pop("transparency", -1)] = 255
        result = Image.fromarray(grey)
        result.info = image.info
        return result
    if image.mode in ("I", "F"):
        problem = f"32-bit pixels (mode {image.mode}) have no fixed range"
        raise UserError(problem, "save the image with 8 or 16 bits")
    return image


Looks = tuple[Any, ...]
"""What an image is like: height, width, largest value, and whether it is in colour, is transparent,
is blank on white, and has several frames or pages, of which the first is read.

The largest value is 0 if it was not decoded. Images of 16 bits are always decoded.
"""


def header(file: BinaryIO, coloured: bool) -> Looks | None:
    """What an image is like; None if its header does not say.

    An RGB file may be grey: it counts as colour if `coloured`.
    """
    with suppress(Exception):  # decoding it works, or raises a clear error
        image: Any = open_image(file)
        in_colour = coloured and image.mode == "RGB"
        is_known = in_colour or image.mode in ("1", "L")
        if is_known and not image.has_transparency_data and ";16" not in str(image.tile):
            return *_upright_size(image), 0, in_colour, False, False, _has_frames(image)
    return None


def examine(image: Any, bits: int) -> Looks:
    """What the pixels of an image are like. Raises errors of any class if it cannot be decoded."""
    pixels, is_transparent, has_frames = _pixels(image, 3, None, bits)
    red, green, blue = pixels.unbind(2)
    coloured = not (torch.equal(red, green) and torch.equal(red, blue))
    largest = int(pixels.max())
    is_plain = is_transparent and largest == int(pixels.min())
    return *red.shape, largest, coloured, is_transparent, is_plain, has_frames


def _has_frames(image: Image.Image) -> bool:
    # the other images in files of phones are thumbnails and depth maps
    return image.format not in ("MPO", "HEIF") and getattr(image, "is_animated", False)


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
