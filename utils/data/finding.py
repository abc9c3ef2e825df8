"""Find the samples of a run again, by its table."""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from utils.config import require
from utils.console import join_names
from utils.data.check import check_images, check_rows
from utils.data.labels import indices_in
from utils.data.listing import with_images
from utils.data.sources import is_image_folder, known_split
from utils.data.splits import Files, Source, Split
from utils.data.table import Part
from utils.errors import UserError
from utils.files import expand, in_form_of_files
from utils.settings.data import DataSettings


@dataclass(frozen=True)
class Found:
    """The image files of a table as they are now: their stamps, their errors, and the rows of
    missing and of changed files.
    """

    images: Files
    stamps: np.ndarray
    errors: dict[int, str]
    missing: set[int]
    changed: set[int]

    def names_of(self, rows: set[int], part: Part) -> list[str]:
        """The names of those of a part's images that are in `rows`."""
        return [self.images.names[row] for row in part.split.image_index.tolist() if row in rows]


def find_again(
    parts: Sequence[Part], config: DataSettings, source: Callable[[], Source], skip: bool = False
) -> tuple[list[Split], list[str]]:
    """The samples of parts of a table in --data now, and lines about missing and changed ones.

    Image files are found by name, without a search for others, and only those whose size or a time
    has changed are read. The images of a table or an array are compared as a whole. Missing images
    get errors. With `skip`, changed images do too, and there are no lines about either.
    """
    splits = []
    lines: list[str] = []
    missing: list[str] = []
    changed: list[str] = []
    found: dict[int, Found] = {}  # by the images, which two parts may share
    for part in parts:
        if not part.has_files:
            split, own = _of_table(part, source())
            splits.append(split)
            lines += own
            continue
        key = id(part.split.images)
        if key not in found:
            same = [each.split.image_index for each in parts if id(each.split.images) == key]
            files = _files_now(part, config.data, source)
            found[key] = _compare(part, np.unique(np.concatenate(same)), *files)
        now = found[key]
        splits.append(_of_files(part, now, config, skip))
        missing += now.names_of(now.missing, part)
        changed += now.names_of(now.changed, part)
    if not skip:
        total = f"{sum(map(len, splits)):,} images"
        for what, names in (("are missing", missing), ("changed", changed)):
            if names:
                lines.append(f"{len(names):,} of {total} {what}: {join_names(names, 5)}")
    return splits, lines


def _of_files(part: Part, now: Found, config: DataSettings, skip: bool) -> Split:
    """The samples of a part in files. With `skip`, changed images get errors, and all others are
    decoded, as in a new run.
    """
    errors = now.errors | dict.fromkeys(now.missing, "no longer in the data set")
    if skip:
        errors |= dict.fromkeys(now.changed, "changed since the run started")
    split = replace(
        part.split, images=now.images, stamps=now.stamps, errors=errors, bits=config.image_bits
    )
    if not skip:
        return split
    there = split.select(np.flatnonzero(split.readable))
    decoded = check_images(there, True, config.cache_dir)
    return replace(split, errors={**decoded.errors, **errors})


def _of_table(part: Part, source: Source) -> tuple[Split, list[str]]:
    """The samples of a part of a table or an array, and lines about what changed."""
    whole = source.split(known_split(source, part.source, "the run used split"))
    lines = _changes(part, whole)
    split = replace(whole, name=part.split.name)
    if not lines:
        index = part.split.image_index
        is_there = index.min() >= 0 and index.max() < len(whole.images)
        require(is_there, "the table of samples has rows outside the split", "use another one")
        split = replace(split, labels=part.split.labels, image_index=index)
    return split, lines


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
    """The files of a part in --data, in its order, and which names may be opened, bool [N].

    A name that leads out of the folder, as in a stranger's table, may not.
    """
    images: Any = part.split.images
    names = images.names
    if is_image_folder(data):
        safe = [not os.path.isabs(name) and ".." not in name.split("/") for name in names]
        return Files([*names], _base(str(expand(data)), names)), np.asarray(safe)
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


def _base(root: str, names: list[str]) -> str:
    """The folder that these names begin in: `root`, or a folder below it."""
    some = [*{os.path.dirname(name): name for name in names}.values()]  # one of each folder

    def has_some(base: str) -> bool:
        return any(os.path.exists(in_form_of_files(os.path.join(base, name))) for name in some)

    base = root
    while not has_some(base):
        inner = [os.fspath(each) for each in with_images(base).values()]
        if found := next(filter(has_some, inner), None):
            return found
        if len(inner) != 1:
            return root
        base = inner[0]
    return base


def _compare(part: Part, rows: np.ndarray, files: Files, may_exist: np.ndarray) -> Found:
    """Compare rows of the images of a part, which now are `files`, with the table.

    Only files whose size or a time differs are read, at both ends.
    """
    listed = part.split
    stamps = np.full((len(files), 3), -1)
    errors = dict(listed.errors)
    known = np.asarray([*errors], np.int64)
    stamps[known] = listed.stamps[known]
    rows = np.setdiff1d(rows, known)
    for row in rows[may_exist[rows]].tolist():
        with suppress(OSError, ValueError):  # ValueError: a null character in the name
            stamps[row] = _stamp(files, row)
    is_missing = stamps[rows, 0] < 0
    is_other = (stamps[rows] != listed.stamps[rows]).any(1)
    to_read = rows[is_other & ~is_missing]
    checks = check_rows(replace(listed, images=files, stamps=stamps), to_read)
    changed = set()
    for row, (looks, reason) in zip(to_read.tolist(), checks, strict=True):
        if reason:
            errors[row] = reason
        elif looks[-1] != listed.checksums[row]:
            changed.add(row)
    return Found(files, stamps, errors, {*rows[is_missing].tolist()}, changed)


def _stamp(files: Files, row: int) -> tuple[int, int, int]:
    """The stamp of a file, whose name may now be in another Unicode form."""
    try:
        return files.stamp(row)
    except OSError:
        if files.names[row].isascii():  # it has one form
            raise
        path = in_form_of_files(files.path(row))
        files.names[row] = os.path.relpath(path, files.root)
        return files.stamp(row)
