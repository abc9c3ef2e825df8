"""Find the class folders and the image files of a split, and list what is left out."""

import os
from collections import Counter
from contextlib import suppress
from operator import attrgetter
from pathlib import Path

from PIL import Image
from torchvision.datasets.folder import IMG_EXTENSIONS

from utils.console import join_names
from utils.errors import UserError

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
    """One pass over all files of a split, given its folder and its class folders; it counts what is
    not used.
    """

    def __init__(self, folder: Path, children: list[os.DirEntry]):
        self.folder = folder
        self.not_images: Counter[str] = Counter()  # other files by their extension, such as .heic
        self.empty_classes: list[str] = []
        self.deeper = 0  # folders below class folders that hold images
        self.loose = 0  # images next to the class folders, which have no class
        self.linked: list[str] = []  # links to folders that are already included
        # The class of each folder that is entered, so that no image is read twice; "" for the split
        # and its parents.
        self.class_of = dict.fromkeys(_with_parents(folder), "")
        for child in children:
            first = self.class_of.setdefault(os.path.realpath(child.path), class_name_of(child))
            if first != class_name_of(child):
                raise _two_classes(child.path, first)

    def images(self, folder: str, class_name: str) -> list[str]:
        """The paths of the images below a folder, sorted by name."""
        found: list[str] = []
        for entry in sorted(os.scandir(folder), key=attrgetter("name")):
            if is_folder(entry):
                if self._enters(entry, class_name):
                    inner = self.images(entry.path, class_name)
                    self.deeper += bool(inner and class_name)
                    found += inner
            elif _looks_like_image(entry):
                found.append(entry.path)
            else:
                self._count_other(entry.name)
        return found

    def count_beside_classes(self) -> None:
        """Count the files next to the class folders."""
        for entry in os.scandir(self.folder):
            if _looks_like_image(entry):
                self.loose += 1
            elif not is_folder(entry):
                self._count_other(entry.name)

    def kinds(self) -> str:
        """The types of the files that are not images, and how many files each has."""
        return join_names(
            (
                f"{kind or 'no extension'} ({count})"
                for kind, count in self.not_images.most_common()
            ),
            6,
        )

    def notes(self) -> tuple[str, ...]:
        """Lines to print about everything that a user may have meant as samples."""
        lines = {
            "class folders without readable images are left out: ": join_names(self.empty_classes),
            "files of unsupported types are left out: ": self.kinds(),
            "images next to the class folders have no class and are left out: ": str(
                self.loose or ""
            ),
            "links to folders that are already included are left out: ": join_names(self.linked, 3),
            "folders inside class folders that hold images, but are not classes: ": str(
                self.deeper or ""
            ),
        }
        return tuple(f"{self.folder}: {line}{found}" for line, found in lines.items() if found)

    def _enters(self, entry: os.DirEntry, class_name: str) -> bool:
        """Whether to enter a folder; False for hidden folders and links to folders that are already
        included.
        """
        if _is_hidden(entry.name):
            return False
        key = os.path.realpath(entry.path)
        if key not in self.class_of:
            self.class_of[key] = class_name
            return True
        if self.class_of[key] not in (class_name, ""):
            raise _two_classes(entry.path, self.class_of[key])
        self.linked.append(entry.path)
        return False

    def _count_other(self, name: str) -> None:
        if not _is_hidden(name):
            self.not_images[os.path.splitext(name)[1].lower()] += 1


def _two_classes(path: str, first: str) -> UserError:
    problem = (
        f"{path}: is also a folder of class {join_names([first])}, but an image has only one class"
    )
    return UserError(problem, "remove the link")


def folders_in(folder: Path) -> list[os.DirEntry]:
    """The folders in a folder, sorted by name, without hidden ones and links to the folder or its
    parents.
    """
    parents = _with_parents(folder)
    found = [
        entry for entry in os.scandir(folder) if is_folder(entry) and not _is_hidden(entry.name)
    ]
    found = [
        entry
        for entry in found
        if not (entry.is_symlink() and os.path.realpath(entry.path) in parents)
    ]
    return sorted(found, key=attrgetter("name"))


def class_names_in(folder: Path) -> list[str]:
    """The names of the folders in a split's folder that hold images."""
    return [class_name_of(child) for child in folders_in(folder) if holds_image(child.path)]


def holds_image(folder: str | Path, entered: set[str] | None = None) -> bool:
    """Whether any file in or below a folder is named like an image."""
    entered = _with_parents(folder) if entered is None else entered
    below = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if is_folder(entry):
                below += [] if _is_hidden(entry.name) else [entry]
            elif _looks_like_image(entry):
                return True
    for entry in below:
        if entry.is_symlink():  # only links can form circles
            if os.path.realpath(entry.path) in entered:
                continue
            entered.add(os.path.realpath(entry.path))
        if holds_image(entry.path, entered):
            return True
    return False


def loose_images(folder: Path) -> int:
    """The number of images directly in a folder."""
    return sum(map(_looks_like_image, os.scandir(folder)))


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name.lower() in _JUNK


def _looks_like_image(entry: os.DirEntry) -> bool:
    """Whether a file that is not hidden has the ending of an image, or no ending and the content of
    one.
    """
    ending = os.path.splitext(entry.name)[1].lower()
    if ending or entry.name[0] == ".":
        return ending in ENDINGS and entry.name[0] != "." and not is_folder(entry)
    with suppress(Exception):  # any exception type, also for a link to itself
        if entry.is_file():  # opening a pipe may wait forever
            Image.open(entry.path, formats=("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP")).close()
            return True
    return False


def is_folder(entry: os.DirEntry) -> bool:
    """Whether an entry is a folder or a link to one."""
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _with_parents(folder: str | Path) -> set[str]:
    """A folder and all its parents, without links."""
    resolved = Path(folder).resolve()
    return {str(path) for path in (resolved, *resolved.parents)}


def class_name_of(entry: os.DirEntry) -> str:
    """The name of a class folder, the same in any locale.

    Bytes that are not UTF-8 become lone surrogates.
    """
    return os.fsencode(entry.name).decode("utf-8", "surrogateescape")
