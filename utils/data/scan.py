"""The folders and files of a split: which folders are entered, which files are images, and what is left out."""

import os
import stat
from collections import Counter
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path

from torchvision.datasets.folder import IMG_EXTENSIONS

from utils.console import join_names

# Folders that systems and tools add, besides those whose names begin with a dot.
_JUNK = ("__macosx", "@eadir", "#recycle", "$recycle.bin", "lost+found", "system volume information", "__pycache__")
_SPECIAL = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


@dataclass
class LeftOut:
    """What a split's folder holds besides its samples."""

    hidden_folders: Counter = field(default_factory=Counter)  # by name, such as .ipynb_checkpoints
    hidden_files: int = 0
    not_images: Counter = field(default_factory=Counter)  # files by the end of their names, such as .heic
    empty_classes: list[str] = field(default_factory=list)
    loose: int = 0  # images beside the class folders, which have no class
    linked: list[str] = field(default_factory=list)  # links to folders that are already included

    def notes(self, folder: Path) -> list[str]:
        """One line for each thing that a user may have meant as samples."""
        lines = []
        if self.empty_classes:
            lines.append(
                f"{folder}: class folders without readable images are left out: {join_names(self.empty_classes)}"
            )
        if self.not_images:
            kinds = join_names(
                [f"{kind or 'no extension'} ({count})" for kind, count in self.not_images.most_common()], 6
            )
            lines.append(f"{folder}: files of types that are not read are left out: {kinds}")
        if self.loose:
            lines.append(
                f"{folder}: images beside the class folders have no class and are left out ({self.loose} found)"
            )
        if self.linked:
            lines.append(
                f"{folder}: links to folders that are already included are left out: {join_names(self.linked, 3)}"
            )
        return lines


class Scan:
    """One pass over all files of a split."""

    def __init__(self, folder: Path, classes: list[os.DirEntry]):
        self.bad: dict[str, str] = {}  # paths that are named like images and are not files, with the reason
        self.left_out = LeftOut()
        self.met = dict.fromkeys(_ancestors(folder), "")  # the class of each folder's images
        for child in classes:
            owner = self.met.setdefault(_identity(child.path), class_name_of(child))
            if owner != class_name_of(child):
                raise _two_classes(child.path, owner)

    def images(self, folder: str, class_name: str) -> list[str]:
        """The paths of the images below a folder, in the order of their names."""
        found = []
        for entry in sorted(os.scandir(folder), key=attrgetter("name")):
            is_image = _looks_like_image(entry.name)
            if is_image and _is_file(entry):  # tested first: there may be millions
                found.append(entry.path)
            elif is_folder(entry):
                if self._is_new(entry, class_name):
                    found += self.images(entry.path, class_name)
            elif is_image:
                found.append(entry.path)
                self.bad[entry.path] = _kind(entry)
            else:
                self._leave_out(entry.name)
        return found

    def look_beside(self, folder: Path) -> None:
        """Count what lies beside the class folders."""
        for entry in os.scandir(folder):
            if is_folder(entry):
                if _is_hidden(entry.name):
                    self.left_out.hidden_folders[entry.name] += 1
            elif _looks_like_image(entry.name):
                self.left_out.loose += 1
            else:
                self._leave_out(entry.name)

    def _is_new(self, entry: os.DirEntry, class_name: str) -> bool:
        """Whether to enter a folder; False for hidden folders and links to folders that are already included."""
        if _is_hidden(entry.name):
            self.left_out.hidden_folders[entry.name] += 1
            return False
        key = _identity(entry.path)
        if key not in self.met:
            self.met[key] = class_name
            return True
        if self.met[key] not in (class_name, ""):
            raise _two_classes(entry.path, self.met[key])
        self.left_out.linked.append(entry.path)
        return False

    def _leave_out(self, name: str) -> None:
        if _is_hidden(name):
            self.left_out.hidden_files += 1
        else:
            self.left_out.not_images[os.path.splitext(name)[1].lower()] += 1


def _two_classes(path: str, owner: str) -> ValueError:
    owner = join_names([owner])
    return ValueError(f"{path}: is also a folder of class {owner}, but an image has only one class; remove the link")


def folders_in(folder: Path, above: set | None = None) -> list[os.DirEntry]:
    """The folders in a folder, by name, without hidden ones and links to its parents; `above` has the parents."""
    above = above or _ancestors(folder)
    found = [entry for entry in os.scandir(folder) if is_folder(entry) and not _is_hidden(entry.name)]
    found = [entry for entry in found if not (entry.is_symlink() and _identity(entry.path) in above)]
    return sorted(found, key=lambda entry: entry.name)


def class_folders(folder: Path) -> tuple[list[os.DirEntry], list[os.DirEntry]]:
    """The folders in a split's folder that hold images, and those that do not."""
    full, empty, above = [], [], _ancestors(folder)
    for child in folders_in(folder, above):
        (full if holds_image(child.path, above | {_identity(child.path)}) else empty).append(child)
    return full, empty


def holds_image(folder: str | Path, met: set | None = None) -> bool:
    """Whether a folder or a folder below it has a file named like an image; stops at the first one."""
    met = met or _ancestors(Path(folder))
    below = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if is_folder(entry):
                below += [] if _is_hidden(entry.name) else [entry]
            elif _looks_like_image(entry.name):
                return True
    for entry in below:
        if entry.is_symlink():  # only links can form circles
            if _identity(entry.path) in met:
                continue
            met.add(_identity(entry.path))
        if holds_image(entry.path, met):
            return True
    return False


def loose_images(folder: Path) -> int:
    """The number of images directly in a folder."""
    return sum(_looks_like_image(entry.name) and not is_folder(entry) for entry in os.scandir(folder))


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name.lower() in _JUNK


def _looks_like_image(name: str) -> bool:
    return name.lower().endswith(IMG_EXTENSIONS) and name[0] != "."


def is_folder(entry: os.DirEntry) -> bool:
    """Whether an entry is a folder or a link to one."""
    try:
        return entry.is_dir()
    except OSError:  # a link that leads to itself
        return False


def _is_file(entry: os.DirEntry) -> bool:
    """Whether an entry is a regular file or a link to one."""
    try:
        return entry.is_file()
    except OSError:  # a link that leads to itself
        return False


def _kind(entry: os.DirEntry) -> str:
    """The kind of an entry that is neither a file nor a folder."""
    try:
        return _SPECIAL.get(stat.S_IFMT(entry.stat().st_mode), "a special file")
    except OSError as error:
        return "a broken link" if entry.is_symlink() else str(error.strerror)


def _identity(path: str | Path) -> tuple[int, int]:
    """The device and inode of a folder, the same through any link."""
    found = os.stat(path)
    return found.st_dev, found.st_ino


def _ancestors(folder: Path) -> set[tuple[int, int]]:
    """The identities of a folder and all its parents."""
    resolved = folder.resolve()
    return {_identity(path) for path in (resolved, *resolved.parents)}


def class_name_of(entry: os.DirEntry) -> str:
    """A class folder's name, the same under every locale; bytes that are not UTF-8 become lone surrogates."""
    return os.fsencode(entry.name).decode("utf-8", "surrogateescape")
