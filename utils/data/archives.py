"""Tar and zip archives as sources: the images of an archive, or of a folder of archives, and the
splits that their names form.

The names decide which of four forms the archives have, and what an image is called:

* WebDataset, if a KEY.cls or KEY.json is beside an image: SHARD.tar/ and its name in the archive;
* archives of splits, such as train.tar and val-0003.tar: SPLIT/ and its name;
* folders in archives: its name;
* archives of classes: CLASS/ and its name.

Below a folder, the names of folders above the archive come first. So an image has the name that
it would have in an image folder, and the rules of image folders find splits and classes. But images
of WebDataset keep the order of the shards and of their members, and have labels of their own.
"""

import os
import re
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import numpy as np

from utils.config import require
from utils.data.archive_index import read_index
from utils.data.folders import image_folder, left_out_notes, name_splits, split_word
from utils.data.labels import distinct, indices_in, lacks_class, split_that_defines_classes
from utils.data.listing import Entry, Scan, archives_at, files_below, is_archive, is_image
from utils.data.members import Members
from utils.data.splits import Files, Source, Split, fingerprint_of, whole_split
from utils.errors import UserError
from utils.files import read_json, read_text
from utils.settings.data import DataSettings

_NUMBER = re.compile(r"[-_. ]*\d+(-of-\d+)?$")  # of an archive of several
_WEB = "WebDataset"


def find_members(paths: Sequence[str], cache_dir: str) -> Members:
    """The images at these paths, each of which is an archive or leads into one, each image once;
    those of an archive by name.

    Raises UserError if there is no such image.
    """

    @cache
    def listed(archives: str) -> tuple[Members, dict[str, int]]:
        members, rows, _, _ = _named(archives, cache_dir)
        ordered = sorted(rows.tolist(), key=lambda row: members.names[row].split("/"))
        return members, {members.path(row): row for row in ordered}

    found: dict[str, list[int]] = {}
    archives: list[str] = []
    stamps: list = []
    for path in paths:
        place = archives_at(path)
        members, rows = listed(place)
        chosen = [*rows] if place == path else [path]
        for name in chosen:
            require(name in rows, f"{name}: no such image in {place}", "correct the path")
            number, *rest = members.places[rows[name]].tolist()
            found.setdefault(name, [len(archives) + number, *rest])
        archives += members.archives
        stamps += members.listed
    places = np.asarray([*found.values()], np.int64).reshape(-1, 5)
    return Members(names=[*found], archives=archives, listed=stamps, places=places)


def open_archives(path: str, config: DataSettings) -> Source:
    """A tar or zip archive, or a folder of archives, whose images are read in place."""
    members, rows, labels, left_out = _named(path, config.cache_dir)
    row_of: dict[str, int] = {}
    for row in rows.tolist():
        name = members.names[row]
        if (first := row_of.setdefault(name, row)) != row:
            one, two = (members.archives[members.places[each, 0]] for each in (first, row))
            raise UserError(f"{name} is in {one} and again in {two}", "remove one of the two")
    if members.form == _WEB:
        source = _web_dataset(path, members, rows, labels, config)
    else:

        def files(names: list[str], base: str) -> Files:
            above = f"{base}/"[len(members.root) + 1 :]
            own = members.select(np.asarray([row_of[above + name] for name in names]))
            own.names, own.root = names, base
            return own

        source = image_folder(Entry("", members.root, members.names), config, files)
    line = "links, special and encrypted members, and names outside the archive, are left out"
    source.notes += left_out_notes(path, {line: left_out})
    return source


