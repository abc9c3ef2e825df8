"""Image folders, CLASS/IMAGE.jpg or SPLIT/CLASS/IMAGE.jpg: which folder is a split, which a class, which file an image.

No class is told from a split by its name alone. `train` beside `car` and `bus` is a class if it holds images, and a
split if class folders in it agree with those of another split. Whatever else it may be is refused, with the flag that
decides; a folder that --train_split or --eval_split names is always a split.
"""

import os
import re
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from torchvision.datasets.folder import IMG_EXTENSIONS

from utils.config import TrainConfig
from utils.data.splits import EVAL_NAMES, Files, Source, Split, fingerprint_of, likely_train, listed, whole_split
from utils.data.tables import has_tables

# What systems and tools put between images, besides names that begin with a dot.
_JUNK = ("__macosx", "@eadir", "#recycle", "$recycle.bin", "lost+found", "system volume information", "__pycache__")
_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "eval", "evaluation", "dev"),
    "test": ("test", "testing"),
}
_SPECIAL = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


@dataclass
class LeftOut:
    """What lies in a split's folder and is not among its samples."""

    hidden_folders: Counter = field(default_factory=Counter)  # by name, such as .ipynb_checkpoints
    hidden_files: int = 0
    not_images: Counter = field(default_factory=Counter)  # files by the end of their names, such as .heic
    empty_classes: list[str] = field(default_factory=list)
    loose: int = 0  # images beside the class folders, which have no class
    linked: list[str] = field(default_factory=list)  # links to folders that are counted already

    def notes(self, folder: Path) -> list[str]:
        """One line for each thing that a user may have meant as samples."""
        lines = []
        if self.empty_classes:
            lines.append(f"{folder}: class folders without images are left out: {listed(self.empty_classes)}")
        if self.loose:
            lines.append(f"{folder}: {self.loose} images beside the class folders have no class and are left out")
        if self.linked:
            lines.append(f"{folder}: links to folders that are counted already are left out: {listed(self.linked, 3)}")
        return lines


@dataclass(frozen=True)
class _Layout:
    """The folders of the splits by name, other spellings of these names, and what to say about the choice."""

    folders: dict[str, Path]
    aliases: dict[str, str]
    notes: tuple[str, ...] = ()


def image_folder(path: Path, config: TrainConfig) -> Source:
    """The splits of an image folder; ValueError when it holds no images or can be understood in two ways."""
    if not path.is_dir():
        raise ValueError(f"{path}: is neither a folder nor a regular file; give a folder of images or of tables")
    layout = _layout(path, config)
    wanted = layout.aliases.get(config.train_split, config.train_split)
    train = layout.folders[likely_train(layout.folders, wanted)]
    class_names = [_class_name(child) for child in _class_folders(train)[0]]

    def make(name: str) -> Split:
        split = _folder_split(name, layout.folders[name], class_names)
        refuse_bad(split.images)
        return replace(split, notes=(*layout.notes, *split.notes))

    return Source({name: (lambda name=name: make(name)) for name in layout.folders}, class_names, layout.aliases)


def refuse_bad(images: Files) -> None:
    """Raise ValueError when something that is named like an image cannot be read as a file."""
    if images.bad:
        first = [f"{path} ({reason})" for path, reason in images.bad.items()]
        raise ValueError(f"{len(first)} images are not regular files: {listed(first, 3)}; remove or replace them")


def split_word(name: str) -> str | None:
    """The split that a folder's name means, train, validation or test: `Training` and `train_set` are train."""
    found = re.fullmatch(r"([a-z]+?)[ _-]?(set|data|dataset|split|images)?", name.lower())
    return next((split for split, words in _WORDS.items() if found and found[1] in words), None)


