"""Tables and progress bars on a terminal."""

import shutil
import sys
import unicodedata
from collections.abc import Callable, Iterable
from typing import Any

from tqdm import tqdm

from utils.errors import printable


class Terminal:
    """Shows progress bars and prints lines on the main process; does nothing on other ranks."""

    def __init__(self, is_main: bool):
        self.is_main = is_main

    def progress(self, description: str) -> Callable[[Iterable], Iterable]:
        """A function that wraps an iterable in a progress bar. The bar is removed at the end."""
        hidden = not (self.is_main and sys.stderr.isatty())
        return lambda items: tqdm(items, desc=description, leave=False, disable=hidden)

    def print(self, text: str) -> None:
        if self.is_main:
            print(text)


def table(title: str, rows: list[tuple[str, Any]]) -> str:
    """Two aligned columns under a title.

    The lines above and below them are not wider than a terminal.
    """
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    longest = max(len(line) for line in [title, *lines])
    rule = "─" * (
        min(longest, shutil.get_terminal_size().columns) if sys.stdout.isatty() else longest
    )
    return "\n".join([title, rule, *lines, rule])


def join_names(names: Iterable, most: int = 12) -> str:
    """The first `most` names on one line, and the total number if there are more.

    Names with a comma are quoted.
    """
    texts = [
        repr(text) if "," in text else text for text in (printable(str(name)) for name in names)
    ]
    return ", ".join(texts[:most]) + (f", ... ({len(texts)} in all)" if len(texts) > most else "")


def nfc(name: Any) -> Any:
    """Text in the form in which names are compared: é may be one character, or e and an accent.

    Others unchanged.
    """
    return unicodedata.normalize("NFC", name) if isinstance(name, str) else name
