"""Names that only a computer tells apart, and names that are lists of others."""

import re
import unicodedata
from collections.abc import Collection, Iterable

from utils.console import join_names

_MARKS = " '\"[](){}"  # around the labels of a list


def alike(names: Iterable[str]) -> dict[str, str]:
    """The names that differ from an earlier one only in case, spaces or the spelling of a number,
    each with the earlier one.
    """
    first: dict = {}
    found = {}
    for name in names:
        text = " ".join(unicodedata.normalize("NFKC", name).casefold().split())
        own = first.setdefault(re.sub(r"^0*(\d+)\.?0*$", r"\1", text), name)
        if own != name:
            found[name] = own
    return found


def doubts(names: Collection[str]) -> dict[str, object]:
    """Possible mistakes in the names of classes, each with these names."""
    words = (name for name in names if name[1:] or name.isdecimal())  # A and a may be two letters
    lists = []
    for separator in (" ", "[,;&]"):
        parts = {name: {part.strip(_MARKS) for part in re.split(separator, name)} for name in names}
        known = set().union(*parts.values())
        # "good bolt" and "bad nut" are not lists, "New York, NY" has parts that rarely recur, and
        # "ski mask" is one of many names of two words
        if separator == " " or len(known) >= len(names):
            known = {name.strip(_MARKS) for name in names}
        several = [name for name in names if len(parts[name]) > 1]
        found = [name for name in several if parts[name] <= known]
        if len(found) > len(several) / 2:
            lists += found
    return {
        "classes that may be the same": join_names(map(" and ".join, alike(words).items())),
        "classes that look like several labels (write a|b in a CSV file, and a list in a table)": (
            join_names(lists)
        ),
    }
