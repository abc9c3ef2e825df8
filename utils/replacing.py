"""Which files an output may replace: those of its kind that Lockstep has written, but no input."""

import csv
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from utils.config import require
from utils.files import expand, read_json

# Kinds of output: the endings, and what `names_in` returns for a file that Lockstep has written.
TABLE = (
    ".csv, .json, .parquet",
    r"(path|index) (label )?predicted (fold )?(class_\d+ probability_\d+ )+(loss|error)",
)
HTML = ".html", "Lockstep"
# of eval.py, doctor.py and replay.py
RESULT = ".json", "kind .*data split classes .*|healthy findings|updates checkpoints .*"
_REVIEW = "path.label.suggestion.was.*"  # of extras.folds; people correct it, with any separator


def check_output(flags: Any, name: str, kind: tuple[str, str], **more: Any) -> None:
    """Raise UserError if the file of an output flag cannot be written, or must not be replaced.

    It replaces a file of its kind that Lockstep has written; with --overwrite, also other files,
    but no list of labels to correct, nothing that another flag names, and no other file in a folder
    that a flag names. `more` are values of other flags.
    """
    given = vars(flags) | more
    text = given.pop(name)
    if not text:
        return
    path = expand(text)
    fix = "give another name"
    target = path.resolve()
    flag = f"--{name} {path}"
    endings, ours = kind
    require(path.suffix.lower() in endings.split(", "), f"{flag}: must end in {endings}", fix)
    exists = target.exists()
    require(target.is_file() or not exists, f"{flag}: is not a regular file", fix)
    problem = f"{flag}: {target.parent} does not exist or is not writable"
    require(os.access(target.parent, os.W_OK), problem, fix)
    names = names_in(target)
    foreign = exists and not re.fullmatch(ours, names)
    for key, value in given.items():
        others = value if isinstance(value, list) else [value]
        for other in others:
            if other and isinstance(other, str):
                place = expand(other).resolve()
                same = exists and os.path.exists(place) and target.samefile(place)
                inside = foreign and place in target.parents and key not in ("output_dir", "runs")
                problem = f"{flag}: is part of --{key} {other}"
                require(not (same or inside or target == place), problem, fix)
    require(not re.fullmatch(_REVIEW, names), f"{flag}: is a list of labels to correct", fix)
    problem = f"{flag}: exists, and Lockstep has not written it"
    require(flags.overwrite or not foreign, problem, f"add --overwrite, or {fix}")


def names_in(path: Path) -> str:
    """The columns of a table, the keys of JSON, or the program that wrote a page; empty for other
    contents.
    """
    with suppress(Exception), path.open(encoding="utf-8-sig") as file:
        match path.suffix.lower():
            case ".csv":
                names = next(csv.reader(file))
            case ".html":
                names = re.findall('name="generator" content="(.+)">', file.read(2**12))
            case ".json":
                found = read_json(path, 2**30)
                names = found[0] if isinstance(found, list) else found
            case ".parquet":
                from pyarrow import parquet  # takes a tenth of a second

                names = parquet.read_schema(path).names
        return " ".join(names)
    return ""
