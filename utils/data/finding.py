"""Find the samples of a run again, by its table."""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import compress

import numpy as np

from utils.console import join_names
from utils.data.check import check_rows
from utils.data.folders import folders_in
from utils.data.labels import indices_in
from utils.data.sources import is_image_folder, known_split
from utils.data.splits import Files, Source, Split
from utils.data.table import Part
from utils.errors import UserError
from utils.files import expand, in_form_of_files
from utils.settings.data import DataSettings


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
    split, is_gone, is_changed = _compare(part, *_files_now(part, config.data, source))
    errors = dict(split.errors)
    errors |= dict.fromkeys(np.flatnonzero(is_gone).tolist(), "no longer in the data set")
    lines = []
    if skip:
        changed = np.flatnonzero(is_changed).tolist()
        errors |= dict.fromkeys(changed, "changed since the run started")
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
        raise _other_kind(whole.name)
    if part.count != len(whole):
        return [f"split {part.source!r} had {part.count} samples and now has {len(whole)}"]
    pairs = (
        ("labels", part.labels, whole.label_fingerprint),
        ("images", part.content, whole.content),
    )
    return [
        f"the {what} of split {part.source!r} changed" for what, old, new in pairs if old != new
    ]


def _other_kind(split: str) -> UserError:
    problem = f"split {split!r} has other kinds of images or labels than in the run"
    return UserError(problem, "use the same --data and the same --task")


def _files_now(part: Part, data: str, source: Callable[[], Source]) -> tuple[Files, np.ndarray]:
    """The files of a part now, in its order, and which of its names may be files, bool [N].

    Names that leave the folder, as a stranger's table may have, are not.
    """
    names = part.names or []
    if is_image_folder(data):
        safe = [not os.path.isabs(name) and ".." not in name.split("/") for name in names]
        return _in_folder(os.path.abspath(expand(data)), names), np.asarray(safe)
    opened = source()
    name = known_split(opened, part.source, "the run used split")
    files = opened.openers[name]().images
    if not isinstance(files, Files):
        raise _other_kind(name)
    rows = indices_in(files.names, names)
    found = files.select(rows.clip(0))
    for row in np.flatnonzero(rows < 0):
        found.names[row] = names[row]
    return found, rows >= 0


def _in_folder(root: str, names: list[str]) -> Files:
    """Files below a folder, or below the only folder in it, perhaps in another Unicode form."""
    base = root
    while not os.path.exists(in_form_of_files(os.path.join(base, names[0]))):
        inner = folders_in(base)
        if len(inner) != 1:
            return Files(names, root)
        base = inner[0].path
    found = []
    for name in names:
        path = os.path.join(base, name)
        if not os.path.exists(path):
            path = in_form_of_files(path)
        found.append(path.removeprefix(f"{base}/"))
    return Files(found, base)


def _compare(
    part: Part, files: Files, may_exist: np.ndarray
) -> tuple[Split, np.ndarray, np.ndarray]:
    """The samples of a part, whose files are these now, and the positions of missing files and of
    changed ones.

    Only files whose size or a time differs from the table are read, at both ends.
    """
    listed = part.split
    stamps = np.full((len(files), 3), -1)
    for row in np.flatnonzero(may_exist).tolist():
        with suppress(OSError):
            stamps[row] = files.stamp(row)
    errors = dict(listed.errors)
    split = replace(listed, images=files, stamps=stamps, errors=errors)
    is_gone = listed.readable & (stamps[:, 0] < 0)
    is_other = listed.readable & ~is_gone & (stamps != listed.stamps).any(1)
    is_changed = np.zeros(len(listed), bool)
    to_read = np.flatnonzero(is_other)
    checksums = np.asarray(part.checksums)
    for row, (looks, reason) in zip(to_read.tolist(), check_rows(split, to_read), strict=True):
        if reason:
            errors[row] = reason
        else:
            is_changed[row] = looks[-1] != checksums[row]
    return split, is_gone, is_changed