def _layout(path: Path, config: TrainConfig) -> _Layout:
    """Decide which folders in `path` are splits; a folder without splits is the split train."""
    if config.train_split == ".":  # as an error below advises
        return _Layout({"train": path}, {".": "train"})
    children = {child.name: Path(child.path) for child in _folders(path)}
    splits = [name for name in children if split_word(name)]
    train, evaluation = (_named(path, children, name) for name in (config.train_split, config.eval_split))
    if train or evaluation:
        used = list(dict.fromkeys(name for name in (*splits, train, evaluation) if name))
        if not train and not any(split_word(name) == "train" for name in used):
            raise ValueError(
                f"--eval_split {config.eval_split}: there is no train folder beside it, only {listed(children)}; "
                "name the folder to train on with --train_split"
            )
        return _split_layout(path, used, config)
    others = [name for name in children if name not in splits and _holds_image(children[name])]
    if splits and not others:
        return _split_layout(path, splits, config)
    classes_in = {name: [_class_name(child) for child in _class_folders(_inner(children[name]))[0]] for name in splits}
    with_classes = {name: classes for name, classes in classes_in.items() if classes}
    if with_classes:
        if not _agree(with_classes):
            raise _ambiguous(path, with_classes, others)
        layout = _split_layout(path, splits, config)
        return replace(layout, notes=(*layout.notes, f"{path}: not used beside the splits: {listed(others)}"))
    images_in = [name for name in splits if _holds_image(children[name])]
    if len(images_in) > 1 or (images_in and len(others) < 2):
        raise _ambiguous(path, dict.fromkeys(images_in, ()), others)
    return _wrapped(path, children, others, config) or _class_layout(path, children, others)


def _split_layout(path: Path, folders: list[str], config: TrainConfig) -> _Layout:
    """Name each split: usual names stay as they are, others are called train, validation or test if that is free."""
    usual = [name for name in folders if name in ("train", *EVAL_NAMES)]
    named, aliases = {name: name for name in usual}, {}
    for name in usual:
        aliases.setdefault(split_word(name), name)
    for name in folders:
        word = split_word(name)
        if name not in named.values():
            named[word if word and word not in aliases else name] = name
            aliases.setdefault(word, word)
    aliases |= {folder: name for name, folder in named.items()}
    groups = {word: [name for name in folders if split_word(name) == word] for word in _WORDS}
    if len(groups["train"]) > 1 and not config.train_split:
        raise ValueError(
            f"{path}: {listed(groups['train'])} may each be the training split; choose with --train_split, "
            f"or give the folder itself, --data {path / groups['train'][0]}"
        )
    notes = []
    if len(groups["validation"]) > 1 and config.eval_split is None and config.eval_fraction is None:
        used = next(name for name in EVAL_NAMES if name in named)
        notes = [f"{path}: of {listed(groups['validation'])}, {named[used]} is used; --eval_split chooses another"]
    aliases = {alias: name for alias, name in aliases.items() if alias and alias not in named}
    return _Layout({name: _inner(path / folder) for name, folder in named.items()}, aliases, tuple(notes))


def _class_layout(path: Path, children: dict[str, Path], others: list[str]) -> _Layout:
    """The folders are classes, unless some are named like parts of a data set and all hold the same classes."""
    words = {word for words in _WORDS.values() for word in words}
    if len(others) > 1 and any(words & set(re.split("[^a-z]+", name.lower())) for name in others):
        inner = {name: [_class_name(child) for child in _class_folders(children[name])[0]] for name in others}
        first = next(iter(inner.values()))
        if len(first) > 1 and all(classes == first for classes in inner.values()):
            raise ValueError(
                f"{path}: {listed(others)} may be splits or classes, as each holds {listed(first)}; "
                "name the splits with --train_split and --eval_split, or take all as classes with --train_split ."
            )
    return _Layout({"train": path}, {})


def _wrapped(path: Path, children: dict[str, Path], others: list[str], config: TrainConfig) -> _Layout | None:
    """What the only folder with images in `path` holds, where that is splits or classes: archives are packed so."""
    if len(others) != 1 or _loose(path) or _loose(children[others[0]]):
        return None
    found = _layout(children[others[0]], config)
    folder = found.folders[likely_train(found.folders, None)]
    if len(found.folders) < 2 and len(_class_folders(folder)[0]) < 2:
        return None
    return replace(found, notes=(f"{path}: holds one folder with images, {others[0]}; that is used", *found.notes))


