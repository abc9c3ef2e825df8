"""The picture `first_batch.png`: the first images of a run as the model receives them."""

import io
import unicodedata
from collections.abc import Sequence

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torchvision.transforms.v2.functional import InterpolationMode, pad, resize, to_pil_image
from torchvision.utils import make_grid

from utils.console import printable
from utils.data.datasets import Batch, Features
from utils.errors import one_line
from utils.files import write_file
from utils.training.run import Run

_MOST, _COLUMNS = 64, 8  # images, and images in a row
_SIDE = 128  # pixels; smaller images are enlarged to about this side
_LARGEST = 256  # larger images are reduced to this side, so that the file has a few MB
_TEXT, _LINE, _GAP = 12, 15, 4  # pixels: height of the letters and of a line, and space around an image


def write_first_batch(run: Run, batch: Batch) -> None:
    """Write the picture of the main process's first microbatch. A failure is a warning and does not end the run.

    It waits for the device, so it must not be called for later batches.
    """
    path = run.folder / "first_batch.png"
    if not run.ranks.is_main or not len(batch.images):
        return
    try:
        write_file(path, picture(run, batch))
    except Exception as error:
        run.log.say(f"{path.name} could not be written ({one_line(error)}); the run continues without it")


def picture(run: Run, batch: Batch) -> bytes:
    """The first images of a batch and their classes, as the bytes of a PNG file."""
    std, mean = (torch.tensor(values)[:, None, None] for values in (run.spec.std, run.spec.mean))
    dataset = run.train_batches.dataset
    if isinstance(dataset, Features):
        pixels = dataset.pixels(batch.microbatch, _MOST).permute(0, 3, 1, 2)
    else:
        pixels = (batch.images[:_MOST].detach().float().cpu() * std + mean).mul(255).round().clamp(0, 255).byte()
    names = [drawable(name, number) for number, name in enumerate(run.data.class_names)]
    lines = [label_lines(label, names) for label in batch.labels[:_MOST].tolist()]
    file = io.BytesIO()
    grid(pixels, lines).save(file, "PNG", compress_level=1)
    return file.getvalue()


def drawable(name: str, number: int) -> str:
    """The name of class `number` on one line and without accents, or `class 3` if letters remain that are not ASCII.

    Pillow's own font has no others.
    """
    parts = unicodedata.normalize("NFKD", printable(name))
    plain = "".join(char for char in parts if not unicodedata.combining(char))
    return plain if plain.isascii() else f"class {number}"


def label_lines(label: int | Sequence[float], names: Sequence[str]) -> list[str]:
    """The lines under an image: the name of its class, or the names and shares of the classes of a float label.

    Classes with a share below 0.05 are left out, and so is a share above 0.95.
    """
    if isinstance(label, int):
        return [names[label]]
    if len(label) == 1:  # of the second of two classes
        label = [1 - label[0], label[0]]
    shares = sorted(((share, name) for name, share in zip(names, label, strict=True) if share >= 0.05), reverse=True)
    return [name if share > 0.95 else f"{name} {share:.1f}" for share, name in shares]


def grid(pixels: Tensor, lines: Sequence[Sequence[str]]) -> Image.Image:
    """Images [n, C, H, W] uint8 in rows of eight, each with its lines of text below."""
    sides = pixels.shape[2:]
    scale = _LARGEST / max(sides) if max(sides) > _LARGEST else max(1, round(_SIDE / max(sides)))
    height, width = (max(1, round(side * scale)) for side in sides)
    kind = InterpolationMode.NEAREST if scale >= 1 else InterpolationMode.BILINEAR
    below = _GAP + _LINE * max(map(len, lines))
    cells = pad(resize(pixels, [height, width], kind), [_GAP, _GAP, _GAP, below], fill=255)
    picture = to_pil_image(make_grid(cells, _COLUMNS, padding=0, pad_value=255))
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(_TEXT)
    for number, texts in enumerate(lines):
        left = number % _COLUMNS * cells.shape[3] + _GAP
        top = number // _COLUMNS * cells.shape[2] + _GAP + height
        for row, text in enumerate(texts):
            while draw.textlength(text, font) > width:
                text = text[:-2] + "…" if len(text) > 2 else ""
            draw.text((left, top + row * _LINE), text, "black", font)
    return picture
