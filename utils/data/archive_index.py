"""The index of tar and zip archives: the members of each, and where their bytes are.

It is cached. Nothing is extracted.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from utils.config import require
from utils.console import join_names, progress
from utils.data.archive_headers import read_tar, read_zip
from utils.data.listing import ENDINGS, is_archive, is_image, is_visible
from utils.data.members import Members
from utils.data.splits import fingerprint_of, stamp_of
from utils.data.workers import worker_processes
from utils.errors import UserError, one_line
from utils.files import expand, whole_file
from utils.memory import usable_cores
from utils.waiting import wait_for_items

_VERSION = 1  # of the cached results; increase it when their meaning changes
_MOST = 32  # worker processes
_LABEL = 2**20  # most bytes of a KEY.cls or KEY.json


def read_index(archives: Sequence[str], cache_dir: str) -> tuple[Members, list[str], int]:
    """The members of these archives, in their order, their labels, and how many were left out.

    The name of a folder ends in a slash. Labels are those of WebDataset, as text, empty for a
    member without one; for other archives, the list is empty. The result is cached until the size
    or a time of an archive changes. Raises UserError or OSError for an archive that cannot be read.
    """
    stamps = [*map(stamp_of, archives)]
    name = fingerprint_of(_VERSION, *archives, *stamps)
    path = expand(cache_dir) / "indexed" / f"{name}.npz"
    try:
        with np.load(path, allow_pickle=False) as file:
            places, texts = file["places"], file["texts"]
    except Exception:  # of any class, if there is no earlier result, or a damaged one
        places, texts = _list_all(archives)
        with suppress(OSError):  # the next start takes as long as this one
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(path) as out:
                np.savez(out, places=places, texts=texts)
    names, labels, left_out = json.loads(texts.tobytes())
    members = Members(names=names, archives=[*archives], listed=stamps, places=places)
    return members, labels, left_out


def _list_all(archives: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """List the archives on all cores. Returns the arrays of an index."""
    workers = min(usable_cores(), _MOST, len(archives))
    loader: Any = DataLoader(
        archives,  # type: ignore[arg-type]  # any sequence will do
        batch_size=None,
        collate_fn=_list_or_error,  # type: ignore[arg-type]
        **worker_processes(workers if workers > 1 else 0),
    )
    names: list[str] = []
    labels: list[str] = []
    places = []
    left_out = 0
    is_labelled = False
    lists = wait_for_items(progress("listing archives")(loader), "the list of an archive")
    for number, found in enumerate(lists):
        if isinstance(found, Exception):
            raise found
        members, own_labels, own_left_out = found
        members.places[:, 0] = number
        names += members.names
        places.append(members.places)
        labels += own_labels or [""] * len(members)
        is_labelled |= bool(own_labels)
        left_out += own_left_out
    texts = json.dumps([names, labels if is_labelled else [], left_out])
    return np.concatenate(places), np.frombuffer(texts.encode(), np.uint8)


def _list_or_error(path: str) -> Any:
    try:
        return _list(path)
    except Exception as error:  # damaged headers raise errors of any class
        if isinstance(error, UserError) or getattr(error, "filename", None):
            return error
        problem = f"{path}: is damaged or not complete ({one_line(error)[:80]})"
        return UserError(problem, "copy it or pack it again")


def _list(path: str) -> tuple[Members, list[str], int]:
    """The visible members of an archive, their labels, and how many are left out."""
    stamp = stamp_of(path)
    names = []
    places = []
    left_out = 0
    is_zip = path.lower().endswith(".zip")
    for name, *place in (read_zip if is_zip else read_tar)(path, stamp[0]):
        parts = name.split("/")
        if not place or not parts[0] or ".." in parts or "\0" in name:
            left_out += 1
            continue
        clean = "/".join(part for part in parts if part not in (".", ""))
        if clean and is_visible(clean):
            names.append(f"{clean}/" if name.endswith("/") else clean)
            places.append((0, *place))
    if stamp_of(path) != stamp:
        problem = f"{path}: changed while it was listed"
        raise UserError(problem, "wait until it is complete")
    if inner := [name for name in names if is_archive(name)]:
        if not any(map(is_image, names)):
            problem = f"{path}: holds archives ({join_names(inner, 3)}), and no images"
            raise UserError(problem, "unpack it into a folder, and give this folder")
    table = np.asarray(places, np.int64).reshape(-1, 5)
    members = Members(names=names, archives=[path], listed=[stamp], places=table)
    return members, _labels(members), left_out


def _labels(members: Members) -> list[str]:
    """The label of each member of a WebDataset shard; an empty list for another archive.

    An image KEY.jpg has that of KEY.cls, or of KEY.json; others of its key, such as KEY.mask.png,
    have none.
    """
    keys = [*map(_key, members.names)]
    own = {key for key, ending in keys if ending in ENDINGS}
    found: dict[str, str] = {}
    for wanted in (".cls", ".json"):
        for row, (key, ending) in enumerate(keys):
            if ending == wanted and key in own and not found.get(key):
                found[key] = _label(members, row, wanted)
    labels = [found.get(key, "") if ending in ENDINGS else "" for key, ending in keys]
    return labels if found else []


def _key(name: str) -> tuple[str, str]:
    """The key of a file of WebDataset, and its ending: all from the first dot on."""
    folder, slash, file = name.rpartition("/")
    key, dot, ending = file.partition(".")
    return folder + slash + key, (dot + ending).lower()


def _label(members: Members, row: int, kind: str) -> str:
    try:
        require(members.places[row, 3] <= _LABEL, "too large for a label")
        data = members[row]
        value = data.decode("utf-8-sig") if kind == ".cls" else json.loads(data)
    except ValueError as error:
        problem = f"{members.archives[0]}: {members.names[row]}: {one_line(error)}"
        raise UserError(problem, "write a label, or pack the archive without this file") from None
    if isinstance(value, dict):
        value = value.get("label")
    return str(value).strip() if isinstance(value, str | int) else ""
