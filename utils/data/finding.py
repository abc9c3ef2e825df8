"""Find the samples of a run again, by its table."""

import os
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import compress

import numpy as np

from utils.console import join_names, nfc
from utils.data.check import check_rows
from utils.data.labels import indices_in
from utils.data.sources import is_image_folder, known_split
from utils.data.splits import Files, Source, Split
from utils.data.table import Part
from utils.errors import UserError
from utils.files import expand
from utils.settings.data import DataSettings

_GONE = (-1, -1, -1)  # the stamp of a missing file


def find_again(
    part: Part, config: DataSettings, source: Callable[[], Source], skip: bool = False
) -> tuple[Split, list[str]]:
    """The samples of a part in --data now, and lines about missing and changed ones.

    Image files are found by name, without a search for others, and only those whose size or a time
    has changed are read. The images of a table or an array are compared as a whole. Missing images
    get errors. With `skip`, changed images do too, and there are no lines about either.
    """
    if part.names is None:
        whole = source().split(known_split(source(), part.source, "the run used split"))
        lines = _changes(part, whole)
        split = replace(whole, name=part.split.name)
        if not lines:
            index = part.split.image_index
            split = replace(split, labels=part.split.labels, image_index=index)
        return split, lines
    split, is_gone, is_changed = _compare(part, *_find(part, config.data, source))
    errors = dict(split.errors)
    errors |= dict.fromkeys(np.flatnonzero(is_gone).tolist(), "no longer in the data set")
    lines = []
    if skip:
        errors |= dict.fromkeys(
            np.flatnonzero(is_changed).tolist(), "changed since the run started"
        )
    else:
        for what, chosen in (("are missing", is_gone), ("changed", is_changed)):
            if chosen.any():
                names = [*compress(part.names, chosen)]
                count = f"{len(names):,} of {len(split):,} images of {split.name!r} {what}"
                lines.append(f"{count}: {join_names(names, 5)}")
    return replace(split, errors=errors, bits=config.image_bits), lines


def _changes(part: Part, whole: Split) -> list[str]:
    """Lines about how a split of a table or an array differs from the listed one."""
    if isinstance(whole.images, Files) or whole.labels.ndim != part.split.labels.ndim:
        problem = f"split {whole.name!r} has other kinds of images or labels than in the run"
        raise UserError(problem, "use the same --data and the same --task")
    if part.count != len(whole):
        return [f"split {part.source!r} had {part.count} samples and now has {len(whole)}"]
    pairs = (
        ("labels", part.labels, whole.label_fingerprint),
        ("images", part.content, whole.content),
    )
    return [
        f"the {what} of split {part.source!r} changed" for what, old, new in pairs if old != new
    ]


def _find(part: Part, data: str, source: Callable[[], Source]) -> tuple[Files, np.ndarray]:
    """The files of a part now, and their stamps, int64 [N, 3], -1 for a missing file."""
    names = part.names or []
    if is_image_folder(data):
        return _find_in_folder(os.path.abspath(expand(data)), names)
    opened = source()
    name = known_split(opened, part.source, "the run used split")
    images = opened.openers[name]().images
    if not isinstance(images, Files):
        problem = f"split {name!r} has other kinds of images than in the run"
        raise UserError(problem, "use the same --data")
    return _find_among(images, names)


def _find_in_folder(root: str, names: Sequence[str]) -> tuple[Files, np.ndarray]:
    base = _with_first(root, names[0])
    folder = _Folder(base)
    found = []
    stamps = []
    for name in names:
        entry = folder.entry(name)
        found.append(entry.path[len(base) + 1 :] if entry else name)
        stamps.append(_stamp(entry) if entry else _GONE)
    return Files(found, base), np.asarray(stamps, np.int64)


def _find_among(files: Files, names: Sequence[str]) -> tuple[Files, np.ndarray]:
    rows = indices_in(files.names, names)
    found = files.select(rows.clip(0))
    stamps = np.full((len(names), 3), _GONE, np.int64)
    for place, row in enumerate(rows.tolist()):
        if row < 0:
            found.names[place] = names[place]
        else:
            with suppress(OSError):
                stamps[place] = found.stamp(place)
    return found, stamps


def _compare(part: Part, files: Files, stamps: np.ndarray) -> tuple[Split, np.ndarray, np.ndarray]:
    """The samples of a part, whose files are these now, and the positions of missing files and of
    changed ones.

    Only files whose size or a time differs from the table are read, at both ends.
    """
    listed = part.split
    errors = dict(listed.errors)
    split = replace(listed, images=files, stamps=stamps, errors=errors)
    is_known = np.ones(len(listed), bool)  # and not left out already
    is_known[[*errors]] = False
    is_gone = is_known & (stamps[:, 0] < 0)
    to_read = np.flatnonzero(is_known & ~is_gone & (stamps != listed.stamps).any(1))
    is_changed = np.zeros(len(listed), bool)
    checksums = np.asarray(part.checksums)
    for row, (looks, reason) in zip(to_read.tolist(), check_rows(split, to_read), strict=True):
        if reason:
            errors[row] = reason
        else:
            is_changed[row] = looks[-1] != checksums[row]
    return split, is_gone, is_changed


class _Folder:
    """The files below a folder by name, also in another Unicode form. Each folder is listed once.

    A name that leaves the folder, as a stranger's table may have, is no name of a file.
    """

    def __init__(self, root: str):
        self.root = root
        self._entries = lru_cache(64)(self._list)

    def entry(self, name: str) -> os.DirEntry | None:
        """The file or folder of this name."""
        if os.path.isabs(name):
            return None
        folder, own = os.path.split(name)
        found = self._entries(folder)
        return found.get(own) or found.get(nfc(own))

    def _list(self, folder: str) -> dict[str, os.DirEntry]:
        entry = self.entry(folder) if folder else None
        if folder and entry is None:
            return {}
        try:
            found = [*os.scandir(entry.path if entry else self.root)]
        except OSError:
            return {}
        return {nfc(each.name): each for each in found} | {each.name: each for each in found}


def _with_first(root: str, name: str) -> str:
    """The folder that holds the image of this name: `root`, or the only folder in it."""
    base = root
    while _Folder(base).entry(name) is None:
        inner = [each.path for each in os.scandir(base) if each.is_dir() and each.name[0] != "."]
        if len(inner) != 1:
            return root
        base = inner[0]
    return base


def _stamp(entry: os.DirEntry) -> tuple[int, int, int]:
    try:
        status = entry.stat()
    except OSError:  # a link to a file that is gone
        return _GONE
    is_file = stat.S_ISREG(status.st_mode)
    return (status.st_size, status.st_mtime_ns, status.st_ctime_ns) if is_file else _GONE
