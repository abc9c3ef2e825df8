"""What is in folders: images, archives and other files, without hidden ones.

A folder is a path, or an `Entry`, a folder in an archive.
"""

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from torchvision.datasets.folder import IMG_EXTENSIONS

from utils.console import join_names

ENDINGS = (*IMG_EXTENSIONS, ".jfif", ".jpe", ".heic", ".heif", ".avif")
# Names that begin with a dot are hidden. The others are folders that systems and tools add.
_HIDDEN = re.compile(
    r"(^|/)(\.|(__macosx|@eadir|#recycle|\$recycle\.bin|lost\+found|system volume information"
    r"|__pycache__)(/|$))",
    re.I,
)
_ARCHIVE = re.compile(r".\.(zip|tgz|tbz2?|txz|tar(\.(gz|bz2|xz|zst))?)$", re.I)


@dataclass(slots=True)
class Entry:
    """A file or folder in an archive, with the methods of `os.DirEntry` that are used here.

    `names` has the files and folders in and below a folder; those of folders end in a slash.
    """

    name: str
    path: str
    names: list[str] | None = None

    def is_dir(self) -> bool:
        return self.names is not None

    def is_symlink(self) -> bool:
        return False

    def __fspath__(self) -> str:
        return self.path

    def scan(self) -> "list[Entry]":
        """What the folder holds, as `os.scandir` gives it."""
        files: list[Entry] = []
        folders: dict[str, list[str]] = {}
        for name in self.names or ():
            first, is_below, rest = name.partition("/")
            if is_below:
                folders.setdefault(first, []).append(rest)
            elif first:
                files.append(Entry(first, f"{self.path}/{first}"))
        return files + [Entry(name, f"{self.path}/{name}", own) for name, own in folders.items()]


Folder = str | os.PathLike[str]


class Scan(Counter):
    """Selects the images among files, and counts the other files by their endings."""

    def images(self, files: Iterable[Any]) -> list[str]:
        """The paths of the images among the files."""
        found = []
        for file in files:
            if is_image(file.name):
                found.append(file.path)
            else:
                self[_ending(file.name) or "no extension"] += 1
        return found

    def kinds(self) -> str:
        """The endings of the other files, and how many files each has."""
        return join_names((f"{kind} ({count})" for kind, count in self.most_common()), 6)


def folders_in(folder: Folder) -> list[Any]:
    """The folders in a folder, by name, without hidden ones and links to folders above it."""
    parents = with_parents(folder)
    found = [entry for entry in visible_in(folder) if is_folder(entry)]
    return [e for e in found if not e.is_symlink() or os.path.realpath(e.path) not in parents]


def with_parents(folder: Folder) -> set[str]:
    """The folder and all folders above it, without links."""
    real = Path(os.path.realpath(folder))
    return {str(path) for path in (real, *real.parents)}


def files_below(folder: Folder, entered: set[str] | None = None) -> Iterator[Any]:
    """The files in and below a folder, by name, without hidden ones.

    Links to folders are followed, but no folder is entered twice, and none of `entered` or, by
    default, above the folder: links can form circles.
    """
    entered = with_parents(folder) if entered is None else entered
    for entry in visible_in(folder):
        if not is_folder(entry):
            yield entry
        elif (inner := os.path.realpath(entry.path)) not in entered:
            entered.add(inner)
            yield from files_below(entry, entered)


def with_images(folder: Folder) -> dict[str, Folder]:
    """The folders in a folder that hold images, directly or below, by name."""
    return {
        child.name: child
        for child in folders_in(folder)
        if any(is_image(file.name) for file in files_below(child))
    }


def is_folder(entry: os.DirEntry | Entry) -> bool:
    """Whether an entry is a folder or a link to one."""
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def visible_in(folder: Folder) -> list[Any]:
    """What a folder holds, by name, without hidden files and folders."""
    entries: Iterable[Any] = folder.scan() if isinstance(folder, Entry) else os.scandir(folder)
    return [e for e in sorted(entries, key=attrgetter("name")) if is_visible(e.name)]


def is_visible(name: str) -> bool:
    """Whether neither a file nor a folder above it is hidden."""
    return not _HIDDEN.search(name)


def is_image(name: str) -> bool:
    """Whether a file of this name is read as an image."""
    return _ending(name) in ENDINGS


def is_archive(name: str) -> bool:
    """Whether a file of this name is taken for an archive."""
    return bool(_ARCHIVE.search(name))


def holds_archives(folder: Folder) -> bool:
    """Whether there are archives in or below a folder, and no images."""
    found = False
    for file in files_below(folder):
        if is_image(file.name):
            return False
        found |= is_archive(file.name)
    return found


def archives_at(path: str) -> str:
    """The archive, or the folder of archives, that a path leads to or into; empty if there is none.

    A path in an archive does not exist.
    """
    while path and not os.path.lexists(path):
        path = os.path.dirname(path)
    if os.path.isdir(path):
        has_own = any(is_archive(entry.name) for entry in visible_in(path))
        return path if has_own and holds_archives(path) else ""
    return path if os.path.isfile(path) and is_archive(path) else ""


def _ending(name: str) -> str:
    return os.path.splitext(name)[1].lower()
