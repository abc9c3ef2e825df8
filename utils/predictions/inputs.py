"""Find the images to predict: files, folders and glob patterns."""

import glob
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from utils.console import join_names
from utils.data.check import check_images
from utils.data.scan import Scan
from utils.data.splits import Files, Split, fingerprint_of, whole_split
from utils.errors import UserError


def find_images(given: Sequence[str]) -> Split:
    """The images at these paths, in this order, each once; those of a folder or a pattern are sorted by name.

    The labels of the split have no meaning. Raises UserError if a path does not exist or if there is no image.
    """
    found: list[str] = []
    notes: list[str] = []
    for path in _matches(given):
        if os.path.isdir(path):
            scan = Scan(Path(path), [])
            found += scan.images(path, "")
            notes += scan.notes()
        else:
            found.append(path)
    if not found:
        raise UserError(f"{join_names(given)}: no images", "name image files, or folders with images in them")
    paths = list(dict.fromkeys(found))
    split = whole_split("images", Files(paths), np.zeros(len(paths)), fingerprint_of(*map(os.fsencode, paths)))
    return replace(split, notes=tuple(notes))


def check_all(split: Split, cache_dir: str, progress: Callable) -> Split:
    """The split with the errors of all images that cannot be decoded; they keep their positions."""
    checked = check_images(split, True, cache_dir, progress)
    return replace(checked, bad={row: f"not a readable image ({reason})" for row, reason in checked.bad.items()})


def _matches(given: Sequence[str]) -> list[str]:
    """The paths, with each pattern replaced by the paths that it matches."""
    matches: list[str] = []
    for path in given:
        if os.path.lexists(path):
            matches.append(path)
            continue
        found = sorted(glob.glob(os.path.expanduser(path), recursive=True))
        if not found:
            what = "matches no file" if glob.has_magic(path) else "no such file or folder"
            raise UserError(f"{join_names([path])}: {what}", "correct the path")
        matches += found
    return matches
