"""Small files for the tests."""

from pathlib import Path

import numpy as np
from PIL import Image


def image_folder(root: str, classes: int, images: int, size: tuple[int, int]) -> None:
    """Write root/classN/M.png, random colours of each class's own brightness."""
    random = np.random.default_rng(0)
    for label in range(classes):
        folder = Path(root) / f"class{label}"
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(images):
            pixels = random.integers(0, 100, (*size, 3), np.uint8) + np.uint8(150 * label // classes)
            Image.fromarray(pixels).save(folder / f"{number}.png")
