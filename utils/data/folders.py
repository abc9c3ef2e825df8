"""Image folders, CLASS/IMAGE.jpg or SPLIT/CLASS/IMAGE.jpg: which folders are splits and which are
classes.

Folders with images are splits if one has the name of a split, and folders next to them are then
left out. A single `train` or `test` without class folders, next to two other folders such as `car`
and `bus`, is a class. A folder that --train_split or --eval_split names is always a split.
"""

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path

import numpy as np
from torchvision.datasets.folder import IMG_EXTENSIONS

from utils.config import require
from utils.console import join_names
from utils.data.labels import distinct, indices_in, lacks_class, split_that_defines_classes
from utils.data.parquet_files import has_tables
from utils.data.splits import EVAL_NAMES, Files, Source, Split, fingerprint_of, whole_split
from utils.errors import UserError
from utils.settings.data import DataSettings

_WORDS = {  # docs/data.md lists them
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "eval", "evaluation", "dev"),
    "test": ("test", "testing"),
}


ENDINGS = (*IMG_EXTENSIONS, ".jfif", ".jpe", ".heic", ".heif", ".avif")
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


class Scan(Counter):
    """Selects the images among files, and counts the other files by their endings."""

    def images(self, files: Iterable[os.DirEntry]) -> list[str]:
        """The paths of the images among the files."""
        found = []
        for file in files:
            if _is_image(file):
                found.append(file.path)
            else:
                self[_ending(file) or "no extension"] += 1
        return found

    def kinds(self) -> str:
        """The endings of the other files, and how many files each has."""
        return join_names((f"{kind} ({count})" for kind, count in self.most_common()), 6)


def image_folder(path: Path, config: DataSettings) -> Source:
    """The splits of an image folder. Raises ValueError if it holds no images."""
    base, folders, aliases, lines = _find_splits(path, config)
    wanted = config.train_split and aliases.get(config.train_split, config.train_split)
    class_names = distinct(with_images(folders[split_that_defines_classes(folders, wanted)]))
    openers = {
        name: partial(_folder_split, name, folder, base, class_names)
        for name, folder in folders.items()
    }
    return Source(openers, class_names, aliases, lines)


def split_word(name: str) -> str | None:
    """The kind of split that a name stands for: train (such as `Training`, `train_set`), validation
    or test.
    """
    found = re.fullmatch(r"([a-z]+?)[ _-]?(set|data|dataset|split|images)?", name.lower())
    return next((split for split, words in _WORDS.items() if found and found[1] in words), None)


def name_splits(where: str | Path, written: Iterable[str]) -> dict[str, str]:
    """The names of splits by the names that are `written` in a folder or file, and by train,
    validation and test.

    Usual names stay; others become train, validation or test, or stay if they are none of these.
    """
    names = {}
    words: dict[str, str] = {}
    for text in written:
        word = split_word(text)
        lower = text.lower()
        if word and words.setdefault(word, text) != text:
            raise UserError(
                f"{where}: the splits {words[word]} and {text} may be the same",
                "use one name for both, or rename one of them, for example to extra",
            )
        names[text] = word or text
        if lower in ("train", *EVAL_NAMES):
            names[text] = lower
    return {word: names[text] for word, text in words.items()} | names


def _find_splits(
    path: Path, config: DataSettings
) -> tuple[Path, dict[str, Path], dict[str, str], tuple[str, ...]]:
    """The folder that holds the splits, their folders by name, other names for the splits, and
    lines to print.

    If there are none, `path` itself is the split train.
    """
    if config.train_split == ".":
        return path, {"train": path}, {".": "train"}, ()
    flags = config.train_split, config.eval_split
    children = with_images(path)
    splits = [name for name in children if split_word(name) or name in flags]
    others = [name for name in children if name not in splits]
    is_class = len(splits) == 1 and len(others) > 1 and not with_images(children[splits[0]])
    if splits and (splits[0] in flags or not is_class):
        names = name_splits(path, splits)
        known = join_names((word for words in _WORDS.values() for word in words), 99)
        line = f"folders next to the splits are not used (split names are {known})"
        folders = {names[name]: children[name] for name in splits}
        return path, folders, names, left_out_notes(path, {line: join_names(others)})
    if len(children) == 1:
        ((name, only),) = children.items()
        base, folders, names, lines = _find_splits(only, config)
        if len(folders) > 1 or any(len(with_images(folder)) > 1 for folder in folders.values()):
            line = f"{path}: using {name}, the only folder in it with images"
            return base, folders, names, (line, *lines)
    return path, {"train": path}, {}, ()


