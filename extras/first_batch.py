"""The picture `first_batch.png`: the first images of a run as the model receives them."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib import get_data_path
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from utils.console import printable, say
from utils.data import ArrayDataset, Batch, Microbatch
from utils.errors import one_line
from utils.files import write_file
from utils.training import Run

_MOST = 64  # images
_COLUMNS = 8  # images in a row
_GAP = 4  # pixels between them
_LINE = 14  # pixels of a line of text


def write_first_batch(run: Run, batch: Batch) -> None:
    """Write the picture of the main process's first microbatch; a failure does not end the run.

    It waits for the device, so it must not be called for later batches.
    """
    path = run.folder / "first_batch.png"
    if not run.ranks.is_main or not len(batch.images):
        return
    try:
        write_file(path, picture(run, batch))
    except Exception as error:
        problem = f"{path.name} could not be written ({one_line(error)})"
        say(f"{problem}; the run continues without it")


def picture(run: Run, batch: Batch) -> bytes:
    """The first images of a batch and their classes, as the bytes of a PNG file."""
    dataset = run.train_batches.dataset
    spec = run.spec
    if dataset.source is not None:
        pixels = pixels_of(dataset, batch.microbatch)
    else:
        unit = batch.images[:_MOST].permute(0, 2, 3, 1).cpu() * torch.tensor(spec.std)
        pixels = (unit + torch.tensor(spec.mean)).mul(255).round().clamp(0, 255).byte()
    return draw(pixels.numpy(), batch.labels[:_MOST].tolist(), run.data.class_names)


def pixels_of(features: ArrayDataset, microbatch: Microbatch) -> Tensor:
    """The images from which a microbatch's first features were computed, uint8 [n, H, W, C]."""
    source: Any = features.source
    places = microbatch.indices
    if features.source_rows is not None:
        places = features.source_rows[places]
    views = (features.row_of(microbatch) // len(features)).tolist()
    pixels = []
    for place, view in zip(places[:_MOST, None], views, strict=False):
        one = Microbatch(0, view, 0, place)  # view v has the random numbers of epoch v
        images = source.__getitems__(one).images
        if not source.in_loader:
            images = source.augmentation.apply(images, source.augmentation.draw(one))
        pixels.append(images)
    return torch.cat(pixels)


def draw(pixels: np.ndarray, labels: Sequence, names: Sequence[str]) -> bytes:
    """Images [n, H, W, C] uint8 in rows of eight, each with its classes below, as a PNG file."""
    captions = [label_lines(label, [*map(printable, names)]) for label in labels]
    height, width, channels = pixels.shape[1:]
    if channels == 1:
        pixels = pixels.repeat(3, axis=3)
    side = min(250, max(140, width))  # the width of an image on the sheet, in pixels
    size = side, max(1, round(side * height / width))
    method = Image.Resampling.NEAREST if width <= side else Image.Resampling.BOX
    cell = size[0] + _GAP, size[1] + _GAP + _LINE * max(map(len, captions))
    rows = -(-len(pixels) // _COLUMNS)
    sheet = Image.new("RGB", (cell[0] * _COLUMNS, cell[1] * rows), "white")
    pen = ImageDraw.Draw(sheet)
    # Pillow's own font lacks letters such as ü
    font = ImageFont.truetype(f"{get_data_path()}/fonts/ttf/DejaVuSans.ttf", 11)
    for number, lines in enumerate(captions):
        left = cell[0] * (number % _COLUMNS)
        top = cell[1] * (number // _COLUMNS)
        sheet.paste(Image.fromarray(pixels[number]).resize(size, method), (left, top))
        for place, line in enumerate(lines):
            pen.text((left, top + size[1] + _LINE * place), line[:24], fill="black", font=font)
    file = io.BytesIO()
    sheet.save(file, "PNG")
    return file.getvalue()


def label_lines(label: int | Sequence[float], names: Sequence[str]) -> list[str]:
    """The name of a class, or the names and shares of the classes of a float label.

    Classes with a share below 0.05 are left out, and so is a share above 0.95.
    """
    if isinstance(label, int):
        return [names[label]]
    if len(label) == 1:  # of the second of two classes
        label = [1 - label[0], label[0]]
    shares = sorted(zip(label, names, strict=True), reverse=True)
    return [
        name if share > 0.95 else f"{share:.1f} {name}" for share, name in shares if share >= 0.05
    ]
