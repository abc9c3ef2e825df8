"""From the environment that a launcher leaves behind to the topology of the run. Needs no torch."""

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Topology:
    """Where this process stands: its global rank of `world_size`, its rank of `local_world_size` on this machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def read_topology(env: Mapping[str, str] | None = None) -> Topology:
    """Read RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE as accelerate and torchrun export them.

    Without them the run is one process. Raises ValueError when they are incomplete or contradict each other, or when
    several processes were asked for and the launcher started one.
    """
    env = os.environ if env is None else env
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    missing = [name for name in names if name not in env]
    if len(missing) == len(names):
        # Accelerate's single-process launcher exports an address only when more than one process was asked for.
        if "ACCELERATE_MIXED_PRECISION" in env and "MASTER_ADDR" in env:
            raise ValueError(
                "several processes were asked for but accelerate started one (--cpu and MULTI_CPU do that); "
                "use --config_file accelerate_configs/2cpu.yaml, with --num_processes N for another number"
            )
        return Topology()
    if missing:
        raise ValueError(f"{', '.join(missing)} not set although {_present(env, names)}; export all three, or none")
    rank, world_size, local_rank = (_integer(env, name) for name in names)
    local_world_size = _integer(env, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in env else world_size
    if not 0 <= rank < world_size or not 0 <= local_rank < local_world_size <= world_size:
        raise ValueError(
            f"contradictory environment: RANK={rank} WORLD_SIZE={world_size} LOCAL_RANK={local_rank} "
            f"LOCAL_WORLD_SIZE={local_world_size}; ranks count from 0 and lie below their world size"
        )
    if world_size > 1:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not env.get(name):
                raise ValueError(f"{name} is not set: {world_size} processes need an address to meet at")
        _integer(env, "MASTER_PORT")
    return Topology(rank, world_size, local_rank, local_world_size)


def threads_per_process(topology: Topology) -> int:
    """An equal share of the processor cores that this process may use, at least one.

    The launchers export OMP_NUM_THREADS=1 for safety; it counts only when neither can have set it.
    """
    launched = topology.world_size > 1 or "ACCELERATE_MIXED_PRECISION" in os.environ
    if not launched and os.environ.get("OMP_NUM_THREADS", "").isdigit():
        return max(1, int(os.environ["OMP_NUM_THREADS"]))
    return max(1, len(os.sched_getaffinity(0)) // topology.local_world_size)


def is_launched() -> bool:
    """Whether torchrun or accelerate started this process and waits for it."""
    return "TORCHELASTIC_RUN_ID" in os.environ or "ACCELERATE_DYNAMO_BACKEND" in os.environ


def launcher() -> int | None:
    """The process number of the launcher; None without one, 0 when it is gone already."""
    if not is_launched():
        return None
    parent = os.getppid()
    return 0 if parent == 1 and not _names_script(_command_of(parent)) else parent


def restarts_are_possible() -> bool:
    """Whether a launcher started this process that can start it again."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def restarts() -> int:
    """How often the launcher has started this run again (--max_restarts)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def typed_command(arguments: Sequence[str] | None = None) -> list[str]:
    """The command that started the run, the launcher's if there is one; `arguments` are the script's own."""
    command = _command_of(os.getppid()) if is_launched() else []
    if not _names_script(command):
        command = [sys.executable, sys.argv[0], *(sys.argv[1:] if arguments is None else arguments)]
    if len(command) > 1 and Path(command[1]).name in ("accelerate", "accelerate-launch", "torchrun"):
        command = command[1:]
    name = Path(command[0]).name
    return [name if shutil.which(name) in (command[0], shutil.which(command[0])) else command[0], *command[1:]]


def _command_of(process: int) -> list[str]:
    with suppress(psutil.Error):
        return psutil.Process(process).cmdline()
    return []


def _names_script(command: Sequence[str]) -> bool:
    return any(Path(word).name == Path(sys.argv[0]).name for word in command)


def resume_command(command: Sequence[str], output_dir: str, run_name: str) -> str:
    """The shell command that goes on with the run that `command` started."""
    kept, skip = [], False
    for word in command:
        name = word.split("=")[0]
        if not skip and name not in ("--resume", "--run_name", "--output_dir"):
            kept.append(word)
        skip = not skip and name == word and name in ("--resume", "--run_name", "--output_dir")
    place = ["--output_dir", output_dir] if output_dir != "runs" else []
    return shlex.join([*kept, *place, "--run_name", run_name, "--resume", "auto"])


def _present(env: Mapping[str, str], names: tuple[str, ...]) -> str:
    return " and ".join(f"{name}={env[name]}" for name in names if name in env)


def _integer(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise ValueError(f"{name}={env[name]!r} is no whole number; unset it or set it right") from None