def _named(path: Path, children: dict[str, Path], wanted: str | None) -> str | None:
    """The folder that a flag names, by its own name or as train, validation or test."""
    if wanted is None or (path / wanted).is_dir():
        return wanted
    return next((name for name in children if split_word(name) == wanted), None)


def _agree(classes_in: dict[str, list[str]]) -> bool:
    """Whether a training split and another one have a class in common."""
    train, rest = set(), set()
    for name, classes in classes_in.items():
        (train if split_word(name) == "train" else rest).update(classes)
    return bool(train & rest)


def _ambiguous(path: Path, splits: dict, others: list[str]) -> ValueError:
    seen = [f"{name} (with the folders {listed(inner, 4)})" if inner else name for name, inner in splits.items()]
    return ValueError(
        f"{path}: {' and '.join(seen)} may be a split or a class beside {listed(others)}; to train on that folder give "
        f"--train_split {next(iter(splits))}, to take all of them as classes --train_split ."
    )


def _inner(folder: Path) -> Path:
    """The folder, or the one of the same meaning that is all it holds, as in training_set/training_set/cat."""
    word = split_word(folder.name)
    same = [child for child in _folders(folder) if word and split_word(child.name) == word]
    if not same or len(_class_folders(folder)[0]) != 1 or _loose(folder) or _loose(Path(same[0].path)):
        return folder
    return Path(same[0].path)


def _folder_split(name: str, folder: Path, class_names: list[str]) -> Split:
    number = {class_name: index for index, class_name in enumerate(class_names)}
    children, empty = _class_folders(folder)
    if not children:
        raise _no_images(folder)
    scan, paths, labels = _Scan(folder, children), [], []
    for child in children:
        class_name = _class_name(child)
        if class_name not in number:
            raise ValueError(
                f"{child.path}: the training split has no class of this name; its classes are {listed(class_names)}"
            )
        files = list(scan.images(child.path, class_name))
        paths += files
        labels += [number[class_name]] * len(files)
    scan.look_beside(folder, empty)
    images = Files(paths)
    images.bad, images.left_out = scan.bad, scan.left_out
    split = whole_split(name, images, labels, fingerprint_of(folder.resolve()))
    return replace(split, notes=tuple(scan.left_out.notes(folder)))


class _Scan:
    """One look at all files of a split."""

    def __init__(self, folder: Path, class_folders: list[os.DirEntry]):
        self.bad: dict[str, str] = {}  # path to reason
        self.left_out = LeftOut()
        self.met = dict.fromkeys(_ancestors(folder), "")  # the class that each folder's images have
        for child in class_folders:
            owner = self.met.setdefault(_identity(child.path), _class_name(child))
            if owner != _class_name(child):
                raise _two_classes(child.path, owner)

    def images(self, folder: str, class_name: str) -> Iterator[str]:
        """The paths of the images below a folder, in the order of their names."""
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            if _is_folder(entry):
                if self._is_new(entry, class_name):
                    yield from self.images(entry.path, class_name)
            elif self._is_image(entry):
                reason = _not_regular(entry)
                if reason is None:
                    yield entry.path
                else:
                    self.bad[entry.path] = reason

    def look_beside(self, folder: Path, empty: list[os.DirEntry]) -> None:
        """Count what lies in the split's own folder."""
        self.left_out.empty_classes = [_class_name(child) for child in empty]
        for entry in os.scandir(folder):
            if _is_folder(entry):
                if _is_hidden(entry.name):
                    self.left_out.hidden_folders[entry.name] += 1
            elif self._is_image(entry):
                self.left_out.loose += 1

    def _is_new(self, entry: os.DirEntry, class_name: str) -> bool:
        """Whether to look into a folder; False for hidden ones and those that a link leads to once more."""
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

    def _is_image(self, entry: os.DirEntry) -> bool:
        if _looks_like_image(entry):
            return True
        if _is_hidden(entry.name):
            self.left_out.hidden_files += 1
        else:
            self.left_out.not_images[os.path.splitext(entry.name)[1].lower()] += 1
        return False


