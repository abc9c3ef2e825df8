"""The tests' own helpers: a log that is being written, ports, processes that end, ranks left by a failed test."""

import errno
import json
import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest
import torch
from helpers.ranks import end_leftovers, free_port, returned, start_ranks
from helpers.training_runs import records
from helpers.waiting import error_lines, has_logged, lives, newest, records_so_far, until
from torch.distributed import TCPStore

from utils.config.settings import TrainConfig
from utils.runs.log import RunLog
from utils.runs.state import TrainState
from utils.tasks.classification import Classification

TESTS = Path(__file__).parent
LOG = Path("runs/run/log.jsonl")


def log_in_two_halves():
    """Log two updates; the second record is written in two parts, with a pause between them that the test ends."""
    LOG.parent.mkdir(parents=True)
    log = RunLog(LOG.parent, True, TrainState(), 2, Classification(TrainConfig(), ["a", "b"]))
    log.write("start", step=1)
    write = os.write

    def in_halves(file, data):
        os.write = write
        write(file, data[: len(data) // 2])
        Path("half").touch()
        until(Path("go").exists)
        return len(data) // 2

    os.write = in_halves
    log.write("start", step=2)


def test_a_log_that_ends_in_half_a_line_is_read_up_to_it_and_then_on():
    launch = start_ranks(1, log_in_two_halves)
    assert records_so_far(LOG) == [] or has_logged(1)()
    until(Path("half").exists)
    with pytest.raises(json.JSONDecodeError):  # as a reader that expects whole lines sees it
        list(map(json.loads, LOG.read_text().splitlines()))
    assert [record["step"] for record in records_so_far(LOG)] == [1]
    assert has_logged(1)() and not has_logged(2)()
    with pytest.raises(AssertionError, match="ends in half a line"):  # an error in the log of a run that has ended
        records("run")
    Path("go").touch()
    until(has_logged(2))
    assert launch.finish()[0].code == 0
    assert [record["step"] for record in records("run")] == [1, 2]


def test_a_wait_ends_with_its_condition_or_fails():
    turns = iter([0, "", "done", "later"])
    assert until(lambda: next(turns), every=0) == "done" and next(turns) == "later"
    with pytest.raises(AssertionError, match="not true after 0 s"):
        until(lambda: False, seconds=0.01)


def test_a_port_that_was_given_out_is_reserved_and_can_be_served():
    port = free_port()
    with socket.socket() as other, pytest.raises(OSError) as refused:
        other.bind(("", port))
    assert refused.value.errno == errno.EADDRINUSE
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    assert returned(1, serve_and_ask, port) == [b"word"]
    assert len({port, *(free_port() for _ in range(20))}) == 21


def serve_and_ask(port: int) -> bytes:
    served = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    TCPStore("127.0.0.1", port, is_master=False).set("key", "word")
    return served.get("key")


@pytest.mark.parametrize("launcher", [False, True])
def test_ranks_that_a_failed_test_left_behind_are_ended_even_if_stopped(launcher):
    launch = start_ranks(2, time.sleep, 600, launcher=launcher)
    launch.kill(signal.SIGSTOP)
    end_leftovers()
    until(lambda: not any(map(lives, [*launch.pids, *([launch.launcher] if launcher else [])])))
    end_leftovers()  # a second time there is nothing to do
    assert start_ranks(1, os.getpid).finish()[0].code == 0


def test_the_newest_checkpoint_is_the_one_of_the_highest_number():
    for step in (9, 10, 100):
        Path(f"runs/run/checkpoints/step-{step:08d}").mkdir(parents=True)
    assert newest() == 100


def test_our_own_lines_of_error_are_found_among_others():
    written = "[W1 socket.cpp] slow\ntrain.py: error: a\nnote: train.py: error: b\n"
    assert error_lines(written) == ["train.py: error: a"] and error_lines("eval.py: error: c\n", "eval.py") != []


def test_no_test_reads_the_lines_of_a_log_by_hand():
    """A log that a run is still writing may end in half a line: waiting.records_so_far and training_runs.records."""
    by_hand = re.compile(r"json\.loads\b.*splitlines\(\)|log\.jsonl.*read_text\(")
    found = [path.name for path in TESTS.glob("*.py") if by_hand.search(path.read_text())]
    assert set(found) <= {"waiting.py", "test_helpers.py"}


def test_ranks_train_after_torch_export_in_this_process():
    """A forked child could have no backward pass if autograd started threads for the CUDA device pretended here."""
    torch.export.export(torch.nn.Linear(2, 2), (torch.ones(2, 2),))
    torch.ones(1, requires_grad=True).backward()
    assert returned(2, gradient) == [3.0, 3.0]


def gradient():
    """The gradient of 3x."""
    number = torch.ones((), requires_grad=True)
    (3 * number).backward()
    return float(number.grad)
