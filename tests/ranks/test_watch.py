"""utils/ranks/watch.py: a rank that waits says for whom; at the timeout all ranks end."""

import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from helpers.ranks import run_ranks, start_ranks
from helpers.training_runs import MLP as FLAGS
from helpers.training_runs import slow_train
from helpers.waiting import SOON, has_ended, has_logged, until

import train
from utils.ranks.heartbeats import Heartbeats
from utils.ranks.watch import Watch
from utils.training import setup
from utils.waiting import DataWait

TIMEOUT = 8
ENDLESS = [*FLAGS, "--max_steps", "1000000", "--timeout"]


def to_file(function, *arguments):
    """Call with this rank's errors in a file, which stays when the process ends without a word to
    Python.
    """
    with Path(f"err-{os.environ['RANK']}").open("w") as sys.stderr:
        function(*arguments)


def said(rank: int) -> str:
    return Path(f"err-{rank}").read_text()


def waited(line: str) -> int:
    """The seconds that a line says a rank has waited; 0 if it says nothing about it."""
    found = re.search(r"rank \d has waited (\d+) s", line)
    return int(found[1]) if found else 0


# rank 0 has the store
@pytest.mark.full
@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.full), 1])
def test_a_stopped_rank_is_named_by_one_that_waits_and_again_in_the_last_line(victim):
    # a rank whose store is stopped too says so after some seven seconds
    timeout = 8 if victim else 15
    launch = start_ranks(3, to_file, slow_train, [*ENDLESS, str(timeout)])
    until(has_logged(10))
    stopped = time.monotonic()
    os.kill(launch.pids[victim], signal.SIGSTOP)
    waiting = [rank for rank in range(3) if rank != victim]
    for rank in waiting:
        until(lambda rank=rank: has_ended(launch.pids[rank]))
    took = time.monotonic() - stopped
    os.kill(launch.pids[victim], signal.SIGKILL)
    outcomes = launch.finish()
    assert [outcomes[rank].code for rank in waiting] == [
        2,
        2,
    ] and timeout / 2 < took < timeout + SOON
    warnings = [
        line
        for rank in waiting
        for line in said(rank).splitlines()
        if waited(line) and "error" not in line
    ]
    # a slow start may have been reported before
    place = rf"for .*rank {victim} \(\S+, process.* is at: .*update \d+"
    assert any(waited(line) < timeout and re.search(place, line) for line in warnings), warnings
    last = [said(rank).splitlines()[-1] for rank in waiting if said(rank)]
    assert any(f"rank {victim} (" in line and "error" in line for line in last), last


def stuck(where: str, rank: str):
    """Train until one rank never comes back from loading the data, or from reading a batch of a
    later update.
    """

    def for_ever(*arguments):
        time.sleep(600)

    if where == "loading":
        load = setup.load_data
        setup.load_data = for_ever if os.environ["RANK"] == rank else load
    else:
        update = train.train_update

        def train_update(run, batches):
            if run.state.step == 12 and os.environ["RANK"] == rank:
                run.ranks.enter("update 13, reading a batch")
                for_ever()
            update(run, batches)

        train.train_update = train_update
    to_file(slow_train, [*ENDLESS, str(TIMEOUT)])


@pytest.mark.full
def test_a_rank_that_never_comes_back_is_named_with_its_place_and_ends_too():
    outcomes = run_ranks(2, stuck, "reading", "1")
    # the stuck one hears that the other has ended
    assert [outcome.code for outcome in outcomes] == [2, 2]
    assert "rank 0 has waited" in said(0)
    assert "for rank 1 (" in said(0) and "at: update 13, reading a batch" in said(0)
    assert "rank 0 ended: " in said(1)


@pytest.mark.full
def test_ranks_that_wait_for_a_slow_download_say_so_and_go_on_waiting():
    launch = start_ranks(2, stuck, "loading", "0")
    until(lambda: Path("err-1").exists() and "at: loading the data\n" in said(1))
    assert "rank 1 has waited" in said(1) and "for rank 0 (" in said(1)
    time.sleep(TIMEOUT + 4)
    assert not any(has_ended(pid) for pid in launch.pids)
    launch.kill()
    launch.finish()


def _wait_for_data_with_output(stream):
    sys.stdout = sys.stderr = stream
    print("a line that cannot be written")
    DataWait.current = DataWait("a batch")
    Watch(0, 1.0, "train.py", lambda: False).start()
    threading.Event().wait(SOON)


def test_a_rank_that_hangs_ends_although_its_output_cannot_be_written():
    with open("/dev/full", "w") as full:
        for stream in (full, None):
            (outcome,) = run_ranks(1, _wait_for_data_with_output, stream)
            assert outcome.code == 2


def held(flags):
    """Train; before update 13 rank 1 waits for a file named `go`.

    Each look at others adds a byte to a file.
    """
    rank = os.environ["RANK"]
    update, exchange = train.train_update, Heartbeats._exchange

    def train_update(run, batches):
        if run.state.step == 12 and rank == "1":
            Path("held").touch()
            until(Path("go").exists)
        update(run, batches)

    def counted(heartbeats):
        exchange(heartbeats)
        if heartbeats._heard:
            with Path("looks").open("a") as file:
                file.write("x")

    train.train_update, Heartbeats._exchange = train_update, counted
    to_file(train.main, ["--run_name", "run", *flags])


def looks() -> int:
    return Path("looks").stat().st_size if Path("looks").exists() else 0


@pytest.mark.full
def test_a_pause_of_all_ranks_does_not_count_as_waiting():
    """As when a terminal or a scheduler stops the whole job while one rank waits for another, here
    for 12 seconds.

    A rank reports that it waits after 10 seconds.
    """
    launch = start_ranks(2, held, [*FLAGS, "--timeout", "100", "--max_steps", "20"])
    until(lambda: Path("held").exists() and looks() > 2)
    launch.kill(signal.SIGSTOP)
    until(lambda: all(psutil.Process(pid).status() == psutil.STATUS_STOPPED for pid in launch.pids))
    before = looks()
    time.sleep(12)  # the pause itself
    launch.kill(signal.SIGCONT)
    until(lambda: looks() > before + 3)
    Path("go").touch()
    assert [outcome.code for outcome in launch.finish()] == [0, 0], [
        said(rank) for rank in range(2)
    ]
    assert said(0) == said(1) == ""
