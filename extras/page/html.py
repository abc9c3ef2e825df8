"""What the pages of runs and of predict.py share: templates, and images as data URIs.

Each page is one file.
"""

import base64
import io
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from PIL import Image

from extras.page.predictions import Row
from utils.data import SMALL, Split, decode_image

_SIDE = 192  # pixels of a thumbnail's longer side
_SHEET = 1100  # pixels of the longer side of first_batch.png in the page
_MOST = 1000  # images on the page of predict.py; the thumbnail of each has about 5 kB


@cache
def template(name: str) -> Template:
    """A template of this folder, compiled; it escapes all values."""
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"date": date, "number": number}
    return environment.get_template(name)


def date(seconds: float) -> str:
    """A time of the log for readers."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def number(value: float, digits: int = 3) -> str:
    """The number with this many significant digits, or as an integer if it is large."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}".replace("e-0", "e-")


def render(name: str, **values: Any) -> str:
    """The text of a template with these values.

    Characters of names that are not UTF-8 are escaped.
    """
    return template(name).render(values).encode(errors="backslashreplace").decode()


def gallery(title: str, rows: Sequence[Row], split: Split) -> str:
    """The page of predict.py --html: the first 1,000 images of a split and their predictions."""
    figures = [
        (split.describe(place), row, thumbnail(split, place) if row.error is None else None)
        for place, row in enumerate(rows[:_MOST])
    ]
    unreadable = sum(row.error is not None for row in rows)
    return render(
        "gallery.html", title=title, count=len(rows), unreadable=unreadable, figures=figures
    )


def thumbnail(split: Split, position: int) -> dict[str, str | bool]:
    """A sample's image, reduced if it is a photograph, and its name, without folders.

    The image is empty if it cannot be read any more.
    """
    name = Path(split.describe(position)).name
    try:
        pixels = decode_image(
            split, position, 3, shrink=lambda height, width: max(height, width) / _SIDE
        )
    except ValueError:
        return {"image": "", "small": False, "file": name}
    small = max(pixels.shape[:2]) <= SMALL
    return {
        "image": _uri(Image.fromarray(pixels.numpy()), _SIDE, exact=small),
        "small": small,
        "file": name,
    }


def sheet(path: Path) -> str:
    """The picture of the first batch, reduced to the width of the page; empty if the file does not
    exist.
    """
    if not path.is_file():
        return ""
    with Image.open(path) as image:
        return _uri(image.convert("RGB"), _SHEET, exact=max(image.size) <= _SHEET)


def _uri(image: Image.Image, side: int, exact: bool) -> str:
    """PNG if `exact`, else JPEG with sides up to `side`."""
    file = io.BytesIO()
    kind = "png" if exact else "jpeg"
    if exact:
        image.save(file, kind)
    else:
        image.thumbnail((side, side))
        image.save(file, kind, quality=85)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"
