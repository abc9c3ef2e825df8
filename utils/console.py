"""Lines, tables and progress bars on a terminal."""

import os
import re
import shutil
import socket
import sys
import unicodedata
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from tqdm import tqdm

from utils.errors import printable

_CONTROLS = re.compile(r"[\0-\b\v\f\x0e-\x1f\x7f-\x9f]")  # all but tabs and line ends


def say(text: str, on_each_machine: bool = False) -> None:
    """Print a text above the progress bars, on the main process only.

    With `on_each_machine`, the first process of each machine prints it, with the name of its host
    unless that is the main process.
    """
    if not _is_main():
        if not on_each_machine or os.environ["LOCAL_RANK"] != "0":
            return
        text = f"{socket.gethostname()}: {text}"
    if sys.stdout is None:  # closed
        return
    text = _CONTROLS.sub("?", text)  # text of an untrusted file may have some
    with suppress(OSError, ValueError):  # a full disk, a notebook's stream
        tqdm.write(text)
        sys.stdout.flush()


def progress(description: str) -> Callable[[Iterable], Iterable]:
    """A function that wraps an iterable in a progress bar, which is removed at the end.

    The bar is shown by the main process, if it has a terminal.
    """
    hidden = not (_is_main() and sys.stderr.isatty())
    return lambda items: tqdm(items, desc=description, leave=False, disable=hidden)


def _is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"  # as `Topology.export` has set it


def table(title: str, rows: list[tuple[str, Any]]) -> str:
    """Two aligned columns under a title.

    The lines above and below them are not wider than a terminal.
    """
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    longest = max(len(line) for line in [title, *lines])
    if sys.stdout.isatty():
        longest = min(longest, shutil.get_terminal_size().columns)
    rule = "─" * longest
    return "\n".join([title, rule, *lines, rule])


def join_names(names: Iterable, most: int = 12) -> str:
    """The first `most` names on one line, and the total number if there are more.

    Names with a comma are quoted.
    """
    texts = [printable(str(name)) for name in names]
    quoted = [repr(text) if "," in text else text for text in texts[:most]]
    if len(texts) > most:
        quoted.append(f"... ({len(texts)} in all)")
    return ", ".join(quoted)


def nfc(name: Any) -> Any:
    """Text in the form in which names are compared: é may be one character, or e and an accent.

    Others unchanged.
    """
    return unicodedata.normalize("NFC", name) if isinstance(name, str) else name
