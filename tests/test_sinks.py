"""Sinks get each record of log.jsonl once, and their errors do not end a run."""

import errno
import io
import json
import os
import re
import signal
import sys
import threading
from pathlib import Path

import pytest
from helpers.ranks import run_ranks, start_ranks
from helpers.training_runs import MLP, records, returned, slow_train
from helpers.waiting import SOON, has_logged, records_so_far, until

from utils.config.settings import TrainConfig
from utils.console import say
from utils.launch.exits import exit_with_error
from utils.runs.log import SINKS, ProgressBar, RunLog, is_kept
from utils.runs.state import TrainState
from utils.tasks.classification import Classification
from utils.tasks.task import Task

FLAGS = [*MLP, "--max_train_samples", "240", "--global_batch_size", "24", "--max_steps", "12"]
FLAGS += ["--log_every", "1", "--eval_every", "5", "--save_every", "4"]
COPY = Path("runs/run/copy.jsonl")

TASK = Classification(TrainConfig(), ["a", "b"])


class Copy:
    """Copies the records to a file, and drops those that a resumed run repeats."""

    def __init__(self, folder: Path, state: TrainState, updates: int, task: Task):
        Path(f"sink-of-{os.environ.get('RANK', 0)}").touch()
        copy = folder / "copy.jsonl"
        kept = [record for record in records_so_far(copy) if is_kept(record, state)]
        copy.write_text("".join(json.dumps(record) + "\n" for record in kept))
        self.file = copy.open("a")

    def write(self, record: dict) -> None:
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()

    def close(self) -> None:
        Path("closed").touch()
        self.file.close()


class Failing(Copy):
    """Cannot store the record of update 3."""

    def write(self, record: dict) -> None:
        if record["step"] == 3:
            raise OSError(errno.ENOSPC, "No space left on device", "tracker.db")
        super().write(record)


def train_with(sink, *flags: str, hold_at: int | None = None) -> None:
    SINKS["copy"] = sink
    slow_train([*FLAGS, *flags], 0.0, hold_at)


def hold_at_7() -> None:
    train_with(Copy, hold_at=7)


def test_a_sink_of_the_main_process_gets_the_records_of_the_log_and_is_closed():
    returned(2, train_with, Copy)
    assert records_so_far(COPY) == records("run") != []
    assert list(Path().glob("sink-of-*")) == [Path("sink-of-0")] and Path("closed").exists()


def test_a_resumed_run_gives_a_sink_no_record_twice_and_leaves_none_out():
    launch = start_ranks(2, hold_at_7)
    until(has_logged(7))
    until(lambda: len(records_so_far(COPY)) >= 9)  # start, updates 1 to 7, evaluation 5
    launch.kill(signal.SIGKILL)
    launch.finish()
    assert not Path("closed").exists()
    returned(2, train_with, Copy, "--resume", "auto")
    found = records_so_far(COPY)
    assert found == records("run")
    places = [(r["kind"], r["step"]) for r in found if r["kind"] in ("train", "eval")]
    expected = [("train", step) for step in range(1, 13)] + [("eval", step) for step in (5, 10, 12)]
    assert sorted(places) == sorted(expected)


def test_an_evaluation_that_is_repeated_reaches_a_sink_once():
    """A run that stopped during an evaluation owes it."""
    state = TrainState(step=5, owes_evaluation=True)
    kept = [("train", 5), ("eval", 4), ("start", 5)]
    for kind, step in [*kept, ("eval", 5), ("train", 6), ("start", 6)]:
        assert is_kept({"kind": kind, "step": step}, state) == ((kind, step) in kept)
    assert is_kept({"kind": "eval", "step": 5}, TrainState(step=5))
    for damaged in ({}, {"kind": "eval"}, None, 3, {"kind": "a", "step": "5"}):
        assert not is_kept(damaged, state)


def test_a_sink_that_fails_is_closed_with_one_line_and_the_run_goes_on():
    outcomes = run_ranks(2, train_with, Failing)
    assert [(outcome.code, outcome.err) for outcome in outcomes] == [(0, ""), (0, "")]
    said = [line for line in outcomes[0].out.splitlines() if "sink" in line]
    assert said == ["sink copy: tracker.db: No space left on device; the run continues without it"]
    assert [record["step"] for record in records_so_far(COPY)] == [0, 1, 2]
    assert Path("closed").exists()
    assert [record["step"] for record in records("run", "train")] == list(range(1, 13))
    assert "update 12/12" in outcomes[0].out


def refuse(*_):
    raise OSError(errno.EACCES, "Permission denied", "tracker.db")


def test_a_sink_that_cannot_be_created_ends_the_start_with_one_line():
    outcomes = run_ranks(2, train_with, refuse)
    line = "train.py: error: tracker.db: Permission denied\n"
    assert [(outcome.code, outcome.err) for outcome in outcomes] == [(2, line), (2, "")]


class Kept:
    """Keeps its records, changes those that it gets, and fails to close."""

    def __init__(self, *_):
        self.records = []

    def write(self, record: dict) -> None:
        self.records.append(dict(record))
        record.clear()

    def close(self) -> None:
        raise OSError(errno.EIO, "Input/output error")


