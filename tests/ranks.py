"""Run a function as the ranks of a launch: real processes over gloo, forked in a tenth of a second."""

import contextlib
import io
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class Outcome:
    """How a rank ended: what its function returned, its exit code, and what it wrote."""

    value: Any
    code: int
    out: str
    err: str


def run_ranks(processes: int, function: Callable, *arguments: Any, seconds: float = 120) -> list[Outcome]:
    """Run `function(*arguments)` on that many ranks at once, with the environment that torchrun would set.

    One process gets no such environment, as under plain python. A rank still running after `seconds` is killed, and
    the test fails.
    """
    port = free_port()
    children = [_fork(rank, processes, port, function, arguments, seconds) for rank in range(processes)]
    return [_outcome(*child) for child in children]


def returned(processes: int, function: Callable, *arguments: Any, seconds: float = 120) -> list[Any]:
    """What `function(*arguments)` returns on each rank; fails with a rank's output if one ended badly."""
    outcomes = run_ranks(processes, function, *arguments, seconds=seconds)
    for rank, outcome in enumerate(outcomes):
        assert outcome.code == 0, f"rank {rank} of {processes} ended with {outcome.code}:\n{outcome.err}{outcome.out}"
    return [outcome.value for outcome in outcomes]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _fork(rank: int, processes: int, port: int, function: Callable, arguments: tuple, seconds: float):
    reading, writing = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    os.close(reading)
    code, value, out, err = 1, None, io.StringIO(), io.StringIO()
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(seconds))
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        if processes > 1:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
            os.environ |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "MASTER_PORT": str(port)}
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                value, code = function(*arguments), 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
            except BaseException:
                traceback.print_exc()
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(pickle.dumps((value, out.getvalue(), err.getvalue())))
    finally:
        os._exit(code)


def _outcome(child: int, reading: int) -> Outcome:
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(child, 0)
    value, out, err = pickle.loads(data) if data else (None, "", "no answer: it hung, or was killed")
    return Outcome(value, os.waitstatus_to_exitcode(status), out, err)
