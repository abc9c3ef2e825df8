"""What a user sees of a run: tables, one progress bar, and log.jsonl."""

import json
import math
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tqdm import tqdm

from utils.files import named, write_file
from utils.state import TrainState


def overview(run: Any, places: list[str]) -> list[tuple[str, str]]:
    """The rows of the table that a run (train.py's) starts with; `places` are where the ranks are."""
    plan, processes, parameters = run.plan, len(places), sum(p.numel() for p in run.module.parameters())
    over = f" on {run.ranks.interface}" if run.ranks.interface else ""
    return [
        *((f"rank {rank}", place) for rank, place in enumerate(places)),
        ("backend", f"{run.ranks.backend}{over}, precision {run.accelerator.mixed_precision}"),
        ("data", f"{run.config.data}: {plan.samples} training, {len(run.data.evaluation)} {run.data.evaluation.name}"),
        ("model", f"{run.config.model}, {parameters:,} parameters, {run.spec.describe()} images"),
        ("batch", plan.describe(processes)),
        ("updates", f"{plan.updates_per_epoch} per epoch, {run.updates} in all, from {run.state.step}"),
    ]


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


def outcome(state: TrainState, result: dict | None, done: bool) -> list[tuple[str, str]]:
    """The rows of a run's last table."""
    rows = [("accuracy", f"{result['accuracy']:.4f}"), ("loss", f"{result['loss']:.4f}")] if result else []
    if done and result is None:
        rows = [("finished", f"{state.step} updates were done before; raise --epochs or --max_steps to go on")]
    if state.best_accuracy is not None:
        rows.append(("best", f"{state.best_accuracy:.4f} at update {state.best_step}"))
    return [*rows, ("training", f"{state.seconds:.1f} s, {state.images / max(state.seconds, 1e-9):.0f} images/s")]


def table(title: str, rows: list[tuple[str, Any]]) -> str:
    """Two aligned columns under a title."""
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    rule = "─" * max(len(line) for line in [title, *lines])
    return "\n".join([title, rule, *lines, rule])


def clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    return time.strftime("%-H:%M:%S" if seconds >= 3600 else "%-M:%S", time.gmtime(seconds))