def test_no_record_reaches_a_sink_before_it_is_written(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(SINKS, "first", Kept)
    monkeypatch.setitem(SINKS, "second", Kept)
    log, write = RunLog(tmp_path, True, TrainState(), 9, TASK), os.write
    log.write("note", step=1)
    log.write("eval", step=2, split="test", accuracy=0.5, loss=float("inf"), count=4, seconds=1.0)
    shown = "update 2  eval (test)  accuracy 0.5000  loss inf  (4 samples, 1.0 s)\n"
    assert capsys.readouterr().out == shown

    def full(file, data):
        if len(data) < 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data[:10])

    monkeypatch.setattr(os, "write", full)
    log.write("note", step=3)
    monkeypatch.undo()
    log.write("note", step=4)
    with pytest.raises(OSError, match=r"log\.jsonl"):
        log.check()
    for name in ("first", "second"):
        assert [record["step"] for record in log.sinks[name].records] == [1, 2]
        assert log.sinks[name].records[1]["loss"] == float("inf")
    logged = records_so_far(tmp_path / "log.jsonl")
    assert [(record["step"], record.get("loss")) for record in logged] == [(1, None), (2, None)]
    log.close()
    said = "[Errno 5] Input/output error; the run continues without it"
    assert capsys.readouterr().out == f"sink second: {said}\nsink first: {said}\n"


CLEAR = "\x1b[K"


class Screen(io.StringIO):
    """A terminal that both streams write to."""

    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        """What a person sees.

        Text after a carriage return replaces what is there, and a code clears the line.
        """
        shown = []
        for line in self.getvalue().split("\n"):
            row = ""
            for part in line.split("\r"):
                kept = "" if part.startswith(CLEAR) else row[len(part) :]
                row = part.removeprefix(CLEAR) + kept
            shown.append(row.rstrip())
        return shown


def new_screen(monkeypatch) -> Screen:
    """A terminal for both streams."""
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    return screen


def new_bar(updates: int = 3) -> ProgressBar:
    return ProgressBar(Path(), TrainState(), updates, TASK)


def test_lines_and_errors_are_above_the_bar_which_is_not_left_on_the_terminal(monkeypatch):
    screen = new_screen(monkeypatch)
    bar = new_bar()
    for update in range(3):
        bar.advance()
        say(f"line {update}")
        bar.bar.refresh()
        assert "/3 [" in screen.lines()[-1]
    with pytest.raises(SystemExit):
        exit_with_error(ValueError("wrong"), "train.py")
    bar.close()
    assert screen.lines() == ["line 0", "line 1", "line 2", "train.py: error: wrong", ""]


def train_record(step: int, seconds: float) -> dict:
    numbers = {"loss": 0.5, "accuracy": 0.5, "lr": 0.1, "images_per_second": 1.0, "data_wait": 0.0}
    return {"step": step, "epoch": 1, **numbers, "seconds": seconds}


def test_the_time_left_is_that_of_the_updates_or_of_max_seconds_whichever_is_less(tmp_path, capsys):
    for limit, expected in (({}, ["16:30", "00:00"]), ({"max_seconds": 60.0}, ["00:50", "00:00"])):
        log = RunLog(tmp_path, True, TrainState(), 1000, TASK)
        log.write("start", step=0, **limit)
        log.write("train", **train_record(10, 10.0))
        log.write("train", **train_record(990, 62.0))  # beyond the limit
        log.close()
        assert re.findall(r"eta (\S+)", capsys.readouterr().out) == expected


@pytest.mark.parametrize("limit", [{}, {"max_seconds": 60.0}])
def test_a_bar_shows_its_rate_and_one_estimate_of_the_time_left(monkeypatch, limit):
    screen = new_screen(monkeypatch)
    bar = new_bar(1000)
    bar.write({"kind": "start", "step": 0, **limit})
    bar.write({"kind": "train", **train_record(10, 10.0)})
    bar.advance()
    bar.bar.refresh()
    line = screen.lines()[-1]
    bar.close()
    left = "00:50" if limit else "16:30"
    assert " update/s" in line and f"eta={left}" in line and "<" not in line


def test_an_error_is_printed_even_if_the_lock_of_the_bars_is_never_released(capfd):
    """A forked rank, as from a notebook, shares this lock with ranks that may be killed."""

    def fail():
        with pytest.raises(SystemExit):
            exit_with_error(ValueError("wrong"), "train.py")

    with new_bar().bar.get_lock():
        failing = threading.Thread(target=fail, daemon=True)
        failing.start()
        until(lambda: not failing.is_alive(), SOON)
    assert capfd.readouterr().err.endswith("train.py: error: wrong\n")


def test_lines_that_are_piped_away_are_not_mixed_with_a_bar_on_the_terminal(monkeypatch):
    screen, pipe = new_screen(monkeypatch), io.StringIO()
    monkeypatch.setattr(sys, "stdout", pipe)
    bar = new_bar()
    bar.advance()
    say("a line")
    bar.close()
    assert screen.getvalue() == "" and pipe.getvalue() == "a line\n"
