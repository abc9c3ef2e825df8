"""A worker trains the runs of a sweep one after the other. Several workers share the folder of the
sweep and nothing else.

SWEEP/TRIAL.claim    locked by the worker that trains TRIAL, until the run ends
SWEEP/.first         locked by a worker while no run has begun: what all runs share, such as decoded
                     images, is then computed once
"""

import re
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import TextIO

from tqdm import tqdm

from extras.sweep.claims import claimed, open_claim
from extras.sweep.trials import Trial
from utils.config import require
from utils.console import say
from utils.errors import UserError
from utils.files import LOCK, read_json
from utils.ranks import EXIT_RESUME, signals_to_handle


class Worker:
    """Trains what is missing of these runs. As a context, it handles signals, so that a run that is
    stopped saves first.
    """

    def __init__(self, trials: Sequence[Trial]):
        self.trials = trials
        self.failed: dict[str, str] = {}  # the names of the runs that have failed, and why
        self.left: Sequence[Trial] = trials  # what has not ended
        self._began = time.time()
        self._stopped = False
        self._signals: list[int] = []  # received

    def __enter__(self) -> "Worker":
        self._before = {
            number: signal.signal(number, self._on_signal) for number in signals_to_handle()
        }
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def work(self) -> int:
        """Train until no run is left, or until other workers have all that are left; returns the
        exit code.
        """
        while self._find_left():
            if self._stopped or self._signals:
                say("stopped; run the same command again to continue")
                return EXIT_RESUME
            outcome = self._train_one()
            if outcome == "taken":
                rest = len(self.left)
                line = f"other workers train the rest ({rest}); the last one prints the result"
                say("\n".join([*failed_lines(self.failed), line]))
                break
            if outcome == "wait":
                time.sleep(1)
        return 1 if self.failed else 0

    def _find_left(self) -> bool:
        self.left = [trial for trial in self.trials if not self._has_ended(trial)]
        return bool(self.left)

    def _has_ended(self, trial: Trial) -> bool:
        """Whether the run is complete, or has failed since this worker began."""
        status = read_status(trial)
        state = status.get("state")
        if state == "complete":
            self.failed.pop(trial.name, None)  # another worker has trained it again
        elif state == "failed" and status.get("time", 0) > self._began:
            self.failed.setdefault(trial.name, str(status.get("line")))
        return state == "complete" or trial.name in self.failed

    def _train_one(self) -> str:
        """Train the first run that no other process has; returns "trained", "taken" if other
        workers have all of them, or "wait".
        """
        outcomes = set()
        for trial in self.left:
            outcome = self._try(trial)
            if outcome == "trained":
                return outcome
            outcomes.add(outcome)
        return "wait" if "wait" in outcomes else "taken"

    def _try(self, trial: Trial) -> str:
        """Train the run unless another process has it; returns "trained", "taken" by another
        worker, or "wait".
        """
        with open_claim(trial.sweep / f"{trial.name}.claim") as claim:
            if not claimed(claim):
                return "taken"
            if self._has_ended(trial) or is_in_use(trial):
                return "wait"
            with open_claim(trial.sweep / ".first") as first:
                begun = any((each.folder / "status.json").exists() for each in self.trials)
                if not begun and not claimed(first):
                    return "wait"
                self._train(trial, first)
        return "trained"

    def _train(self, trial: Trial, first: TextIO) -> None:
        say(f"run {self.trials.index(trial) + 1} of {len(self.trials)}: {trial.name}")
        before = read_status(trial)
        # in a session of its own: the terminal's signals are passed on below
        process = subprocess.Popen(trial.command, start_new_session=True)
        passed_on = 0
        while (code := process.poll()) is None:
            if not first.closed and (trial.folder / "status.json").exists():
                first.close()
            for number in self._signals[passed_on:]:
                process.send_signal(number)
                passed_on += 1
            time.sleep(0.1)
        if self._signals or self._has_ended(trial) or is_in_use(trial):
            return
        status = read_status(trial)
        line = status["line"] if status != before and "line" in status else "see its output above"
        self._stopped = status != before and status.get("state") == "stopped"
        if not self._stopped:
            self.failed[trial.name] = f"{line} (exit code {code})"

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)


def failed_lines(failed: Mapping[str, str]) -> list[str]:
    """What to print about the runs that have failed."""
    return [f"{name} has failed: {line}" for name, line in failed.items()]


def is_in_use(trial: Trial) -> bool:
    """Whether processes train the run, although no worker has claimed it: theirs was killed."""
    lock = trial.folder / LOCK
    if not lock.exists():
        return False
    with open_claim(lock) as file:
        return not claimed(file)


def read_status(trial: Trial) -> dict:
    """The status of a run; empty if it has none, or an unreadable one after a power failure."""
    with suppress(OSError, UserError):
        return read_json(trial.folder / "status.json")
    return {}


def estimate(trials: Sequence[Trial]) -> None:
    """Print the runs, and the time that they take if all are like the first."""
    for trial in trials:
        print(trial.name)
    command = [*trials[0].command, "--dry_run"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    with suppress(OSError):
        trials[0].sweep.rmdir()  # if it is empty
    require(done.returncode == 0, f"the dry run has failed: {shlex.join(command)}")
    print(done.stdout, end="")
    updates = re.search(r"^updates .* (\d+) in all", done.stdout, re.M)
    seconds = re.search(r"^dry run: .* took ([\d.]+) s", done.stdout, re.M)
    if updates and seconds:
        time_of_all = tqdm.format_interval(len(trials) * int(updates[1]) * float(seconds[1]))
        condition = f"if each has {updates[1]} updates like the first one, which takes longest"
        print(f"{len(trials)} runs: {time_of_all}, {condition}")
