"""What a user sees of a run: tables, one progress bar, and log.jsonl."""

import json
import math
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from tqdm import tqdm

from utils.console import clock
from utils.files import named, write_file
from utils.runs.state import TrainState
from utils.runs.summary import evaluation_line


class RunLog:
    """log.jsonl and the progress bar; every method does nothing on ranks other than the main process."""

    def __init__(self, folder: Path, is_main: bool, state: TrainState, updates: int):
        self.path, self.is_main, self.updates = folder / "log.jsonl", is_main, updates
        self.error: OSError | None = None
        if is_main:
            self.file, self.pending = _reopen(self.path, state), b""
            self.bar = tqdm(total=updates, initial=state.step, unit="update", disable=not sys.stderr.isatty())

    def advance(self) -> None:
        """One more update is done."""
        if self.is_main:
            with suppress(OSError):  # a terminal that is gone ends no run
                self.bar.update()

    def write(self, kind: str, **values: Any) -> None:
        """Append a record to log.jsonl and show it; what cannot be written is kept for the next time, see `check`."""
        if not self.is_main:
            return
        # JSON has no infinity; an evaluation can reach it where training did not.
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        self.pending += json.dumps({"kind": kind, **finite}, allow_nan=False).encode() + b"\n"
        self._flush()
        if kind == "train":
            self._show_training(values)
        elif kind == "eval":
            self.say(evaluation_line(values))

    def sync(self) -> None:
        """See that the records are on the disk, before a checkpoint says that they are."""
        if self.is_main:
            self._flush()
            self.check()
            with named(self.path):
                os.fsync(self.file)

    def check(self) -> None:
        """Raise OSError if the last record could not be written."""
        if self.error is not None:
            raise OSError(self.error.errno, self.error.strerror, str(self.path))

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if not self.is_main:
            return
        with suppress(OSError, ValueError):  # from a notebook's stream; utils/console.py guards all others
            self.bar.write(text, file=sys.stdout)
            sys.stdout.flush()

    def close(self) -> None:
        if self.is_main:
            self.bar.close()
            os.close(self.file)

    def _flush(self) -> None:
        try:
            while self.pending:
                self.pending = self.pending[os.write(self.file, self.pending) :]
            self.error = None
        except OSError as error:
            self.error = error

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


def _reopen(path: Path, state: TrainState) -> int:
    """Open the log to append, without what was logged of that which is now done again."""
    if path.exists():
        logged = path.read_text(encoding="utf-8", errors="replace")
        lines = [line for line in logged.splitlines() if _is_kept(line, state)]
        write_file(path, "".join(line + "\n" for line in lines))
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)


def _is_kept(line: str, state: TrainState) -> bool:
    try:
        record = json.loads(line)
        again = record["step"] > state.step or (
            record["kind"] == "eval" and record["step"] == state.step and state.owes_evaluation
        )
    except (ValueError, KeyError, TypeError):
        return False  # a line that a crash cut short
    return not again
