"""Images of the run page, as data URIs."""

import base64
import io
from pathlib import Path

from PIL import Image

from utils.data.decode import decode
from utils.data.spec import SMALL
from utils.data.splits import Split

_SIDE = 192  # pixels of a thumbnail's longer side
_SHEET = 1100  # pixels of the longer side of first_batch.png in the page


def thumbnail(split: Split, position: int) -> dict[str, str | bool]:
    """A sample's image, reduced if it is a photograph, and its name, without folders.

    The image is empty if it cannot be read any more.
    """
    name = Path(split.describe(position)).name
    try:
        pixels = decode(split, position, 3, shrink=lambda height, width: max(height, width) / _SIDE)
    except ValueError:
        return {"image": "", "small": False, "file": name}
    small = max(pixels.shape[:2]) <= SMALL
    return {"image": _uri(Image.fromarray(pixels.numpy()), _SIDE, exact=small), "small": small, "file": name}


def sheet(path: Path) -> str:
    """The picture of the first batch, reduced to the width of the page; empty if the file does not exist."""
    if not path.is_file():
        return ""
    with Image.open(path) as image:
        return _uri(image.convert("RGB"), _SHEET, exact=max(image.size) <= _SHEET)


def _uri(image: Image.Image, side: int, exact: bool) -> str:
    """PNG if `exact`, else JPEG with sides up to `side`."""
    file = io.BytesIO()
    if exact:
        image.save(file, "PNG")
    else:
        image.thumbnail((side, side))
        image.save(file, "JPEG", quality=85)
    return f"data:image/{'png' if exact else 'jpeg'};base64,{base64.b64encode(file.getvalue()).decode()}"
