"""The images that predict.py is given."""

import glob
import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from utils.config import require
from utils.console import join_names
from utils.data import Files, Scan, Split, files_below, fingerprint_of, left_out_notes, whole_split


def find_images(given: Sequence[str]) -> Split:
    """The images at these paths, in this order, each once; those of a folder or pattern by name.

    The labels of the split have no meaning. Raises UserError if a path does not exist, or if no
    image is found.
    """
    found = []
    lines: list[str] = []
    for pattern in given:
        expanded = os.path.expanduser(pattern)
        paths = [pattern] if os.path.lexists(pattern) else glob.glob(expanded, recursive=True)
        problem = f"{join_names([pattern])}: no such file or folder"
        require(paths, problem, "correct the path or the pattern")
        for path in sorted(paths):
            if os.path.isdir(path):
                scan = Scan()
                found += scan.images(files_below(path))
                lines += left_out_notes(
                    path, {"files of unsupported types are left out": scan.kinds()}
                )
            else:
                found.append(path)
    problem = "; ".join([f"{join_names(given)}: no images", *lines])
    require(found, problem, "name JPEG or PNG files, or folders with some in them")
    names = list(dict.fromkeys(found))
    fingerprint = fingerprint_of(*map(os.fsencode, names))
    split = whole_split("images", Files(names), np.zeros(len(names)), fingerprint)
    return replace(split, notes=tuple(lines))
