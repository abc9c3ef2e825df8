"""The index of tar and zip archives: what they hold, and which bytes of the archive that is.

It is cached. Nothing is extracted.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset

from utils.console import join_names, progress
from utils.data.archive_headers import read_tar, read_zip
from utils.data.listing import is_archive, is_image
from utils.data.members import COLUMNS, Members, joined
from utils.data.splits import fingerprint_of, stamp_of
from utils.data.workers import worker_processes
from utils.errors import UserError, one_line
from utils.files import expand, whole_file
from utils.memory import usable_cores
from utils.waiting import wait_for_items

_VERSION = 1  # of the cached results; increase it when their meaning changes
_MOST = 32  # worker processes


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
            columns = dict(file)
    except Exception:  # of any class, if there is no earlier result, or a damaged one
        columns = _list_all(archives, stamps)
        with suppress(OSError):  # the next start takes as long as this one
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(path) as out:
                np.savez(out, **columns)
    names, labels = (
        columns.pop(key).tobytes().decode("utf-8", "surrogatepass").split("\0")[:-1]
        for key in ("names", "labels")
    )
    left_out = int(columns.pop("left_out"))
    members = Members(names=names, archives=[*archives], listed=stamps, **columns)
    return members, labels, left_out


def _list_all(archives: Sequence[str], stamps: list) -> dict[str, Any]:
    """List the archives on all cores. Returns the columns of an index."""
    workers = min(usable_cores(), _MOST, len(archives))
    loader = DataLoader(
        _Archives(archives),
        batch_size=None,
        collate_fn=lambda found: found,
        **worker_processes(workers if workers > 1 else 0),
    )
    parts = []
    labels: list[str] = []
    left_out = 0
    is_labelled = False
    for found in wait_for_items(progress("listing archives")(loader), "the list of an archive"):
        if isinstance(found, Exception):
            raise found
        members, own_labels, own_left_out = found
        parts.append(members)
        labels += own_labels or [""] * len(members)
        is_labelled |= bool(own_labels)
        left_out += own_left_out
    members = joined(parts)
    texts = {"names": members.names, "labels": labels if is_labelled else []}
    columns = {key: getattr(members, key) for key in COLUMNS} | {"left_out": np.asarray(left_out)}
    for key, own in texts.items():
        data = "".join(f"{text}\0" for text in own).encode("utf-8", "surrogatepass")
        columns[key] = np.frombuffer(data, np.uint8)
    return columns


@dataclass
class _Archives(Dataset):
    """The list of each archive, or the error."""

    paths: Sequence[str]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> Any:
        path = self.paths[number]
        try:
            return _list(path)
        except Exception as error:  # damaged headers raise errors of any class
            if isinstance(error, UserError) or getattr(error, "filename", None):
                return error
            problem = f"{path}: is damaged or not complete ({one_line(error)[:80]})"
            return UserError(problem, "copy it or pack it again")


def _list(path: str) -> tuple[Members, list[str], int]:
    """The members of an archive, their labels, and how many are left out."""
    stamp = stamp_of(path)
    names = []
    places = []
    left_out = 0
    is_zip = path.lower().endswith(".zip")
    for name, *place in (read_zip if is_zip else read_tar)(path, stamp[0]):
        parts = name.split("/")
        if not place or not parts[0] or ".." in parts or "\0" in name:
            left_out += 1
        elif clean := "/".join(part for part in parts if part not in (".", "")):
            names.append(f"{clean}/" if name.endswith("/") else clean)
            places.append((0, *place))
    if stamp_of(path) != stamp:
        problem = f"{path}: changed while it was listed"
        raise UserError(problem, "wait until it is complete")
    if inner := [name for name in names if is_archive(name)]:
        if not any(map(is_image, names)):
            problem = f"{path}: holds archives ({join_names(inner, 3)}), and no images"
            raise UserError(problem, "unpack it into a folder, and give this folder")
    table = np.asarray(places, np.int64).reshape(-1, len(COLUMNS))
    typed = zip(COLUMNS.items(), table.T, strict=True)
    columns: Any = {key: column.astype(kind) for (key, kind), column in typed}
    members = Members(names=names, archives=[path], listed=[stamp], **columns)
    return members, _labels(members), left_out


def _labels(members: Members) -> list[str]:
    """The label of each member of a WebDataset shard; an empty list for another archive.

    An image KEY.jpg has that of KEY.cls, or of KEY.json.
    """
    if not any(name.endswith((".cls", ".json")) for name in members.names):
        return []
    keys = [_key(name) for name in members.names]
    own = {key for (key, _), name in zip(keys, members.names, strict=True) if is_image(name)}
    found: dict[str, str] = {}
    for wanted in ("cls", "json"):
        for row, (key, ending) in enumerate(keys):
            if ending == wanted and key in own and not found.get(key):
                found[key] = _label(members, row, wanted)
    labels = [found.get(key, "") for key, _ in keys]
    return labels if found else []


def _key(name: str) -> tuple[str, str]:
    """The key of a file of WebDataset, and its ending: all that follows the first dot."""
    folder, slash, file = name.rpartition("/")
    key, _, ending = file.partition(".")
    return folder + slash + key, ending


def _label(members: Members, row: int, kind: str) -> str:
    data = members[row]
    try:
        value = data.decode() if kind == "cls" else json.loads(data)
    except ValueError as error:
        problem = f"{members.archives[0]}: {members.names[row]}: {one_line(error)}"
        raise UserError(problem, "write a label, or pack the archive without this file") from None
    if isinstance(value, dict):
        value = value.get("label")
    return str(value).strip() if isinstance(value, str | int) else ""