def _folder_split(name: str, folder: Path, base: Path, class_names: list[str]) -> Split:
    scan = Scan()
    children = folders_in(folder)
    real = {os.path.realpath(child.path) for child in children}
    problem = "links give a class two names; the folders themselves are"
    known = join_names(sorted(real))
    require(len(real) == len(children), f"{folder}: {problem} {known}", "remove the link")
    images = {  # links to other classes are not followed
        child.name: scan.images(files_below(child.path, _with_parents(child.path) | real))
        for child in children
    }
    found = [class_name for class_name, paths in images.items() if paths]
    numbers = indices_in(class_names, found)
    if (numbers < 0).any():
        unknown = found[int(numbers.argmin())]
        problem = lacks_class(unknown, class_names, name, found)
        raise UserError(f"{folder / unknown}: {problem}", "rename or move the folder")
    empty = [class_name for class_name, paths in images.items() if not paths]
    loose = len(scan.images(entry for entry in _visible(folder) if not is_folder(entry)))
    if not found:
        raise _no_images(folder, loose, scan)
    paths = [path for paths in images.values() for path in paths]
    labels = np.repeat(numbers, [len(images[class_name]) for class_name in found])
    deeper = {os.path.dirname(path) for path in paths} - {child.path for child in children}
    left_out = {
        "class folders without readable images are left out": join_names(empty),
        "files of unsupported types are left out": scan.kinds(),
        "images next to the class folders have no class and are left out": loose,
        "folders inside class folders that hold images, but are not classes": len(deeper),
    }
    fingerprint = fingerprint_of(folder.resolve())
    root = str(base)
    names = [os.path.relpath(path, root) for path in paths]
    split = whole_split(name, Files(names, root), labels, fingerprint)
    return replace(split, notes=left_out_notes(folder, left_out))


def _no_images(folder: Path, loose: int, scan: Scan) -> UserError:
    tables = [child.path for child in folders_in(folder) if has_tables(Path(child))]
    if tables:
        problem = "no images in it"
        fix = f"for the tables below it, give {join_names(tables)}"
    elif loose:
        problem = f"has images but no class folders ({loose} found)"
        unlabelled = "set another --eval_split, or --eval_fraction 0.1; eval.py: another --split"
        fix = f"move each image to CLASS/IMAGE.jpg (if it has no labels, {unlabelled})"
    elif scan:
        problem = f"no images of a supported type, only {scan.kinds()}"
        fix = f"convert them to one of {join_names(ENDINGS)}"
    else:
        problem = "no images in it"
        fix = "an image folder holds CLASS/IMAGE.jpg"
    return UserError(f"{folder}: {problem}", fix)


def left_out_notes(folder: str | Path, left_out: dict[str, object]) -> tuple[str, ...]:
    """Lines to print about what a user may have meant as samples."""
    return tuple(f"{folder}: {line}: {found}" for line, found in left_out.items() if found)


def folders_in(folder: str | Path) -> list[os.DirEntry]:
    """The folders in a folder, by name, without hidden ones and links to folders above it."""
    parents = _with_parents(folder)
    found = [entry for entry in _visible(folder) if is_folder(entry)]
    return [e for e in found if not e.is_symlink() or os.path.realpath(e.path) not in parents]


def _with_parents(folder: str | os.PathLike) -> set[str]:
    """The folder and all folders above it, without links."""
    real = Path(os.path.realpath(folder))
    return {str(path) for path in (real, *real.parents)}


def files_below(folder: str | Path, entered: set[str] | None = None) -> Iterator[os.DirEntry]:
    """The files in and below a folder, by name, without hidden ones.

    Links to folders are followed, but no folder is entered twice, and none of `entered` or, by
    default, above the folder: links can form circles.
    """
    entered = _with_parents(folder) if entered is None else entered
    for entry in _visible(folder):
        if not is_folder(entry):
            yield entry
        elif (inner := os.path.realpath(entry.path)) not in entered:
            entered.add(inner)
            yield from files_below(entry.path, entered)


def with_images(folder: Path) -> dict[str, Path]:
    """The folders in a folder that hold images, directly or below, by name."""
    children = {child.name: Path(child) for child in folders_in(folder)}
    return {name: path for name, path in children.items() if any(map(_is_image, files_below(path)))}


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
    return _ending(file) in ENDINGS
