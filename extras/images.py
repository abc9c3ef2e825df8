"""The images that predict.py is given."""

import glob
import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from utils.config import require
from utils.console import join_names
from utils.data import (
    Files,
    Scan,
    Split,
    archives_at,
    files_below,
    fingerprint_of,
    is_archive,
    left_out_notes,
    whole_split,
)
from utils.settings.data import DataSettings


def find_images(given: Sequence[str], cache_dir: str = DataSettings.cache_dir) -> Split:
    """The images at these paths, in this order, each once; those of a folder, archive or pattern by
    name.

    The labels of the split have no meaning. Raises UserError if a path does not exist, or if no
    image is found.
    """
    found = []
    lines: list[str] = []
    for pattern in given:
        expanded = os.path.expanduser(pattern)
        paths = [pattern] if os.path.lexists(pattern) else glob.glob(expanded, recursive=True)
        if not paths and archives_at(expanded):  # an image in an archive
            paths = [expanded]
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
    images = Files([*dict.fromkeys(found)])
    inside = [path for path in images.names if is_archive(path) or not os.path.lexists(path)]
    if inside:
        from utils.data.archives import find_members

        problem = f"{join_names(inside)}: archives and other images cannot be predicted together"
        require(len(inside) == len(images), problem, "name them in two commands")
        images = find_members(inside, cache_dir)
    problem = "; ".join([f"{join_names(given)}: no images", *lines])
    require(images.names, problem, "name JPEG or PNG files, archives, or folders with such images")
    fingerprint = fingerprint_of(*map(os.fsencode, images.names))
    split = whole_split("images", images, np.zeros(len(images)), fingerprint)
    return replace(split, notes=tuple(lines))
