"""Write the records of a run to log.jsonl, then show them on the terminal."""

import json
import math
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tqdm import tqdm

from utils.config import Count, check_plugin, fit, require
from utils.console import say
from utils.files import naming_file, write_file
from utils.launch import update_status
from utils.runs.state import TrainState
from utils.tasks import Task


class RunLog:
    """log.jsonl and the terminal of the main process. On other ranks, its methods do nothing."""

    def __init__(
        self,
        folder: Path,
        is_main: bool,
        state: TrainState,
        updates: int,
        task: Task,
        paused: bool = False,
    ):
        self.path = folder / "log.jsonl"
        self.is_main = is_main
        self.error: OSError | None = None
        if is_main:
            self.file = _reopen(self.path, state, paused)
            self.bar = ProgressBar(state, updates, task)

    def advance(self) -> None:
        """Advance the bar by one update."""
        if self.is_main:
            with suppress(OSError):  # a closed terminal must not end the run
                self.bar.update()

    def write(self, kind: str, **values: Any) -> None:
        """Append a record to log.jsonl, then show it. `check` raises its error."""
        if not self.is_main or self.error:
            return
        line = json.dumps({"kind": kind, **nan_to_none(values)}, allow_nan=False).encode() + b"\n"
        try:
            with naming_file(self.path):
                while line:
                    line = line[os.write(self.file, line) :]
        except OSError as error:
            self.error = error
        else:
            update_status(update=values["step"], time=time.time())
            self.bar.show({"kind": kind, **values})

    def sync(self) -> None:
        """Flush the records to the disk; called before a checkpoint is saved."""
        self.check()
        if self.is_main:
            with naming_file(self.path):
                os.fsync(self.file)

    def check(self) -> None:
        """Raise OSError if a record could not be written; the run then ends."""
        if self.error:
            raise self.error

    def close(self) -> None:
        if self.is_main:
            self.bar.close()
            os.close(self.file)


def nan_to_none(record: Mapping) -> dict:
    """The record with None for NaN and infinity, which JSON lacks."""
    bad = {k for k, v in record.items() if isinstance(v, float) and not math.isfinite(v)}
    return {**record, **dict.fromkeys(bad)}


def read_log(folder: Path) -> list[dict]:
    """The records in log.jsonl. Raises UserError if it is missing or a line is damaged."""
    path = folder / "log.jsonl"
    records = []
    require(path.is_file(), f"{folder}: has no log.jsonl", "name a run folder, such as runs/NAME")
    text = path.read_text(encoding="utf-8", errors="replace")
    # without the last line: a run may be writing it, or was killed meanwhile
    for number, line in enumerate(text.split("\n")[:-1], 1):
        with suppress(ValueError, TypeError, LookupError, RecursionError):
            record = {**json.loads(line)}
            fit(record["step"], Count)
            fit([record["kind"], *record.get("digest", []), *record.get("versions", {})], list[str])
            records.append(record)
        require(len(records) == number, f"{path}: line {number} is damaged", "delete this line")
    return records


def check_log(folder: Path) -> None:
    """Raise UserError if the run in `folder` needs another plug-in, see `check_plugin`."""
    last: dict[str, Any] = {"versions": {}}  # the last value of each name
    for record in read_log(folder):
        last |= record
    check_plugin(folder, last["versions"])


def _reopen(path: Path, state: TrainState, paused: bool) -> int:
    """Open the log to append, and drop the records that will be repeated."""
    if path.exists():
        lines = []
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError, TypeError, KeyError):  # a crash cut the line short
                if is_kept(json.loads(line), state, paused):
                    lines.append(f"{line}\n")
        write_file(path, "".join(lines))
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)


def is_kept(record: Mapping, state: TrainState, paused: bool) -> bool:
    """Whether a run resumed from this state keeps the record.

    The run repeats later updates, a due evaluation, that of --stop_after if it is `paused` here,
    and the end.
    """
    kind = record["kind"]
    step = record["step"]
    is_due = {"eval": state.owes_evaluation, "rung": paused}
    repeated = step == state.step and is_due.get(kind, False)
    return step <= state.step and kind != "end" and not repeated


_BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}, {rate_fmt}{postfix}]"


class ProgressBar(tqdm):
    """A progress bar and lines; without a terminal, lines only. The bar is removed at the end."""

    max_seconds = math.inf

    def __init__(self, state: TrainState, updates: int, task: Task):
        self.training = list(task.summary(dict.fromkeys(task.training, 1.0), 1.0))
        self.evaluation = {**task.shown, task.metric: task.shown.get(task.metric, task.metric)}
        # The bar is on stderr. If stdout is not the terminal, as with `| tee`, lines on stdout
        # would break it.
        shown = sys.stderr.isatty() and sys.stdout.isatty()
        super().__init__(
            total=updates,
            initial=state.step,
            unit=" update",
            leave=False,
            disable=not shown,
            bar_format=_BAR,
        )

    def show(self, record: dict) -> None:
        if record["kind"] == "start":
            self.max_seconds = record.get("max_seconds", math.inf)
        elif record["kind"] == "train":
            self._show_training(record)
        elif record["kind"] in ("eval", "rung"):
            self._show_evaluation(record)

    def _show_training(self, record: dict) -> None:
        names = [*self.training, "grad_norm"]
        numbers = {name: f"{record[name]:.4f}" for name in names if name in record}
        seconds = record["seconds"]
        left = (self.total - record["step"]) * seconds / max(1, record["step"])
        left = max(0.0, min(left, self.max_seconds - seconds))
        numbers |= {
            "lr": f"{record['lr']:.2e}",
            "images/s": f"{record['images_per_second']:.0f}",
            "data": f"{record['data_wait']:.0%}",
            "eta": tqdm.format_interval(left),
        }
        if self.disable:  # no terminal: plain lines instead of a bar
            shown = "  ".join(f"{name} {number}" for name, number in numbers.items())
            say(f"update {record['step']}/{self.total}  epoch {record['epoch']}  {shown}")
        else:
            self.set_postfix(numbers, refresh=False)

    def _show_evaluation(self, record: dict) -> None:
        name = "hold-out" if record["split"].startswith("hold-out") else record["split"]
        name += f", {record['weights']}" if "weights" in record else ""
        known = {key: word for key, word in self.evaluation.items() if key in record}
        shown = "  ".join(f"{word} {record[key]:.4f}" for key, word in known.items())
        took = f"({record['count']} samples, {record['seconds']:.1f} s)"
        say(f"update {record['step']}  {record['kind']} ({name})  {shown}  {took}")
