"""A rank that dies or hangs ends the run on all ranks, and a restart continues it."""

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from helpers.environments import variables_of
from helpers.ranks import returned, run_ranks, start_ranks
from helpers.training_runs import MLP as FLAGS
from helpers.training_runs import (
    codes,
    full,
    same_tensors,
    slow_train,
    steps,
    train_run,
    weights,
    words,
)
from helpers.waiting import SOON, has_ended, has_logged, until
from torch.distributed import HashStore, TCPStore

import train
from utils.errors import UserError, is_lost_rank
from utils.ranks import ranks as ranks_module
from utils.ranks.session import distributed_session
from utils.settings.train import TrainConfig
from utils.training import setup

ENDLESS = [*FLAGS, "--max_steps", "1000000"]


@pytest.fixture
def store():
    """The store that a launcher keeps through restarts, at a port of its own choice."""
    return TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
    )


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_ends_the_others_within_seconds(victim):
    launch = start_ranks(3, slow_train, ENDLESS)
    until(has_logged(10))
    os.kill(launch.pids[victim], signal.SIGKILL)
    outcomes = launch.finish_soon()
    del outcomes[victim]
    assert codes(outcomes) == [2, 2]
    assert any("another process of this run exited" in outcome.err for outcome in outcomes)


def test_a_rank_that_dies_while_the_others_wait_for_its_download_ends_them_too():
    launch = start_ranks(2, _load_slowly)
    until(Path("loading").exists)
    os.kill(launch.pids[1], signal.SIGKILL)
    survivor, _ = launch.finish_soon()
    assert survivor.code == 2 and "another process of this run exited" in survivor.err


def _serve() -> None:
    served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    _tell_port(served.port)
    time.sleep(600)


def _tell_port(port: int | str) -> None:
    Path("part").write_text(str(port))
    Path("part").rename("port")


def _store_of_rank_0() -> TCPStore:
    until(Path("port").exists)
    return TCPStore("127.0.0.1", int(Path("port").read_text()), is_master=False)


def test_a_store_whose_process_was_killed_is_reported_as_a_lost_rank():
    """Ranks that have not met all others yet wait in the store, which rank 0 may serve."""
    launch = start_ranks(1, _serve)
    found = _store_of_rank_0()
    launch.kill()
    launch.finish()
    with pytest.raises(RuntimeError) as raised:
        found.check(["session"])
    assert is_lost_rank(raised.value)


def _connect_late(late: str) -> None:
    """Train; rank `late` connects only when the test says so."""
    connect = torch.distributed.init_process_group

    def slow(*arguments, **more):
        if os.environ["RANK"] == late:
            Path("met").touch()
            until(Path("go").exists)
        connect(*arguments, **more)

    torch.distributed.init_process_group = slow
    if os.environ["RANK"] == "0":
        _tell_port(os.environ["MASTER_PORT"])
    train.main([*FLAGS, "--timeout", "300"])


@pytest.mark.full
def test_a_rank_that_dies_while_it_connects_ends_the_others_long_before_the_timeout():
    """Otherwise gloo tries for a minute to connect to it."""
    launch = start_ranks(3, _connect_late, "1")
    until(Path("met").exists)
    found = _store_of_rank_0()
    session = found.get("session").decode()
    until(lambda: found.check([f"{session}/group/0//cpu//0/2"]))  # where gloo publishes the address
    os.kill(launch.pids[2], signal.SIGKILL)
    Path("go").touch()
    assert codes(launch.finish_soon())[:2] == [2, 2]


def _connect_after_the_time():
    go = threading.Event()
    torch.distributed.new_group = lambda **_: go.wait() and "a group"
    ranks_module.connect_timeout = lambda *_: 0.1
    with distributed_session("train.py", TrainConfig()) as ranks:
        threads = threading.active_count()
        ranks.backend, ranks.interface = "gloo", "lo"
        with pytest.raises(UserError, match="could not connect"):
            ranks._connect(HashStore())
        assert threading.active_count() > threads
        go.set()
        until(lambda: threading.active_count() == threads)
        return ranks.gather("mine")  # without a group, as a single process


def test_ranks_that_connect_after_the_error_was_reported_do_not_use_the_connection():
    assert returned(1, _connect_after_the_time) == [["mine"]]


def _load_slowly():
    load_data = setup.load_data

    def slow(*arguments):
        if os.environ["RANK"] == "1":  # rank 0 goes first
            Path("loading").touch()
            time.sleep(600)
        return load_data(*arguments)

    setup.load_data = slow
    train.main(FLAGS)


