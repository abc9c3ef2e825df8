"""What a user sees of a run: tables, one progress bar, and log.jsonl."""

import json
import math
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from utils.files import write_file


class RunLog:
    """log.jsonl and the progress bar; every method does nothing on ranks other than the main process."""

    def __init__(self, folder: Path, is_main: bool, step: int, updates: int):
        self.is_main, self.updates = is_main, updates
        if is_main:
            self.file = _reopen(folder / "log.jsonl", step)
            self.bar = tqdm(total=updates, initial=step, unit="update", disable=not sys.stderr.isatty())

    def advance(self) -> None:
        """One more update is done."""
        if self.is_main:
            self.bar.update()

    def write(self, kind: str, **values: Any) -> None:
        """Append a record to log.jsonl and show it."""
        if self.is_main:
            # JSON has no infinity; an evaluation can reach it where training did not.
            finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
            self.file.write(json.dumps({"kind": kind, **finite}, allow_nan=False) + "\n")
            self.file.flush()
            if kind == "train":
                self._show_training(values)
            elif kind == "eval":
                self.say(evaluation_line(values))

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self.is_main:
            self.bar.write(text, file=sys.stdout)
            sys.stdout.flush()

    def close(self) -> None:
        if self.is_main:
            self.bar.close()
            self.file.close()

    def _show_training(self, values: dict) -> None:
        numbers = {
            "loss": f"{values['loss']:.4f}",
            "accuracy": f"{values['accuracy']:.4f}",
            "lr": f"{values['lr']:.2e}",
            "images/s": f"{values['images_per_second']:.0f}",
            "waits": f"{values['data_wait']:.0%}",
        }
        if self.bar.disable:  # no terminal: plain lines instead of a bar
            shown = "  ".join(f"{name} {number}" for name, number in numbers.items())
            left = (self.updates - values["step"]) * values["seconds"] / max(1, values["step"])
            self.say(f"update {values['step']}/{self.updates}  epoch {values['epoch']}  {shown}  left {clock(left)}")
        else:
            self.bar.set_postfix(numbers, refresh=False)


def _reopen(path: Path, step: int) -> TextIO:
    """Open the log to append, without what was logged after update `step` by a run that is now redone from there."""
    if path.exists():
        lines = [line for line in path.read_text().splitlines() if _step_of(line) <= step]
        write_file(path, "".join(line + "\n" for line in lines))
    return path.open("a")


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf  # a line that a crash cut short


def progress(description: str, is_main: bool):
    """A function that wraps an iterable in a passing progress bar on the main process's terminal."""

    def wrap(items):
        return tqdm(items, desc=description, leave=False, disable=not (is_main and sys.stderr.isatty()))

    return wrap


def evaluation_line(record: dict) -> str:
    return (
        f"update {record['step']}  {record['split']}: accuracy {record['accuracy']:.4f}  top-5 {record['top5']:.4f}  "
        f"loss {record['loss']:.4f}  ({record['count']} samples, {record['seconds']:.1f} s)"
    )


def table(title: str, rows: list[tuple[str, Any]]) -> str:
    """Two aligned columns under a title."""
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    rule = "─" * max(len(line) for line in [title, *lines])
    return "\n".join([title, rule, *lines, rule])


def clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    return time.strftime("%-H:%M:%S" if seconds >= 3600 else "%-M:%S", time.gmtime(seconds))
