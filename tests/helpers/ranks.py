"""Run a function as the ranks of a launch: processes over gloo, forked in a tenth of a second."""

import contextlib
import faulthandler
import gc
import io
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import psutil
import torch

from helpers.waiting import PATIENCE, SOON
from utils.data.sources import SOURCES, open_digits
from utils.settings.train import TrainConfig

# The first backward pass of a process starts autograd's threads, one per device, and a process that
# has such threads can have no forked child with a backward pass. torch.export and FakeTensorMode
# pretend that there is a CUDA device; so the first backward pass has to come before them.
torch.ones(1, requires_grad=True).backward()

ALONE: Any = SimpleNamespace(
    agree=lambda place="": contextlib.nullcontext(),
    local_main_first=lambda place="": contextlib.nullcontext(),
    from_main=lambda action, no_timeout=False: action(),
    check_same=lambda text, what: None,
    any_rank=bool,
    is_main=True,
)  # the ranks of a run with a single process
NOBODY = 65534  # a user and a group without rights
_HELD: deque[socket.socket] = deque()  # ports, see free_port
_RUNNING: list["Launch"] = []


def free_port() -> int:
    """A port that nobody listens on, and that the system gives to nobody else until 32 more have
    been requested.

    It stays bound here, but nobody listens: a server that sets SO_REUSEADDR, as those of PyTorch
    do, may listen on it.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    _HELD.append(held)
    if len(_HELD) > 32:
        _HELD.popleft().close()
    return held.getsockname()[1]


@dataclass
class Outcome:
    """How a rank ended: what its function returned, its exit code, and what it wrote."""

    value: Any
    code: int
    out: str
    err: str


@dataclass(eq=False)
class Launch:
    """Ranks that run: their process numbers, and their launcher's if it has its own."""

    pids: list[int]
    pipes: list[int]
    launcher: int | None = None

    def __post_init__(self):
        self.processes = []
        for pid in [*self.pids, *filter(None, [self.launcher])]:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.processes.append(psutil.Process(pid))
        _RUNNING.append(self)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to every rank."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def finish(self) -> list[Outcome]:
        """Wait for the ranks to end. A killed one, or one that hung, has no output."""
        outcomes = []
        for pid in self.pids:
            with os.fdopen(self.pipes.pop(0), "rb") as pipe:
                data = pipe.read()
            silent = None, None, "", "no answer: it hung, or was killed"
            value, code, out, err = pickle.loads(data) if data else silent
            if self.launcher is None:
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            outcomes.append(Outcome(value, -signal.SIGKILL if code is None else code, out, err))
        if self.launcher is not None:
            os.waitpid(self.launcher, 0)
        _RUNNING.remove(self)
        return outcomes

    def finish_soon(self) -> list[Outcome]:
        """As `finish`, but fails if it takes as long as processes that wait for others."""
        begun = time.monotonic()
        outcomes = self.finish()
        assert time.monotonic() - begun < SOON, "a rank went on alone"
        return outcomes

    def end(self) -> None:
        """Kill the processes that are left after a failed test."""
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):  # or its number was reused
                process.kill()
        for reading in self.pipes:
            with contextlib.suppress(OSError):
                os.close(reading)
        for child in self.pids if self.launcher is None else [self.launcher]:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)


def end_leftovers() -> None:
    """End the ranks and loader processes that nobody has waited for, so that they disturb no other
    test.
    """
    while _RUNNING:
        _RUNNING.pop().end()
    for child in multiprocessing.active_children():
        child.kill()
        child.join()


def run_ranks(
    processes: int, function: Callable, *arguments: Any, seconds: float = PATIENCE
) -> list[Outcome]:
    """Run `function(*arguments)` on that many ranks at once, with the environment that torchrun
    would set.

    One process gets no such environment, as under plain python. A rank still running after
    `seconds` is killed, and the test fails.
    """
    return start_ranks(processes, function, *arguments, seconds=seconds).finish()


def start_ranks(
    processes: int,
    function: Callable,
    *arguments: Any,
    seconds: float = PATIENCE,
    launcher: bool = False,
) -> Launch:
    """Start the ranks and come back at once; with `launcher` they have a parent of their own, as
    under torchrun.
    """
    port, pipes = free_port(), [os.pipe() for _ in range(processes)]
    sys.stdout.flush()

    def fork_all() -> list[int]:
        return [
            _fork(rank, processes, port, pipes, function, arguments, seconds)
            for rank in range(processes)
        ]

    if not launcher:
        started = Launch(fork_all(), [reading for reading, _ in pipes])
    else:
        hear, tell = os.pipe()
        parent = os.fork()
        if not parent:
            try:
                # torchrun's sign, or that of accelerate's launcher for one process
                sign = "TORCHELASTIC_RUN_ID" if processes > 1 else "ACCELERATE_DYNAMO_BACKEND"
                os.environ[sign] = "no"
                pids = fork_all()
                os.write(tell, pickle.dumps(pids))
                for _, writing in pipes:
                    os.close(writing)
                for pid in pids:
                    os.waitpid(pid, 0)
            finally:
                os._exit(0)
        started = Launch(
            pickle.loads(os.read(hear, 65536)), [reading for reading, _ in pipes], parent
        )
        os.close(hear)
        os.close(tell)
    for _, writing in pipes:
        os.close(writing)
    return started


def as_nobody(function: Callable, *arguments: Any) -> Any:
    """Run it in a rank without root's rights, for whom no folder is read-only."""
    if os.geteuid() == 0:
        # scikit-learn may be in a folder that only root may enter
        digits = open_digits("", TrainConfig())
        SOURCES["digits"] = lambda *_: digits
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    return function(*arguments)


def returned(
    processes: int, function: Callable, *arguments: Any, seconds: float = PATIENCE
) -> list[Any]:
    """What `function(*arguments)` returns on each rank; fails with a rank's output if one ended
    badly.
    """
    outcomes = run_ranks(processes, function, *arguments, seconds=seconds)
    for rank, outcome in enumerate(outcomes):
        assert outcome.code == 0, (
            f"rank {rank} of {processes} ended with {outcome.code}:\n{outcome.err}{outcome.out}"
        )
    return [outcome.value for outcome in outcomes]


def _fork(
    rank: int,
    processes: int,
    port: int,
    pipes: list,
    function: Callable,
    arguments: tuple,
    seconds: float,
):
    # else the first collection in the child copies all of this process's memory to count references
    gc.freeze()
    child = os.fork()
    if child:
        gc.unfreeze()
        return child
    for number, (reading, writing) in enumerate(pipes):
        os.close(reading)
        if number != rank:
            os.close(writing)
    writing = pipes[rank][1]
    code, value, out, err = 1, None, io.StringIO(), io.StringIO()
    try:
        # a handler, not a timer thread: a rank that is forked by a rank would wait for that thread
        faulthandler.unregister(signal.SIGALRM)
        # nohup hides the latter from all that it starts
        for number in (signal.SIGALRM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        # where each thread of a rank that hangs waits: pytest shows it with the failed test
        faulthandler.register(signal.SIGALRM, file=sys.__stderr__, chain=True)
        signal.alarm(int(seconds))
        names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT"
        values = rank, rank, processes, processes, "127.0.0.1", port
        for name, value in zip(names.split(" "), values, strict=True):
            os.environ.pop(name, None)
            os.environ |= {name: str(value)} if processes > 1 else {}
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                value, code = function(*arguments), 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
            except BaseException:
                traceback.print_exc()
            threading._shutdown()  # Python waits for threads before it exits; os._exit does not
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(pickle.dumps((value, code, out.getvalue(), err.getvalue())))
    finally:
        os._exit(code)
