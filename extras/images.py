"""The images that predict.py is given."""

import glob
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

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
    found: list[Files] = []
    lines: list[str] = []
    listed = cache(partial(_members, cache_dir))
    for pattern in given:
        expanded = os.path.expanduser(pattern)
        paths = [pattern] if os.path.lexists(pattern) else glob.glob(expanded, recursive=True)
        if not paths and (archives := archives_at(pattern)):
            members = listed(archives)
            own = [row for row, path in enumerate(members.paths) if path == pattern]
            found.append(members.select(np.asarray(own, np.int64)))
            continue
        problem = f"{join_names([pattern])}: no such file or folder"
        require(paths, problem, "correct the path or the pattern")
        for path in sorted(paths):
            if os.path.isdir(path):
                scan = Scan()
                found.append(Files(scan.images(files_below(path))))
                lines += left_out_notes(
                    path, {"files of unsupported types are left out": scan.kinds()}
                )
            elif archives_at(path):
                found.append(listed(path))
            else:
                found.append(Files([path]))
    paths = [path for files in found for path in files.paths]
    problem = "; ".join([f"{join_names(given)}: no images", *lines])
    require(paths, problem, "name JPEG or PNG files, or folders with some in them")
    images = Files(paths)
    if any(type(files) is not Files for files in found):
        from utils.data.members import joined

        images = joined(found)
    images = images.select(np.sort(np.unique(paths, return_index=True)[1]))
    fingerprint = fingerprint_of(*map(os.fsencode, images.names))
    split = whole_split("images", images, np.zeros(len(images)), fingerprint)
    return replace(split, notes=tuple(lines))


def _members(cache_dir: str, archives: str) -> Files:
    """The images in archives, by name."""
    from utils.data.archives import list_members

    members, _ = list_members(archives, cache_dir)
    rows = sorted(range(len(members)), key=members.names.__getitem__)
    return members.select(np.asarray(rows, np.int64))
