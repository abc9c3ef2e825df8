"""status.json says whether a run is running, and how it has ended."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from helpers.launched_runs import begin, ranks_of
from helpers.ranks import returned, run_ranks, start_ranks
from helpers.training_runs import (
    BIN,
    MLP,
    ROOT,
    codes,
    full,
    kill_myself,
    records,
    slow_train,
    train_run,
    train_watched,
    words,
)
from helpers.waiting import until

import replay
import train
from utils.waiting import DataWait

FLAGS = [*MLP, "--max_steps", "12", "--log_every", "2"]
ALWAYS = {"state", "update", "time", "host", "process", "command"}
ASK = re.search(r"^(python -c .*lockf.*)$", (ROOT / "docs/resuming.md").read_text(), re.M)


def status(name: str = "run") -> dict:
    return json.loads(Path(f"runs/{name}/status.json").read_text())


def is_locked(name: str = "run") -> bool:
    """What the command of the page answers."""
    command = ASK[1].replace("runs/NAME", f"runs/{name}")
    path = f"{BIN}:{os.environ['PATH']}"
    asked = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, env={"PATH": path}
    )
    assert asked.stdout in ("running\n", "not running\n"), asked
    return asked.stdout == "running\n"


def continued(found: dict) -> list[str]:
    """The flags of the command that continues the run, which the test process cannot type."""
    given = shlex.split(found["command"])
    assert given[-4:] == ["--run_name", "run", "--resume", "auto"]
    return given[given.index("--model") :]


def changes(flags: list[str]) -> list[tuple[int, int, dict]]:
    """For each update, what status.json says after it, and how often it has changed since the
    start.
    """
    seen, names = [], set()

    def after(run):
        path = Path("runs/run/status.json")
        names.add((path.stat().st_ino, path.stat().st_mtime_ns))
        seen.append((run.state.step, len(names), json.loads(path.read_text())))

    train_watched(flags, after=after)
    return seen


@pytest.mark.parametrize("processes", [1, full(2)])
def test_it_changes_with_each_record_and_not_between_them(processes):
    began = time.time()
    seen = returned(processes, changes, FLAGS)[0]
    for step, number, found in seen:
        logged = (step - 1) // 2 * 2  # the record of this update comes after it
        assert found["update"] == logged and number == logged // 2 + 1
        assert found.keys() == ALWAYS and found["state"] == "running"
        assert began < found["time"] < time.time() and found["host"] == socket.gethostname()
    final = status()
    assert final == {**found, **final} and final.keys() == ALWAYS | {"exit_code", "line"}
    assert (final["state"], final["update"], final["exit_code"]) == ("complete", 12, 0)


def test_a_run_that_ends_early_is_complete():
    more = words("--lr 1e-9 --early_stopping 1 --eval_every 3 --max_steps 40 --log_every 20")
    train_run(1, "run", *MLP, *more)
    assert (status()["state"], status()["update"]) == ("complete", records("run")[-1]["step"])
    assert status()["update"] < 40


def stopped_by(number: int, flags: list[str]) -> None:
    """Rank 1 gets a signal in update 5."""

    def before(run):
        if run.state.step == 4 and run.ranks.topology.rank == run.ranks.topology.world_size - 1:
            kill_myself(number)

    train_watched(flags, before)


@pytest.mark.full
@pytest.mark.parametrize("processes", [1, 2])
def test_a_stopped_run_says_so_with_the_command_that_continues_it(processes):
    assert set(codes(run_ranks(processes, stopped_by, signal.SIGUSR1, FLAGS))) == {75}
    found = status()
    assert (found["state"], found["exit_code"]) == ("stopped", 75)
    assert found["line"].startswith(f"Stopped after update {found['update']} of 12 (")
    assert not is_locked()
    returned(processes, train.main, continued(found))
    assert (status()["state"], status()["update"]) == ("complete", 12)


@pytest.mark.full
def test_after_a_kill_it_still_says_running_and_the_lock_is_the_truth():
    launch = start_ranks(2, slow_train, FLAGS, 0.0, 7)
    until(Path("held-0").exists)
    assert (status()["state"], status()["update"]) == ("running", 6) and is_locked()
    launch.kill()
    launch.finish()
    killed = status()
    assert killed["state"] == "running" and not is_locked()
    returned(1, train.main, continued(killed))
    assert (status()["state"], status()["update"]) == ("complete", 12)


def failing(flags: list[str], error: BaseException, on_rank: int) -> None:
    def before(run):
        if run.state.step == 4 and run.ranks.topology.rank == on_rank:
            raise error

    train_watched(flags, before)


@pytest.mark.full
@pytest.mark.parametrize(
    ("error", "on_rank", "code", "line"),
    [
        (OSError(5, "Input/output error", "photo.png"), 0, 2, "photo.png: Input/output error"),
        (ZeroDivisionError("a bug"), 0, 1, "a bug"),
        (
            ZeroDivisionError("a bug"),
            1,
            2,
            "another process of this run exited or stopped answering",
        ),
        full(OSError(5, "Input/output error", "photo.png"), 1, 2, "another process of this run"),
    ],
)
def test_an_error_on_any_rank_is_failed_with_the_line(error, on_rank, code, line):
    outcomes = run_ranks(2, failing, FLAGS, error, on_rank)
    assert outcomes[0].code == code
    found = status()
    assert (found["state"], found["exit_code"], found["update"]) == ("failed", code, 4)
    assert found["line"].startswith(line)


@pytest.mark.full
def test_an_error_that_the_ranks_agree_on_names_its_rank():
    def bad_sample(flags):
        def before(run):
            if run.state.step == 4 and not run.ranks.is_main:
                run.train_batches.error = ValueError("photo.png cannot be read")

        train_watched(flags, before)

    assert codes(run_ranks(2, bad_sample, FLAGS)) == [2, 2]
    assert status()["state"] == "failed"
    assert "rank 1: photo.png cannot be read" in status()["line"]


def test_a_loss_that_is_not_a_number_is_failed():
    outcomes = run_ranks(1, train.main, [*FLAGS, "--run_name", "run", "--lr", "1e30"])
    assert codes(outcomes) == [2] and status()["state"] == "failed"
    assert status()["line"] in outcomes[0].err


@pytest.mark.full
def test_a_run_whose_data_does_not_arrive_is_failed_without_an_exception():
    def without_data(run):
        if run.state.step == 4:
            DataWait.current = DataWait("a batch")
            signal.pause()

    (outcome,) = run_ranks(1, train_watched, [*FLAGS, "--timeout", "1"], without_data)
    assert outcome.code == 2
    assert (status()["state"], status()["exit_code"]) == ("failed", 2)
    assert "a batch has not arrived for " in status()["line"]


def with_broken_status(flags: list[str]) -> None:
    """It cannot be written, as on a disk without space for another file."""

    def before(run):
        Path("runs/run/.status.json.partial").mkdir(exist_ok=True)

    train_watched(flags, before)


@pytest.mark.full
def test_a_status_that_cannot_be_written_does_not_end_the_run():
    returned(1, with_broken_status, FLAGS)
    assert records("run")[-1]["step"] == 12
    assert (status()["state"], status()["update"]) == ("running", 0)  # the last that was written
    assert not is_locked()


def with_another_run_in_its_place(flags: list[str]) -> None:
    def before(run):
        if run.state.step == 4:
            shutil.rmtree("runs/run")
            Path("runs/run").mkdir()
            Path("runs/run/status.json").write_text("theirs")

    train_watched(flags, before)


@pytest.mark.full
def test_the_status_of_another_run_in_the_same_place_is_left_alone():
    assert codes(run_ranks(1, with_another_run_in_its_place, FLAGS)) == [2]
    assert Path("runs/run/status.json").read_text() == "theirs"
    assert os.listdir("runs/run") == ["status.json"]


@pytest.mark.full
def test_a_start_that_is_refused_leaves_the_status_of_the_run():
    train_run(1, "run", *FLAGS)
    before = Path("runs/run/status.json").read_bytes()
    flags = [*FLAGS, "--run_name", "run", "--resume", "auto", "--model", "mnist_cnn"]
    assert codes(run_ranks(1, train.main, flags)) == [2]
    returned(1, replay.main, words("--run runs/run --update 2"))
    assert Path("runs/run/status.json").read_bytes() == before


def test_an_error_of_a_later_run_in_the_same_process_is_not_that_of_the_first():
    def notebook(flags):
        train.main([*flags, "--run_name", "run"])
        train.main([*flags, "--run_name", "other", "--data", "nothing"])

    assert codes(run_ranks(1, notebook, FLAGS)) == [2]
    assert (status()["state"], status()["exit_code"]) == ("complete", 0)


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["accelerate launch, 2 processes", "python"])
def test_a_launcher_ends_with_1_and_the_status_with_75_and_a_command_that_works(launcher):
    process = begin(launcher, "--max_steps", "100000", "--report", "false")
    until(lambda: Path("runs/run/status.json").exists() and status()["update"] > 2)
    assert status()["process"] == ranks_of(process)[0].pid
    process.send_signal(signal.SIGTERM)
    assert process.wait() == (75 if launcher == "python" else 1)
    found = status()
    assert (found["state"], found["exit_code"]) == ("stopped", 75)
    more = f"{found['command']} --max_steps {found['update'] + 2}"
    env = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}"}
    done = subprocess.run(["sh", "-c", more], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert (status()["state"], status()["update"]) == ("complete", found["update"] + 2)
