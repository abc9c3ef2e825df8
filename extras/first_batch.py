"""The picture `first_batch.png`: the first images of a run as the model receives them."""

import io
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from utils.console import say
from utils.data import ArrayDataset, Batch, Microbatch
from utils.errors import one_line
from utils.files import write_file
from utils.training import Run

_MOST, _COLUMNS = 64, 8  # images, and images in a row
_FONT = "DejaVu Sans"  # comes with Matplotlib


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
    """The images from which the first features of a microbatch were computed, uint8 [n, H, W, C]."""
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
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # the first import lists the fonts
    from matplotlib.figure import Figure  # takes long to import
    from matplotlib.font_manager import findfont, get_font

    letters = get_font(findfont(_FONT)).get_charmap().keys()
    known = [
        name if letters >= set(map(ord, name)) else f"class {number}"
        for number, name in enumerate(names)
    ]
    lines = [label_lines(label, known) for label in labels]
    width = 0.97  # lengths are multiples of the width of a cell
    image = pixels.shape[1] / pixels.shape[2] * width
    cell = image + 0.07 + 0.1 * max(map(len, lines))
    height = cell * -(-len(pixels) // _COLUMNS)
    figure = Figure((11.2, 1.4 * height), dpi=min(180, max(100, pixels.shape[2])))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, _COLUMNS), ylim=(height, 0))
    axes.axis("off")
    for number, texts in enumerate(lines):
        left = number % _COLUMNS
        bottom = number // _COLUMNS * cell + image
        extent = (left, left + width, bottom, bottom - image)
        axes.imshow(pixels[number], cmap="gray", vmin=0, vmax=255, aspect="auto", extent=extent)
        text = "\n".join(text[:24] for text in texts)
        axes.text(left, bottom + 0.02, text, size=8, va="top", family=_FONT, parse_math=False)
    figure.savefig(file := io.BytesIO(), format="png")
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
