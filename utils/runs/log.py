"""log.jsonl, the record of a run, and its progress bar."""

import json
import math
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from tqdm import tqdm

from utils.console import clock
from utils.files import naming_file, write_file
from utils.runs.state import TrainState


class RunLog:
    """log.jsonl and the progress bar of the main process. On other ranks, its methods do nothing."""

    def __init__(self, folder: Path, is_main: bool, state: TrainState, updates: int):
        self.path, self.is_main, self.updates = folder / "log.jsonl", is_main, updates
        self.error: OSError | None = None
        if is_main:
            self.file, self.pending = _reopen(self.path, state), b""
            self.bar = tqdm(total=updates, initial=state.step, unit="update", disable=not sys.stderr.isatty())

    def advance(self) -> None:
        """Advance the bar by one update."""
        if self.is_main:
            with suppress(OSError):  # a closed terminal must not end the run
                self.bar.update()

    def write(self, kind: str, **values: Any) -> None:
        """Append a record to log.jsonl and show it. Records that cannot be written are kept for later; see `check`."""
        if not self.is_main:
            return
        # JSON has no infinity, and the loss of an evaluation can be infinite.
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        self.pending += json.dumps({"kind": kind, **finite}, allow_nan=False).encode() + b"\n"
        self._flush()
        if kind == "train":
            self._show_training(values)
        elif kind == "eval":
            self.say(evaluation_line(values))

    def sync(self) -> None:
        """Flush the records to the disk; called before a checkpoint is saved."""
        if self.is_main:
            self._flush()
            self.check()
            with naming_file(self.path):
                os.fsync(self.file)

    def check(self) -> None:
        """Raise OSError if the last record could not be written."""
        if self.error is not None:
            raise OSError(self.error.errno, self.error.strerror, str(self.path))

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if not self.is_main:
            return
        with suppress(OSError, ValueError):  # only a notebook's stream raises these; utils/output.py guards all others
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
            "data": f"{values['data_wait']:.0%}",
        }
        if self.bar.disable:  # no terminal: plain lines instead of a bar
            shown = "  ".join(f"{name} {number}" for name, number in numbers.items())
            eta = (self.updates - values["step"]) * values["seconds"] / max(1, values["step"])
            self.say(f"update {values['step']}/{self.updates}  epoch {values['epoch']}  {shown}  eta {clock(eta)}")
        else:
            self.bar.set_postfix(numbers, refresh=False)


def _reopen(path: Path, state: TrainState) -> int:
    """Open the log to append, and drop the records of updates and evaluations that will be repeated."""
    if path.exists():
        logged = path.read_text(encoding="utf-8", errors="replace")
        lines = [line for line in logged.splitlines() if _is_kept(line, state)]
        write_file(path, "".join(line + "\n" for line in lines))
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)


def _is_kept(line: str, state: TrainState) -> bool:
    """Whether a line of the log was written before the run reached this state."""
    try:
        record = json.loads(line)
        is_owed = record["kind"] == "eval" and record["step"] == state.step and state.owes_evaluation
        return record["step"] <= state.step and not is_owed
    except (ValueError, KeyError, TypeError):
        return False  # a crash cut the line short


def evaluation_line(record: dict) -> str:
    """An evaluation's log record as a line."""
    name = "hold-out" if record["split"].startswith("hold-out") else record["split"]
    return (
        f"update {record['step']}  eval ({name})  accuracy {record['accuracy']:.4f}  top-5 {record['top5']:.4f}  "
        f"loss {record['loss']:.4f}  ({record['count']} samples, {record['seconds']:.1f} s)"
    )