def _two_classes(path: str, owner: str) -> ValueError:
    owner = listed([owner])
    return ValueError(f"{path}: is a folder of class {owner} too, but an image has one class; remove the link")


def _folders(folder: Path) -> list[os.DirEntry]:
    """The folders in a folder by name, without hidden ones and links back up."""
    above = _ancestors(folder)
    found = [entry for entry in os.scandir(folder) if _is_folder(entry) and not _is_hidden(entry.name)]
    found = [entry for entry in found if not (entry.is_symlink() and _identity(entry.path) in above)]
    return sorted(found, key=lambda entry: entry.name)


def _class_folders(folder: Path) -> tuple[list[os.DirEntry], list[os.DirEntry]]:
    """The folders in a split's folder that hold images, and those that do not."""
    full, empty = [], []
    for child in _folders(folder):
        (full if _holds_image(Path(child.path)) else empty).append(child)
    return full, empty


def _holds_image(folder: Path, met: set | None = None) -> bool:
    """Whether something named like an image lies below a folder; stops at the first one."""
    met = _ancestors(folder) if met is None else met
    below = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if not _is_folder(entry):
                if _looks_like_image(entry):
                    return True
            elif not _is_hidden(entry.name):
                below.append(entry)
    for entry in below:
        if entry.is_symlink():  # nothing else leads in circles
            if _identity(entry.path) in met:
                continue
            met.add(_identity(entry.path))
        if _holds_image(Path(entry.path), met):
            return True
    return False


def _loose(folder: Path) -> int:
    """How many images lie in a folder itself."""
    return sum(_looks_like_image(entry) and not _is_folder(entry) for entry in os.scandir(folder))


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name.lower() in _JUNK


def _looks_like_image(entry: os.DirEntry) -> bool:
    return entry.name.lower().endswith(IMG_EXTENSIONS) and not entry.name.startswith(".")


def _is_folder(entry: os.DirEntry) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads to itself
        return False


def _not_regular(entry: os.DirEntry) -> str | None:
    """What an entry is that cannot be read to its end like a file; None for files and links to files."""
    try:
        if entry.is_file():
            return None
        return _SPECIAL.get(stat.S_IFMT(entry.stat().st_mode), "a special file")
    except OSError as error:
        return "a broken link" if entry.is_symlink() else str(error.strerror)


def _identity(path: str | Path) -> tuple[int, int]:
    """What a folder is known by, whatever links lead to it."""
    found = os.stat(path)
    return found.st_dev, found.st_ino


def _ancestors(folder: Path) -> set[tuple[int, int]]:
    """The folder and all above it."""
    resolved = folder.resolve()
    return {_identity(path) for path in (resolved, *resolved.parents)}


def _class_name(entry: os.DirEntry) -> str:
    """A class folder's name, the same under every locale; bytes that are not UTF-8 become lone surrogates."""
    return os.fsencode(entry.name).decode("utf-8", "surrogateescape")


def _no_images(folder: Path) -> ValueError:
    tables = [child for child in sorted(folder.iterdir()) if child.is_dir() and has_tables(child)]
    if tables:
        return ValueError(f"{folder}: no images in it; for the tables below it, give {listed(tables)}")
    loose = _loose(folder)
    if loose:
        return ValueError(
            f"{folder}: holds {loose} images and no class folders; an image folder holds CLASS/IMAGE.jpg "
            "(if this split has no labels, choose another --eval_split or give --eval_fraction 0.1)"
        )
    names = [entry.name + "/" * _is_folder(entry) for entry in os.scandir(folder)]
    seen = f" (only {listed(sorted(names), 6)})" if names else ""
    return ValueError(f"{folder}: no images in it{seen}; an image folder holds CLASS/IMAGE.jpg")
