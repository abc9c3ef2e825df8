"""Image folders, CLASS/IMAGE.jpg or SPLIT/CLASS/IMAGE.jpg: which folders are splits and which are
classes.

The name alone is not enough. A folder `train` next to `car` and `bus` is a class if it holds images
directly. It is a split if no folder next to it holds images, or if it has classes in common with
another split. Any other case is an error that names the flag to set. A folder that --train_split or
--eval_split names is always a split.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from utils.config.settings import TrainConfig
from utils.console import join_names
from utils.data.scan import (
    ENDINGS,
    Scan,
    class_name_of,
    class_names_in,
    folders_in,
    holds_image,
    loose_images,
)
from utils.data.splits import (
    EVAL_NAMES,
    Files,
    Source,
    Split,
    distinct,
    fingerprint_of,
    indices_in,
    lacks_class,
    note_forms,
    split_that_defines_classes,
    whole_split,
)
from utils.data.table_files import has_tables
from utils.errors import UserError

_WORDS = {  # docs/data.md lists them
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "eval", "evaluation", "dev"),
    "test": ("test", "testing"),
}


@dataclass(frozen=True)
class _Layout:
    """The folders of the splits by name, other names for the splits, and lines to print about the
    choice.
    """

    folders: dict[str, Path]
    aliases: dict[str, str]
    notes: tuple[str, ...] = ()


def image_folder(path: Path, config: TrainConfig) -> Source:
    """The splits of an image folder. Raises ValueError if it holds no images or is ambiguous."""
    if not path.is_dir():
        raise UserError(
            f"{path}: is neither a folder nor a regular file", "give a folder of images or tables"
        )
    layout = _layout(path, config)
    wanted = config.train_split and layout.aliases.get(config.train_split, config.train_split)
    class_names = distinct(
        class_names_in(layout.folders[split_that_defines_classes(layout.folders, wanted)])
    )

    openers = {
        name: partial(_folder_split, name, folder, class_names)
        for name, folder in layout.folders.items()
    }
    return Source(openers, class_names, layout.aliases, layout.notes)


def split_word(name: str) -> str | None:
    """The kind of split that a folder name stands for: train (as `Training` and `train_set`),
    validation or test.
    """
    found = re.fullmatch(r"([a-z]+?)[ _-]?(set|data|dataset|split|images)?", name.lower())
    return next((split for split, words in _WORDS.items() if found and found[1] in words), None)


def _layout(path: Path, config: TrainConfig) -> _Layout:
    """Decide which folders in `path` are splits.

    If there are none, `path` itself is the split train.
    """
    if config.train_split == ".":  # as the errors below suggest
        return _Layout({"train": path}, {".": "train"})
    children = {child.name: Path(child.path) for child in folders_in(path)}
    splits = [name for name in children if split_word(name)]
    train, evaluation = (
        _asked_for(path, children, name) for name in (config.train_split, config.eval_split)
    )
    if train or evaluation:
        used = list(dict.fromkeys(name for name in (*splits, train, evaluation) if name))
        if not train and not any(split_word(name) == "train" for name in used):
            raise UserError(
                f"--eval_split {config.eval_split}: there is no train folder next to it, only {join_names(children)}",
                "name the folder to train on with --train_split",
            )
        return _split_layout(path, used, config)
    others = [name for name in children if name not in splits and holds_image(children[name])]
    if splits and not others:
        return _split_layout(path, splits, config)
    classes_in = {name: class_names_in(_inner(children[name])) for name in splits}
    with_classes = {name: classes for name, classes in classes_in.items() if classes}
    if with_classes:
        in_train = {
            text
            for name in with_classes
            if split_word(name) == "train"
            for text in with_classes[name]
        }
        in_others = {
            text
            for name in with_classes
            if split_word(name) != "train"
            for text in with_classes[name]
        }
        if not in_train & in_others:
            raise _ambiguous(path, with_classes, others)
        layout = _split_layout(path, splits, config)
        known = join_names((word for words in _WORDS.values() for word in words), 99)
        note = f"{path}: folders next to the splits are not used: {join_names(others)} (split names are {known})"
        return replace(layout, notes=(*layout.notes, note))
    images_in = [name for name in splits if holds_image(children[name])]
    if len(images_in) > 1 or (images_in and len(others) < 2):
        raise _ambiguous(path, {name: [] for name in images_in}, others)
    return _inner_layout(path, children, others, config) or _class_layout(path, children, others)


def _split_layout(path: Path, folders: list[str], config: TrainConfig) -> _Layout:
    """Name each split.

    Usual names are kept; other names become train, validation or test if that name is free.
    """
    usual = [name for name in folders if name in ("train", *EVAL_NAMES)]
    folder_of = {name: name for name in usual}
    aliases: dict[str, str] = {}
    for name in usual:
        aliases.setdefault(split_word(name) or name, name)
    for name in folders:
        word = split_word(name)
        if name not in folder_of.values():
            folder_of[word if word and word not in aliases else name] = name
            if word:
                aliases.setdefault(word, word)
    aliases |= {folder: name for name, folder in folder_of.items()}
    groups = {word: [name for name in folders if split_word(name) == word] for word in _WORDS}
    if len(groups["train"]) > 1 and not config.train_split:
        raise UserError(
            f"{path}: each of {join_names(groups['train'])} may be the training split",
            f"choose with --train_split, or give the folder itself, --data {path / groups['train'][0]}",
        )
    notes = []
    if len(groups["validation"]) > 1 and config.eval_split is None and config.eval_fraction is None:
        used = next(name for name in EVAL_NAMES if name in folder_of)
        found = join_names(groups["validation"])
        notes = [
            f"{path}: {folder_of[used]} is the evaluation split (found: {found}); --eval_split selects another"
        ]
    return _Layout(
        {name: _inner(path / folder) for name, folder in folder_of.items()},
        {alias: name for alias, name in aliases.items() if alias not in folder_of},
        tuple(notes),
    )


def _class_layout(path: Path, children: dict[str, Path], others: list[str]) -> _Layout:
    """Use the folders as classes.

    Raises ValueError if some are named like splits and all hold the same classes.
    """
    words = {word for words in _WORDS.values() for word in words}
    if len(others) > 1 and any(words & set(re.split("[^a-z]+", name.lower())) for name in others):
        classes_in = [class_names_in(children[name]) for name in others]
        if len(classes_in[0]) > 1 and all(classes == classes_in[0] for classes in classes_in):
            raise UserError(
                f"{path}: {join_names(others)} may be splits or classes, as each holds {join_names(classes_in[0])}",
                "name the splits with --train_split and --eval_split, or use all as classes with --train_split .",
            )
    for name in others:
        inner = [child.name for child in folders_in(children[name]) if class_names_in(Path(child))]
        splits = [text for text in inner if split_word(text)]
        if {"train"} < {split_word(text) for text in splits}:
            problem = f"{path}: {name} is not a class, as it holds the splits {join_names(splits)}"
            raise UserError(
                problem, f"give --data {path / name}, or use it as a class with --train_split ."
            )
    return _Layout({"train": path}, {})


def _inner_layout(
    path: Path, children: dict[str, Path], others: list[str], config: TrainConfig
) -> _Layout | None:
    """The layout of the only folder with images in `path`, as in many archives, if it holds splits
    or classes.
    """
    if len(others) != 1 or loose_images(path) or loose_images(children[others[0]]):
        return None
    found = _layout(children[others[0]], config)
    folder = found.folders[split_that_defines_classes(found.folders, None)]
    if len(found.folders) < 2 and len(class_names_in(folder)) < 2:
        return None
    return replace(
        found, notes=(f"{path}: using {others[0]}, the only folder in it with images", *found.notes)
    )


def _asked_for(path: Path, children: dict[str, Path], wanted: str | None) -> str | None:
    """The folder that a flag names, by its own name or by train, validation or test."""
    if wanted is None or wanted in children:
        return wanted
    found = next((name for name in children if split_word(name) == wanted), None)
    return found or (wanted if (path / wanted).is_dir() else None)


def _ambiguous(path: Path, classes_in: Mapping[str, list[str]], others: list[str]) -> UserError:
    seen = [
        f"{n} (with the folders {join_names(inner, 4)})" if inner else n
        for n, inner in classes_in.items()
    ]
    return UserError(
        f"{path}: cannot tell splits from classes: {' and '.join(seen)} next to {join_names(others)}",
        f"give --train_split {next(iter(classes_in))} to train on one of them "
        "(and --eval_split to evaluate on another), or --train_split . to use all folders as classes",
    )


def _inner(folder: Path) -> Path:
    """The folder, or its only subfolder if that stands for the same split, as in
    training_set/training_set/cat.
    """
    word = split_word(folder.name)
    same = [
        Path(child.path) for child in folders_in(folder) if word and split_word(child.name) == word
    ]
    if (
        not same
        or len(class_names_in(folder)) != 1
        or loose_images(folder)
        or loose_images(same[0])
    ):
        return folder
    return same[0]


def _folder_split(name: str, folder: Path, class_names: list[str]) -> Split:
    children = folders_in(folder)
    scan = Scan(folder, children)
    paths: list[str] = []
    labels: list[int] = []
    names = [class_name_of(child) for child in children]
    for child, class_name, number in zip(
        children, names, indices_in(class_names, names), strict=True
    ):
        files = scan.images(child.path, class_name)
        if not files:
            scan.empty_classes.append(class_name)
            continue
        if number < 0:
            problem = lacks_class(class_name, class_names, name, names)
            raise UserError(f"{child.path}: {problem}", "rename or move the folder")
        paths += files
        labels += [number] * len(files)
    if not paths:
        raise _no_images(scan)
    scan.count_beside_classes()
    split = whole_split(
        name, Files(paths, str(folder), scan), labels, fingerprint_of(folder.resolve())
    )
    used = set(names) - set(scan.empty_classes)
    return replace(split, notes=(*note_forms(class_names, used), *scan.notes()))


def _no_images(scan: Scan) -> UserError:
    folder = scan.folder
    tables = [child for child in sorted(folder.iterdir()) if child.is_dir() and has_tables(child)]
    if tables:
        return UserError(
            f"{folder}: no images in it", f"for the tables below it, give {join_names(tables)}"
        )
    loose = loose_images(folder)
    if loose:
        return UserError(
            f"{folder}: has images but no class folders ({loose} found)",
            "move each image to CLASS/IMAGE.jpg "
            "(if this split has no labels, choose another --eval_split or give --eval_fraction 0.1)",
        )
    if scan.not_images:
        problem = f"{folder}: no images of a supported type, only {scan.kinds()}"
        return UserError(problem, f"convert them to one of {join_names(ENDINGS)}")
    return UserError(f"{folder}: no images in it", "an image folder holds CLASS/IMAGE.jpg")
