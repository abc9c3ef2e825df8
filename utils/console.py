"""Tables and progress bars on a terminal."""

import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from tqdm import tqdm


class Terminal:
    """Where the main process shows progress bars and prints lines; on other ranks it shows nothing."""

    def __init__(self, is_main: bool):
        self.is_main = is_main

    def progress(self, description: str) -> Callable[[Iterable], Iterable]:
        """A function that wraps an iterable in a progress bar, which disappears at the end."""
        hidden = not (self.is_main and sys.stderr.isatty())
        return lambda items: tqdm(items, desc=description, leave=False, disable=hidden)

    def print(self, text: str) -> None:
        if self.is_main:
            print(text)


def table(title: str, rows: list[tuple[str, Any]]) -> str:
    """Two aligned columns under a title."""
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    rule = "─" * max(len(line) for line in [title, *lines])
    return "\n".join([title, rule, *lines, rule])


def clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    return time.strftime("%-H:%M:%S" if seconds >= 3600 else "%-M:%S", time.gmtime(seconds))


def join_names(names, most: int = 12) -> str:
    names = [printable(str(name)) for name in names]
    return ", ".join(names[:most]) + (f", ... ({len(names)} in all)" if len(names) > most else "")


def printable(name: str) -> str:
    """A name on one line that can be printed as Unicode, even if its bytes are not UTF-8."""
    return " ".join(name.split()).encode("utf-8", "replace").decode()
