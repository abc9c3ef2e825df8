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
from utils.data.splits import Files, Split, fingerprint_of
from utils.errors import UserError


def find_images(given: Sequence[str]) -> Split:
    """The images at these paths, in this order, each once; those of a folder or a pattern are sorted by name.

    The labels of the split have no meaning. `bad` has the paths that are not regular files. Raises UserError if a path
    does not exist or if there is no image.
    """
    found: dict[str, str] = {}  # the path of each image, and why it cannot be read
    notes: list[str] = []
    for path in _matches(given):
        if os.path.isdir(path):
            scan = Scan(Path(path), [])
            for image in scan.images(path, ""):
                found.setdefault(image, scan.bad.get(image, ""))
            notes += scan.left_out.notes(Path(path))
        else:
            found.setdefault(path, "" if os.path.isfile(path) else "not a regular file")
    if not found:
        raise UserError(f"{join_names(given)}: no images", "name image files, or folders with images in them")
    rows, labels = np.arange(len(found)), np.zeros(len(found), np.int64)
    bad = {row: reason for row, reason in enumerate(found.values()) if reason}
    fingerprint = fingerprint_of(*map(os.fsencode, found))
    return Split("images", Files(list(found)), labels, rows, fingerprint, bad=bad, notes=tuple(notes))


def check_all(split: Split, cache_dir: str, progress: Callable) -> Split:
    """The split with the errors of all images that cannot be decoded; they keep their positions."""
    checked = check_images(split, True, cache_dir, progress)
    found = {row: split.bad.get(row, f"not a readable image ({reason})") for row, reason in checked.bad.items()}
    return replace(checked, bad=found)


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
