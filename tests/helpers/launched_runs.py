"""Runs under the real launchers, for signals and kills."""

import subprocess
from contextlib import suppress
from pathlib import Path

import psutil

from helpers.ranks import free_port
from helpers.training_runs import BIN, ROOT, clean_environment, words
from helpers.waiting import PATIENCE

FLAGS = words("--data synthetic/10x28x20000 --model mlp --global_batch_size 120 --lr 0.01")
FLAGS += words("--log_every 1 --save_every 20 --eval_every 1000 --run_name run")
FLAGS += ["--timeout", str(PATIENCE)]
_LAUNCH = ["accelerate", "launch", "--config_file"]
LAUNCHERS = {
    "accelerate launch, 2 processes": [*_LAUNCH, f"{ROOT}/accelerate_configs/2cpu.yaml"],
    "accelerate launch, 1 process": [*_LAUNCH, f"{ROOT}/accelerate_configs/cpu.yaml"],
    "torchrun, 2 processes": ["torchrun", "--nproc_per_node", "2", "--master_port", "0"],
    "python": ["python"],
}
_STARTED: list[subprocess.Popen] = []


def begin(launcher: str, *flags: str, restarts: int = 0) -> subprocess.Popen:
    """Start train.py in runs/run, with its output in out.txt; `restarts` is the launcher's
    --max_restarts.
    """
    program, *more = LAUNCHERS[launcher]
    if "--master_port" in more:
        more[more.index("--master_port") + 1] = str(free_port())
    if restarts:
        place = 1 if "launch" in more else 0
        more[place:place] = ["--max_restarts", str(restarts)]
    clean = clean_environment()
    command = [str(BIN / program), *more, f"{ROOT}/train.py", *FLAGS, *flags]
    with Path("out.txt").open("w") as out:
        _STARTED.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=clean))
    return _STARTED[-1]


def end_launched() -> None:
    """A failed test leaves no run behind that disturbs the next."""
    end_commands(_STARTED)


def end_commands(started: list[subprocess.Popen]) -> None:
    """Kill what is left of the commands and of what they started, and empty the list."""
    while started:
        process = started.pop()
        if process.poll() is None:  # else its number may have been reused
            for child in psutil.Process(process.pid).children(recursive=True):
                with suppress(psutil.Error):
                    child.kill()
        process.kill()
        process.wait()


def ranks_of(process: subprocess.Popen) -> list[psutil.Process]:
    """The training processes: the launcher's children, or the process itself under plain python."""
    children = [
        child for child in psutil.Process(process.pid).children() if "train.py" in _command(child)
    ]
    return children or [psutil.Process(process.pid)]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has just ended
        return ""