def _stop_rank_1(function, flags) -> tuple[float, list]:
    """Train on two ranks and suspend rank 1; returns the seconds until rank 0 has ended, and how
    both ended.
    """
    launch = start_ranks(2, function, flags)
    until(has_logged(10))
    stopped = time.monotonic()
    os.kill(launch.pids[1], signal.SIGSTOP)
    until(lambda: has_ended(launch.pids[0]))
    waited = time.monotonic() - stopped
    os.kill(launch.pids[1], signal.SIGKILL)
    return waited, launch.finish()


@pytest.mark.full
def test_a_rank_that_hangs_ends_the_others_within_the_timeout():
    waited, outcomes = _stop_rank_1(slow_train, [*ENDLESS, "--timeout", "10"])
    # The other may have waited for it before it was stopped, but not half of the timeout.
    assert 5 < waited < SOON and outcomes[0].code == 2
    assert "another process of this run exited or stopped answering" in outcomes[0].err


def _train_with_restarts(flags):
    os.environ["TORCHELASTIC_MAX_RESTARTS"] = "1"
    slow_train(flags)


@pytest.mark.full
def test_with_restarts_a_silent_rank_ends_the_others_before_the_timeout():
    """A machine without power closes no connection."""
    waited, outcomes = _stop_rank_1(_train_with_restarts, ENDLESS)
    assert 25 < waited < 90 and outcomes[0].code == 2


@pytest.mark.full
@pytest.mark.parametrize("processes, named", [full(2, True), (1, False)])
def test_a_restart_by_the_launcher_goes_on_in_the_folder_of_the_attempt_before(
    processes, named, store
):
    """With and without --run_name, without --resume: the launcher repeats the same command."""
    flags = [*FLAGS, *words("--max_steps 80 --save_every 10"), *["--run_name", "run"][: 2 * named]]
    assert attempt(store, processes, 0, flags, 33) == {1}
    (folder,) = Path("runs").iterdir()
    assert attempt(store, processes, 1, flags, 57) == {1}
    assert attempt(store, processes, 2, flags) == {0}
    assert list(Path("runs").iterdir()) == [folder]
    assert steps(folder.name, "start") == [0, 30, 50]
    train_run(processes, "whole", *flags, "--run_name", "whole")
    assert same_tensors(weights(folder.name), weights("whole"))


def attempt(store, processes, number, flags, fails_at=None, function=None) -> set[int]:
    """The exit codes of one attempt under a launcher that keeps the store, as torchrun does."""
    given = number, store.port, processes, flags, fails_at
    return set(codes(run_ranks(processes, function or _attempt, *given)))


def _attempt(number, port, processes, flags, fails_at):
    where = f"TORCHELASTIC_RUN_ID=test TORCHELASTIC_RESTART_COUNT={number} MASTER_PORT={port}"
    where += " TORCHELASTIC_USE_AGENT_STORE=True MASTER_ADDR=127.0.0.1"
    if processes == 1:
        where += " RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1"
    os.environ |= variables_of(where)
    update = train.train_update

    def failing(run, batches):
        if run.state.step == fails_at:
            raise RuntimeError("planted")
        update(run, batches)

    train.train_update = failing
    train.main(flags)


@pytest.mark.full
def test_a_restart_before_the_first_checkpoint_starts_again_in_the_same_folder(store):
    flags = [*FLAGS, *words("--max_steps 40 --run_name run")]
    attempt(store, 2, 0, flags, 7)
    assert attempt(store, 2, 1, flags) == {0}
    assert steps("run", "start") == [0, 0]
    assert steps("run", "train") == list(range(5, 41, 5))


@pytest.mark.full
def test_a_restart_goes_back_once_to_the_checkpoint_that_was_asked_for(store):
    flags = [*FLAGS, *words("--save_every 10 --keep 9 --run_name run")]
    train_run(1, "run", *flags, "--max_steps", "40")
    flags += words("--max_steps 60 --resume runs/run/checkpoints/step-00000010")
    assert 0 not in attempt(store, 2, 0, flags, function=_attempt_that_cannot_load)
    assert attempt(store, 2, 1, flags, 33) == {1}
    assert attempt(store, 2, 2, flags) == {0}
    assert steps("run", "start") == [0, 10, 30]


def _attempt_that_cannot_load(*arguments):
    def fail(config):
        raise RuntimeError("planted")

    setup.load_data = fail
    _attempt(*arguments)
