"""Image folders, CLASS/IMAGE.jpg or SPLIT/CLASS/IMAGE.jpg: which folders are splits and which are
classes.

Folders with images are splits if one has the name of a split, and folders next to them are then
left out. A single `train` or `test` without class folders, next to two other folders such as `car`
and `bus`, is a class. A folder that --train_split or --eval_split names is always a split.
"""

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from utils.config import require
from utils.console import join_names
from utils.data.labels import distinct, indices_in, lacks_class, split_that_defines_classes
from utils.data.listing import (
    ENDINGS,
    Folder,
    Scan,
    files_below,
    folders_in,
    is_folder,
    visible_in,
    with_images,
    with_parents,
)
from utils.data.parquet_files import has_tables
from utils.data.splits import EVAL_NAMES, Files, Source, Split, fingerprint_of, whole_split
from utils.errors import UserError
from utils.settings.data import DataSettings

_WORDS = {  # docs/data.md lists them
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "eval", "evaluation", "dev"),
    "test": ("test", "testing"),
}


def image_folder(
    path: Folder, config: DataSettings, files: Callable[[list[str], str], Files] = Files
) -> Source:
    """The splits of an image folder. Raises ValueError if it holds no images.

    `files` makes the images of a split from their names below a folder, and the folder.
    """
    base, folders, aliases, lines = _find_splits(path, config)
    wanted = config.train_split and aliases.get(config.train_split, config.train_split)
    class_names = distinct(with_images(folders[split_that_defines_classes(folders, wanted)]))
    openers = {
        name: partial(_folder_split, name, folder, base, class_names, files)
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
    folder: Folder, config: DataSettings
) -> tuple[str, dict[str, Folder], dict[str, str], tuple[str, ...]]:
    """The folder that holds the splits, their folders by name, other names for the splits, and
    lines to print.

    If there are none, `folder` itself is the split train.
    """
    path = os.fspath(folder)
    if config.train_split == ".":
        return path, {"train": folder}, {".": "train"}, ()
    flags = config.train_split, config.eval_split
    children = with_images(folder)
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
        if len(folders) > 1 or any(len(with_images(each)) > 1 for each in folders.values()):
            line = f"{path}: using {name}, the only folder in it with images"
            return base, folders, names, (line, *lines)
    return path, {"train": folder}, {}, ()


def _folder_split(
    name: str,
    folder: Folder,
    base: str,
    class_names: list[str],
    files: Callable[[list[str], str], Files],
) -> Split:
    path = os.fspath(folder)
    scan = Scan()
    children = folders_in(folder)
    real = {os.path.realpath(child.path) for child in children}
    problem = "links give a class two names; the folders themselves are"
    known = join_names(sorted(real))
    require(len(real) == len(children), f"{path}: {problem} {known}", "remove the link")
    images = {  # links to other classes are not followed
        child.name: scan.images(files_below(child, with_parents(child) | real))
        for child in children
    }
    found = [class_name for class_name, own in images.items() if own]
    numbers = indices_in(class_names, found)
    if (numbers < 0).any():
        unknown = found[int(numbers.argmin())]
        problem = lacks_class(unknown, class_names, name, found)
        raise UserError(f"{os.path.join(path, unknown)}: {problem}", "rename or move the folder")
    empty = [class_name for class_name, own in images.items() if not own]
    loose = len(scan.images(entry for entry in visible_in(folder) if not is_folder(entry)))
    if not found:
        raise _no_images(folder, loose, scan)
    paths = [each for own in images.values() for each in own]
    labels = np.repeat(numbers, [len(images[class_name]) for class_name in found])
    deeper = {os.path.dirname(each) for each in paths} - {child.path for child in children}
    left_out = {
        "class folders without readable images are left out": join_names(empty),
        "files of unsupported types are left out": scan.kinds(),
        "images next to the class folders have no class and are left out": loose,
        "folders inside class folders that hold images, but are not classes": len(deeper),
    }
    start = len(os.path.join(base, ""))
    own_files = files([each[start:] for each in paths], base)
    split = whole_split(name, own_files, labels, fingerprint_of(os.path.realpath(path)))
    return replace(split, notes=left_out_notes(path, left_out))


def _no_images(folder: Folder, loose: int, scan: Scan) -> UserError:
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
    return UserError(f"{os.fspath(folder)}: {problem}", fix)


def left_out_notes(folder: str | Path, left_out: dict[str, object]) -> tuple[str, ...]:
    """Lines to print about what a user may have meant as samples."""
    return tuple(f"{folder}: {line}: {found}" for line, found in left_out.items() if found)