def _named(path: str, cache_dir: str) -> tuple[Members, np.ndarray, list[str], int]:
    """All members, with their names in an image folder; the rows of the images; the labels; and how
    many members were left out.
    """
    is_folder = os.path.isdir(path)
    found = [path]
    if is_folder:
        found = [file.path for file in files_below(path) if is_archive(file.name)]
    members, labels, left_out = read_index([*map(os.path.abspath, found)], cache_dir)
    names = members.names
    rows = [row for row, name in enumerate(names) if is_image(name)]
    owners = members.places[:, 0].tolist()
    folder = path if is_folder else os.path.dirname(path)
    places = [os.path.relpath(each, folder or ".") for each in found]
    stems = [os.path.splitext(place)[0] for place in places]
    words = _split_names(stems)
    members.root = path
    if labels:
        members.form, prefixes = _WEB, places
        members.root = folder
    elif not is_folder:
        members.form, prefixes = "folders in an archive", [""]
    elif any(map(split_word, words)):
        members.form = "archives of splits"
        prefixes = [os.path.dirname(stem) for stem in stems]
        # the names in an archive may begin with the folder of its split
        needs = {owners[row] for row in rows if not names[row].startswith(f"{words[owners[row]]}/")}
        for number in needs:
            is_split = split_word(words[number])
            last = words[number] if is_split else os.path.basename(stems[number])
            prefixes[number] = os.path.join(prefixes[number], last)
    elif any("/" in names[row] for row in rows):
        members.form, prefixes = "folders in archives", [*map(os.path.dirname, places)]
    else:
        members.form, prefixes = "archives of classes", stems
    before = [os.path.join(prefix, "") for prefix in prefixes]
    members.names = [before[n] + name for n, name in zip(owners, names, strict=True)]
    return members, np.asarray(rows, np.int64), labels, left_out


def _split_names(stems: list[str]) -> list[str]:
    """What each archive is called without its number. If all these names end in the name of a
    split, as imagenet-train and imagenet-val do, only these ends.
    """
    bases = [_NUMBER.sub("", os.path.basename(stem)) for stem in stems]
    ends = [re.split("[-_. ]", base)[-1] for base in bases]
    return ends if all(map(split_word, ends)) else bases


def _web_dataset(
    path: str, members: Members, images: np.ndarray, labels: list[str], config: DataSettings
) -> Source:
    """The splits of the shards, by their names without the numbers."""
    stems = [os.path.splitext(archive)[0] for archive in members.archives]
    words = _split_names(stems)
    if len({*words}) == 1 and not split_word(words[0]):
        folders = [os.path.basename(os.path.dirname(archive)) for archive in members.archives]
        is_split = len({*map(split_word, folders)}) > 1  # such as train/0000.tar and val/0000.tar
        words = folders if is_split else ["train"] * len(words)
    aliases = name_splits(path, dict.fromkeys(words))
    rows: dict[str, list[int]] = {}
    for row in images.tolist():
        if labels[row]:
            rows.setdefault(aliases[words[members.places[row, 0]]], []).append(row)
    fix = "write the class of KEY.jpg to KEY.cls, or as `label` to KEY.json"
    require(rows, f"{path}: no image has a label", fix)
    given = _given_classes(Path(members.root))
    wanted = config.train_split and aliases.get(config.train_split, config.train_split)
    found = {labels[row] for row in rows[split_that_defines_classes(rows, wanted)]}
    key = int if all(map(str.isdecimal, found)) else str
    class_names = given or distinct(sorted(found, key=key))

    def make(name: str) -> Split:
        own = rows[name]
        texts = [_class_of(labels[row], given) for row in own]
        numbers = indices_in(class_names, texts)
        if (numbers < 0).any():
            place = int(numbers.argmin())
            problem = lacks_class(texts[place], class_names, name, distinct(texts))
            image = members.path(own[place])
            raise UserError(f"{image}: {problem}", "correct the label")
        chosen = members.select(np.asarray(own))
        return whole_split(name, chosen, numbers, fingerprint_of(os.path.realpath(path), name))

    scan = Scan()
    others = (name for name in members.names if not name.lower().endswith((".cls", ".json", "/")))
    scan.images(Entry(os.path.basename(name), name) for name in others)
    left_out = {
        "files of unsupported types are left out": scan.kinds(),
        "images without a label are left out": len(images) - sum(map(len, rows.values())),
    }
    notes = left_out_notes(path, left_out)
    return Source({name: partial(make, name) for name in rows}, class_names, aliases, notes)


def _class_of(label: str, given: list[str]) -> str:
    """The class of a label; a number is its index in the `given` classes."""
    if label.isdecimal() and int(label) < len(given):
        return given[int(label)]
    return label


def _given_classes(folder: Path) -> list[str]:
    """The names of the classes in a file beside the shards; empty if there is none."""
    file, info = folder / "classnames.txt", folder / "_info.json"
    names: list[str] = []
    if file.exists():
        names = [*filter(None, map(str.strip, read_text(file, 2**23).splitlines()))]
    elif info.exists() and isinstance(found := read_json(info), dict):
        names = [*map(str, found.get("class_names") or [])]
    fix = "give each class a name of its own"
    require(len(distinct(names)) == len(names), f"{folder}: two classes have the same name", fix)
    return names
