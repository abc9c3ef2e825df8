"""Start commands on the GPUs of this machine, as users do: by accelerate launch."""

import gzip
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from helpers.launched_runs import end_commands
from helpers.training_runs import ROOT, clean_environment
from helpers.waiting import PATIENCE, has_logged, records_so_far, until

# Run the tests of tests/gpu/ on the CPU, in a small size and without their figures, to find
# mistakes in them.
ON_CPU = os.environ.get("LOCKSTEP_GPU_TESTS_ON_CPU") == "1"
# Whether two ranks share a GPU, so that they take turns; tests/gpu/run.py sets it.
SHARED = os.environ.get("LOCKSTEP_GPU_SHARED") == "1" and not ON_CPU
# A folder for the table
REPORT = Path(os.environ.get("LOCKSTEP_GPU_REPORT", ROOT / "build")).absolute()
LIMIT = 540.0  # seconds of a command; none may take ten minutes
# deadlines of the step of tests/gpu/run.py and of the check
_UNTIL = {"step": float(os.environ.get("LOCKSTEP_GPU_UNTIL", "inf")), "check": math.inf}
# PyTorch's process groups for NCCL
NCCL_CLASSES = ["NCCL"]
if hasattr(dist, "ProcessGroupNCCL2") and not ON_CPU:  # since 2.15
    NCCL_CLASSES.append("NCCL2")
_STARTED: list[subprocess.Popen] = []
_SAME: Any = object()


def pick(on_gpu, on_cpu, on_shared_gpu=_SAME):
    """Return `on_cpu` in a dry run, `on_shared_gpu`, if given, when ranks share a GPU, else
    `on_gpu`.
    """
    if ON_CPU:
        return on_cpu
    return on_shared_gpu if SHARED and on_shared_gpu is not _SAME else on_gpu


@dataclass
class Ended:
    """How a command ended: its exit code, its output with the errors, and its seconds."""

    code: int
    out: str
    seconds: float


def environment(**more: str) -> dict[str, str]:
    """The user's environment, in which the GPUs are visible; conftest.py has hidden them from the
    tests.
    """
    env = clean_environment()
    del env["CUDA_VISIBLE_DEVICES"]
    visible = "" if ON_CPU else os.environ["LOCKSTEP_TESTS_GPUS"]
    if visible != "all":
        env["CUDA_VISIBLE_DEVICES"] = visible
    return env | more


@cache
def ask(script: str) -> str:
    """What a line of Python prints in a process that sees the GPUs.

    It can use torch and benchmarks/common.py.
    """
    paths = "import sys; sys.path[:0] = ['.', 'benchmarks', 'tests/gpu']"
    code = f"{paths}; import common, torch; {script}"
    words = [sys.executable, "-c", code]
    return subprocess.check_output(words, text=True, env=environment(), cwd=ROOT).strip()


def gpu_count() -> int:
    """The GPUs that PyTorch finds."""
    known = os.environ.get("LOCKSTEP_GPU_COUNT")
    return int(known or ask("print(torch.cuda.device_count())"))


def begin_check(seconds: float) -> None:
    """Set the deadline of this check, which ends its commands."""
    _UNTIL["check"] = time.time() + seconds


def seconds_left() -> float:
    """The seconds until the check or its step ends."""
    return min(_UNTIL.values()) - time.time()


def command(processes: int, script: str, flags: str = "", launcher: str = "") -> list[str]:
    """`accelerate launch` of a script with the project's configuration, and flags of the launcher.

    Flags are given as they are typed.
    """
    config = f"--config_file {ROOT}/accelerate_configs/{processes}gpu.yaml"
    words = f"-m accelerate.commands.launch {config} {launcher} {ROOT}/{script} {flags}"
    return [sys.executable, *shlex.split(words)]


