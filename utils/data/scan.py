"""Find the class folders and the image files of a split, and list what is left out."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from operator import attrgetter
from pathlib import Path

from PIL import Image
from torchvision.datasets.folder import IMG_EXTENSIONS

from utils.console import join_names

ENDINGS = (*IMG_EXTENSIONS, ".jfif", ".jpe")
# Folders that systems and tools add. Folders whose names begin with a dot are hidden too.
_JUNK = (
    "__macosx",
    "@eadir",
    "#recycle",
    "$recycle.bin",
    "lost+found",
    "system volume information",
    "__pycache__",
)


class Scan:
    """Selects the images among files, and counts the other files by their endings."""

    def __init__(self) -> None:
        self.other: Counter[str] = Counter()

    def images(self, files: Iterable[os.DirEntry]) -> list[str]:
        """The paths of the images among the files."""
        found = []
        for file in files:
            if _is_image(file):
                found.append(file.path)
            else:
                self.other[_ending(file) or "no extension"] += 1
        return found

    def kinds(self) -> str:
        """The endings of the other files, and how many files each has."""
        return join_names((f"{kind} ({count})" for kind, count in self.other.most_common()), 6)


def notes(folder: str | Path, left_out: dict[str, object]) -> tuple[str, ...]:
    """Lines to print about what a user may have meant as samples."""
    return tuple(f"{folder}: {line}: {found}" for line, found in left_out.items() if found)


def folders_in(folder: str | Path) -> list[os.DirEntry]:
    """The folders in a folder, by name, without hidden ones and links to the folder or its parents."""
    parents = _with_parents(folder)
    found = filter(is_folder, _visible(folder))
    return [entry for entry in found if os.path.realpath(entry.path) not in parents]


def files_in(folder: str | Path) -> list[os.DirEntry]:
    """The files directly in a folder, by name, without hidden ones."""
    return [entry for entry in _visible(folder) if not is_folder(entry)]


def files_below(folder: str | Path, entered: set[str] | None = None) -> Iterator[os.DirEntry]:
    """The files in and below a folder, by name, without hidden ones.

    Links to folders are followed, but no folder is entered twice: links can form circles.
    """
    entered = _with_parents(folder) if entered is None else entered
    for entry in _visible(folder):
        if not is_folder(entry):
            yield entry
        elif (inner := os.path.realpath(entry.path)) not in entered:
            entered.add(inner)
            yield from files_below(entry.path, entered)


def holds_image(folder: str | Path) -> bool:
    """Whether an image is in or below a folder."""
    return any(map(_is_image, files_below(folder)))


def class_names_in(folder: str | Path) -> list[str]:
    """The names of the folders in a split's folder that hold images."""
    return [child.name for child in folders_in(folder) if holds_image(child.path)]


def is_folder(entry: os.DirEntry) -> bool:
    """Whether an entry is a folder or a link to one."""
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _visible(folder: str | Path) -> list[os.DirEntry]:
    entries = sorted(os.scandir(folder), key=attrgetter("name"))
    return [e for e in entries if e.name[0] != "." and e.name.lower() not in _JUNK]


def _ending(file: os.DirEntry) -> str:
    return os.path.splitext(file.name)[1].lower()


def _is_image(file: os.DirEntry) -> bool:
    """Whether a file has the ending of an image, or no ending and the content of one."""
    if ending := _ending(file):
        return ending in ENDINGS
    with suppress(Exception):  # any exception type, also for a link to itself
        if file.is_file():  # opening a pipe may wait forever
            Image.open(file.path, formats=("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP")).close()
            return True
    return False


def _with_parents(folder: str | Path) -> set[str]:
    """A folder and all its parents, without links."""
    resolved = Path(folder).resolve()
    return {str(path) for path in (resolved, *resolved.parents)}
