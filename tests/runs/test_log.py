"""utils/runs/log.py: each record once, and what is printed about it."""

import errno
import io
import json
import os
import re
import sys
import threading

import pytest
from helpers.waiting import SOON, records_so_far, until

from utils.console import say
from utils.launch.exits import exit_with_error
from utils.runs.log import ProgressBar, RunLog
from utils.runs.state import TrainState
from utils.settings.train import TrainConfig
from utils.tasks.classification import Classification

TASK = Classification(TrainConfig(), ["a", "b"])


@pytest.mark.parametrize("owed", [True, False])
def test_a_resumed_run_drops_the_records_that_it_repeats(tmp_path, owed):
    """A run that stopped during an evaluation owes it."""
    places = [("start", 0), ("eval", 4), ("train", 5), ("eval", 5), ("train", 6), ("end", 5)]
    lines = [json.dumps({"kind": kind, "step": step}) for kind, step in places]
    damaged = ["{}", '{"kind": "eval"}', "null", "3", '{"kind": "a", "step": "5"}', '{"kind": "tr']
    (tmp_path / "log.jsonl").write_text("\n".join([*lines, *damaged]))
    RunLog(tmp_path, True, TrainState(step=5, owes_evaluation=owed), 9, TASK).close()
    found = [(record["kind"], record["step"]) for record in records_so_far(tmp_path / "log.jsonl")]
    assert found == places[: 3 if owed else 4]


def test_no_record_is_shown_before_it_is_written(monkeypatch, capsys, tmp_path):
    log, write = RunLog(tmp_path, True, TrainState(), 9, TASK), os.write
    result = {"split": "test", "accuracy": 0.5, "loss": float("inf"), "count": 4, "seconds": 1.0}
    log.write("eval", step=2, **result)
    shown = "update 2  eval (test)  accuracy 0.5000  loss inf  (4 samples, 1.0 s)\n"
    assert capsys.readouterr().out == shown

    def full(file, data):
        if len(data) < 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data[:10])

    monkeypatch.setattr(os, "write", full)
    log.write("eval", step=3, **result)
    monkeypatch.undo()
    log.write("eval", step=4, **result)
    with pytest.raises(OSError, match=r"log\.jsonl"):
        log.check()
    logged = records_so_far(tmp_path / "log.jsonl")
    assert [(record["step"], record["loss"]) for record in logged] == [(2, None)]
    log.close()
    assert capsys.readouterr().out == ""


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
    return ProgressBar(TrainState(), updates, TASK)


def test_lines_and_errors_are_above_the_bar_which_is_not_left_on_the_terminal(monkeypatch):
    screen = new_screen(monkeypatch)
    bar = new_bar()
    for update in range(3):
        bar.update()
        say(f"line {update}")
        bar.refresh()
        assert "/3 [" in screen.lines()[-1]
    with pytest.raises(SystemExit):
        exit_with_error(ValueError("wrong"), "train.py")
    bar.close()
    assert screen.lines() == ["line 0", "line 1", "line 2", "train.py: error: wrong", ""]


def train_record(step: int, seconds: float) -> dict:
    numbers = {"loss": 0.5, "accuracy": 0.5, "lr": 0.1, "images_per_second": 1.0, "data_wait": 0.0}
    return {"step": step, "epoch": 1, **numbers, "seconds": seconds}


def test_the_time_left_follows_from_the_updates(monkeypatch, capsys):
    for number in (10, 990):
        new_bar(1000).show({"kind": "train", **train_record(number, 10.0)})
    assert re.findall(r"eta (\S+)", capsys.readouterr().out) == ["16:30", "00:00"]
    screen = new_screen(monkeypatch)
    bar = new_bar(1000)
    bar.show({"kind": "train", **train_record(10, 10.0)})
    bar.update()
    bar.refresh()
    line = screen.lines()[-1]
    bar.close()
    assert " update/s" in line and "eta=16:30" in line and "<" not in line


def test_an_error_is_printed_even_if_the_lock_of_the_bars_is_never_released(capfd):
    """A forked rank, as from a notebook, shares this lock with ranks that may be killed."""

    def fail():
        with pytest.raises(SystemExit):
            exit_with_error(ValueError("wrong"), "train.py")

    with new_bar().get_lock():
        failing = threading.Thread(target=fail, daemon=True)
        failing.start()
        until(lambda: not failing.is_alive(), SOON)
    assert capfd.readouterr().err.endswith("train.py: error: wrong\n")


def test_lines_that_are_piped_away_are_not_mixed_with_a_bar_on_the_terminal(monkeypatch):
    screen, pipe = new_screen(monkeypatch), io.StringIO()
    monkeypatch.setattr(sys, "stdout", pipe)
    bar = new_bar()
    bar.update()
    say("a line")
    bar.close()
    assert screen.getvalue() == "" and pipe.getvalue() == "a line\n"