def begin(words: list[str], out: str = "out.txt", **env: str) -> subprocess.Popen:
    """Start a command with its output in a file; `end_started` ends it."""
    with Path(out).open("w") as file:
        options = {"stdout": file, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
        if gpu_count() == 1:
            env = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"} | env  # two ranks share the GPU
        _STARTED.append(subprocess.Popen(words, env=environment(**env), **options))
    return _STARTED[-1]


def finish(process: subprocess.Popen, out: str = "out.txt", seconds: float = LIMIT) -> Ended:
    """Wait for a command. One that takes longer than `seconds` is killed, and the test fails."""
    begun, seconds = time.monotonic(), max(0.0, min(seconds, seconds_left()))
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        end_started()
        shown = Path(out).read_text()[-3000:]
        raise AssertionError(f"still running after {seconds:.0f} s:\n{shown}") from None
    return Ended(code, Path(out).read_text(), time.monotonic() - begun)


def run(words: list[str], seconds: float = LIMIT, **env: str) -> Ended:
    """Run a command; fails with its output if it fails."""
    ended = finish(begin(words, **env), seconds=seconds)
    assert ended.code == 0, f"exit code {ended.code}:\n{ended.out[-3000:]}"
    return ended


def train(
    processes: int, name: str, flags: str, script="train.py", launcher="", **env: str
) -> list[dict]:
    """Train in runs/NAME; returns the records of its log."""
    run(command(processes, script, f"--run_name {name} {flags}", launcher), **env)
    return records_so_far(Path("runs") / name / "log.jsonl")


def in_start_table(row: str, out: str = "out.txt") -> str:
    """What the table at the start of a command says in a row."""
    lines = Path(out).read_text().splitlines()
    (found,) = {line.removeprefix(row).strip() for line in lines if line.startswith(f"{row} ")}
    return found


def trained(log: list[dict]) -> list[dict]:
    """The train records of a log."""
    return [record for record in log if record["kind"] == "train"]


def losses(log: list[dict]) -> list[float]:
    """The training losses of a log."""
    return [record["loss"] for record in trained(log)]


def traced(name: str) -> Counter[str]:
    """How often the trace of a run with --profile has each operation."""
    with gzip.open(f"runs/{name}/trace-rank0.json.gz") as file:
        return Counter(event.get("name") for event in json.load(file)["traceEvents"])


def largest_difference(one: list[float], other: list[float]) -> float:
    """Of two lists of losses."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def await_update(process: subprocess.Popen, step: int) -> None:
    """Wait until runs/run has logged an update.

    Fails with the output if the command ends before that.
    """
    seconds = min(PATIENCE, seconds_left())
    until(lambda: has_logged(step)() or process.poll() is not None, seconds=seconds)
    assert process.poll() is None, Path("out.txt").read_text()[-3000:]


def end_started() -> None:
    """Kill what is left of the commands."""
    end_commands(_STARTED)


def of_train_py(process: subprocess.Popen) -> list[psutil.Process]:
    """The processes of train.py below a launcher, workers included."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.Error):
            if any(Path(word).name == "train.py" for word in child.cmdline()):
                found.append(child)
    return found


def ranks(process: subprocess.Popen) -> list[psutil.Process]:
    """The ranks of a launch on two processes, in their order."""

    def found() -> list[tuple[str, psutil.Process]] | None:
        pairs = []
        for child in of_train_py(process):
            with suppress(psutil.Error, KeyError):
                pairs.append((child.environ()["RANK"], child))
        return pairs if len({rank for rank, _ in pairs}) == 2 else None

    pairs = until(found, seconds=min(PATIENCE, seconds_left()))
    pairs = sorted(pairs, key=lambda pair: (pair[0], pair[1].create_time()))
    # not their workers
    return [next(child for rank, child in pairs if rank == number) for number in ("0", "1")]


def stop(process: subprocess.Popen) -> None:
    """Send SIGTERM to the ranks of a launch; the launcher of a single one would exit first."""
    for child in of_train_py(process):
        with suppress(psutil.Error):
            child.send_signal(signal.SIGTERM)
