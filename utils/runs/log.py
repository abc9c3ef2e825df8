"""Write the records of a run to log.jsonl, and pass them to the sinks."""

import json
import math
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from utils.errors import one_line
from utils.files import naming_file, write_file
from utils.runs.sinks import SINKS, Sink, is_kept
from utils.runs.state import TrainState
from utils.tasks.task import Task


class RunLog:
    """log.jsonl and the sinks of the main process: `SINKS` and `more`. On other ranks, its methods do nothing."""

    def __init__(
        self,
        folder: Path,
        is_main: bool,
        state: TrainState,
        updates: int,
        task: Task,
        more: dict[str, Callable[..., Sink]] | None = None,
    ):
        self.path, self.is_main = folder / "log.jsonl", is_main
        self.error: OSError | None = None
        if is_main:
            self.file = _reopen(self.path, state)
            creators = SINKS | (more or {})
            self.sinks = {name: create(folder, state, updates, task) for name, create in creators.items()}
            self.terminal: Any = self.sinks["terminal"]

    def advance(self) -> None:
        """Advance the bar by one update."""
        if self.is_main:
            self.terminal.advance()

    def write(self, kind: str, **values: Any) -> None:
        """Append a record to log.jsonl, then pass it to the sinks. If it cannot be written, see `check`."""
        if not self.is_main or self.error is not None:
            return
        # JSON has no infinity, and the loss of an evaluation can be infinite.
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        line = json.dumps({"kind": kind, **finite}, allow_nan=False).encode() + b"\n"
        try:
            with naming_file(self.path):
                while line:
                    line = line[os.write(self.file, line) :]
        except OSError as error:
            self.error = error
            return
        for name, sink in list(self.sinks.items()):
            self._use(name, sink.write, {"kind": kind, **values})

    def sync(self) -> None:
        """Flush the records to the disk; called before a checkpoint is saved."""
        self.check()
        if self.is_main:
            with naming_file(self.path):
                os.fsync(self.file)

    def check(self) -> None:
        """Raise OSError if a record could not be written; the run then ends."""
        if self.error is not None:
            raise self.error

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self.is_main:
            self.terminal.say(text)

    def close(self) -> None:
        if self.is_main:
            for name in reversed(list(self.sinks)):  # the first is the terminal, which shows the errors of others
                self._use(name, self.sinks.pop(name).close)
            os.close(self.file)

    def _use(self, name: str, method: Callable[..., None], *given: Any) -> None:
        """Call a method of a sink. After an error the sink is closed, and the run continues without it."""
        try:
            method(*given)
        except Exception as error:  # of any class, as trackers are other people's code
            self.say(f"sink {name}: {one_line(error)}; the run continues without it")
            if name in self.sinks:
                with suppress(Exception):
                    self.sinks.pop(name).close()


def _reopen(path: Path, state: TrainState) -> int:
    """Open the log to append, and drop the records of updates and evaluations that will be repeated."""
    if path.exists():
        logged = path.read_text(encoding="utf-8", errors="replace")
        lines = [line for line in logged.splitlines() if _is_kept(line, state)]
        write_file(path, "".join(line + "\n" for line in lines))
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)


def _is_kept(line: str, state: TrainState) -> bool:
    try:
        return is_kept(json.loads(line), state)
    except ValueError:
        return False  # a crash cut the line short
