"""Sinks, such as the terminal or an experiment tracker, show or store the records of log.jsonl.

To add one, write a class with the methods of `Sink` and add it, or a function that creates it, to `SINKS`. All entries
are used. Only the main process has sinks.
"""

import math
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from utils.console import clock
from utils.runs.state import TrainState
from utils.tasks.task import Task


class Sink(Protocol):
    """Receives each record after it is written to log.jsonl.

    After an error the sink is closed and the run continues without it.
    """

    def write(self, record: dict[str, Any]) -> None:
        """Take one record. It should be stored at once, because a killed run does not call `close`."""

    def close(self) -> None:
        """Called at the end of a run that is complete or was asked to stop."""


def is_kept(record: Any, state: TrainState) -> bool:
    """Whether a run resumed from this state keeps the record. It repeats later updates, and an evaluation it owes."""
    try:
        is_owed = record["kind"] == "eval" and record["step"] == state.step and state.owes_evaluation
        return record["step"] <= state.step and not is_owed
    except (KeyError, TypeError):
        return False


# With --max_seconds, because tqdm's own estimate knows only the number of updates.
_WITHOUT_ETA = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}, {rate_fmt}{postfix}]"


class ProgressBar:
    """A progress bar and lines; without a terminal, lines only. The bar is removed at the end."""

    def __init__(self, _folder: Path, state: TrainState, updates: int, task: Task):
        self.updates, self.max_seconds = updates, math.inf
        self.training = list(task.summary(dict.fromkeys(task.training, 1.0), 1.0))
        self.evaluation = {**task.shown, task.metric: task.shown.get(task.metric, task.metric)}
        # The bar is on stderr. If stdout is not the terminal, as with `| tee`, lines on stdout would break it.
        shown = sys.stderr.isatty() and sys.stdout.isatty()
        self.bar = tqdm(total=updates, initial=state.step, unit=" update", leave=False, disable=not shown)

    def write(self, record: dict[str, Any]) -> None:
        if record["kind"] == "start" and "max_seconds" in record:
            self.max_seconds, self.bar.bar_format = record["max_seconds"], _WITHOUT_ETA
        elif record["kind"] == "train":
            self._show_training(record)
        elif record["kind"] == "eval":
            self._show_evaluation(record)

    def advance(self) -> None:
        """Advance the bar by one update."""
        with suppress(OSError):  # a closed terminal must not end the run
            self.bar.update()

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        with suppress(OSError, ValueError):  # only a notebook's stream raises these; utils/output.py guards all others
            self.bar.write(text, file=sys.stdout)
            sys.stdout.flush()

    def close(self) -> None:
        self.bar.close()

    def _show_training(self, record: dict[str, Any]) -> None:
        numbers = {name: f"{record[name]:.4f}" for name in self.training if name in record}
        numbers |= {
            "lr": f"{record['lr']:.2e}",
            "images/s": f"{record['images_per_second']:.0f}",
            "data": f"{record['data_wait']:.0%}",
        }
        by_updates = (self.updates - record["step"]) * record["seconds"] / max(1, record["step"])
        eta = clock(max(0.0, min(by_updates, self.max_seconds - record["seconds"])))
        if self.bar.disable:  # no terminal: plain lines instead of a bar
            shown = "  ".join(f"{name} {number}" for name, number in numbers.items())
            self.say(f"update {record['step']}/{self.updates}  epoch {record['epoch']}  {shown}  eta {eta}")
        else:
            limited = {"eta": eta} if self.max_seconds < math.inf else {}
            self.bar.set_postfix(limited | numbers, refresh=False)

    def _show_evaluation(self, record: dict[str, Any]) -> None:
        name = "hold-out" if record["split"].startswith("hold-out") else record["split"]
        name += f", {record['weights']}" if "weights" in record else ""
        shown = "  ".join(f"{word} {record[key]:.4f}" for key, word in self.evaluation.items() if key in record)
        took = f"({record['count']} samples, {record['seconds']:.1f} s)"
        self.say(f"update {record['step']}  eval ({name})  {shown}  {took}")


# Each is called with the run folder, the state that the run starts from, the number of updates of the whole run and its
# task. A sink with records of an earlier start must drop those that are not kept (`is_kept`), as log.jsonl does.
SINKS: dict[str, Callable[[Path, TrainState, int, Task], Sink]] = {
    "terminal": ProgressBar,
}
