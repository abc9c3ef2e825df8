"""Locks between the workers of a sweep."""

from functools import cache
from pathlib import Path
from typing import TextIO

from utils.console import say
from utils.files import try_lock


def open_claim(path: Path) -> TextIO:
    """A file to lock with `claimed`; closing it frees the lock."""
    return path.open("a")


def claimed(file: TextIO) -> bool:
    """Lock a file for this process, unless another one has locked it; returns whether it did.

    On a file system without locks, it says so once, and returns True.
    """
    try:
        return try_lock(file)
    except OSError as error:
        warn_about_locks(error.strerror)
        return True


@cache  # prints once
def warn_about_locks(reason: str) -> None:
    """Say that there can be one worker only."""
    say(f"this file system has no locks ({reason}): start only one sweep.py with this --name")
