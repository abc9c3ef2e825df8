"""From the environment that a launcher leaves behind to the topology of the run. Needs no torch."""

import os
import re
import socket
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import psutil

from utils.memory import usable_cores

# Who says which process this is: the names of rank, world size, local rank and local world size. torchrun's come first,
# as every launcher inside SLURM or MPI sets them; Open MPI's before SLURM's, as its mpirun may use srun to get around.
_SOURCES = {
    "the environment": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "Open MPI": tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "SLURM": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}
_ENGINES = {  # what an accelerate config may ask for besides plain data parallelism
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "tensor, context or sharded parallelism",
}
_JOB_NAMES = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")  # what Open MPI's processes share, and no other job
_PASS_ON = {"Open MPI": "mpirun -x MASTER_ADDR=HOST", "MPICH": "mpiexec -genv MASTER_ADDR HOST -genv MASTER_PORT PORT"}


@dataclass(frozen=True)
class Topology:
    """Where this process stands: its global rank of `world_size`, its rank of `local_world_size` on this machine.

    The processes meet at `address`:`port`, where rank 0 is; one process needs neither. `source` tells who said so.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    address: str = ""
    port: int = 0
    source: str = "nobody"

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def export(self) -> None:
        """Say it in torchrun's variables, which Accelerate and other libraries read."""
        if self.source != "nobody":
            numbers = (self.rank, self.world_size, self.local_rank, self.local_world_size)
            os.environ |= dict(zip(_SOURCES["the environment"], map(str, numbers), strict=True))
        if self.address:
            os.environ |= {"MASTER_ADDR": self.address, "MASTER_PORT": str(self.port)}


def read_topology(env: Mapping[str, str] | None = None, init_method: str = "env://") -> Topology:
    """Which process this is, as accelerate, torchrun, srun, mpirun or variables set by hand say.

    Without any of them the run is one process. Raises ValueError when they are incomplete or contradict each other, or
    when several processes were asked for and the launcher started one.
    """
    env = os.environ if env is None else env
    for name, engine in _ENGINES.items():
        if env.get(name, "").lower() in ("1", "true", "yes"):
            raise ValueError(f"{engine} is not supported: its checkpoints are of another form; use accelerate_configs/")
    source = next((name for name in _SOURCES if _speaks(env, name)), None)
    if source is None:
        # Accelerate's single-process launcher exports an address only when more than one process was asked for.
        if "ACCELERATE_MIXED_PRECISION" in env and "MASTER_ADDR" in env:
            raise ValueError(
                "several processes were asked for but accelerate started one (--cpu and MULTI_CPU do that); "
                "use --config_file accelerate_configs/2cpu.yaml, with --num_processes N for another number"
            )
        return Topology()
    names = _SOURCES[source]
    needed = (*names, "SLURM_NODEID") if source == "SLURM" else names[:3]
    missing = [name for name in needed if name not in env]
    if missing:
        raise ValueError(f"{', '.join(missing)} not set although {_present(env, names)}; export all of them, or none")
    rank, world_size, local_rank = (_integer(env, name) for name in names[:3])
    if source == "SLURM":
        local_world_size = _tasks_on_node(env[names[3]], _integer(env, "SLURM_NODEID"))
    elif names[3] in env:
        local_world_size = _integer(env, names[3])
    else:
        local_world_size = _all_here(env, source, world_size, init_method)
    if not 0 <= rank < world_size or not 0 <= local_rank < local_world_size <= world_size:
        raise ValueError(
            f"contradictory environment: {_present(env, names)}; ranks count from 0 and lie below their world size"
        )
    if source == "the environment":
        _check_against_slurm(env, rank, world_size)
    if world_size == 1 or init_method != "env://":
        return Topology(rank, world_size, local_rank, local_world_size, source=source)
    address, port = _meeting_point(env, source, local_world_size == world_size)
    return Topology(rank, world_size, local_rank, local_world_size, address, port, source)


def claimed_ranks() -> tuple[str | None, str | None]:
    """Rank and local rank as whoever started this process says them, sensible or not; None for what nobody says."""
    names = next((names for source, names in _SOURCES.items() if _speaks(os.environ, source)), ("", "", ""))
    return os.environ.get(names[0]), os.environ.get(names[2])


def _speaks(env: Mapping[str, str], source: str) -> bool:
    rank, world_size, local_rank, _ = _SOURCES[source]
    if source == "the environment":
        return rank in env or world_size in env or local_rank in env
    if source == "SLURM":  # in a batch script, and in a shell of one task, SLURM_PROCID is 0 and stands for no rank
        return rank in env and env.get(world_size, "1") != "1"
    return rank in env and local_rank in env  # srun may set PMI_RANK, without the others


def _all_here(env: Mapping[str, str], source: str, world_size: int, init_method: str) -> int:
    """The number of all processes, if they meet at an address that no other machine has."""
    place = init_method if init_method != "env://" else f"tcp://{env.get('MASTER_ADDR', 'localhost')}"
    if world_size > 1 and not re.match(r"tcp://(localhost|127\.|\[?::1)", place):
        raise ValueError(f"{_SOURCES[source][3]} is not set: export how many of the processes run on this machine")
    return world_size


def _tasks_on_node(counts: str, node: int) -> int:
    """SLURM's `2(x3),1` means tasks on each node: two on the first three, one on the fourth."""
    tasks = [int(n) for n, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts) for _ in range(int(times or 1))]
    if node >= len(tasks):
        raise ValueError(f"contradictory environment: SLURM_STEP_TASKS_PER_NODE={counts} has no node {node}")
    return tasks[node]


def _check_against_slurm(env: Mapping[str, str], rank: int, world_size: int) -> None:
    """Variables exported in a batch script are the same for all tasks of its srun, which would all be one rank."""
    tasks = env.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks == str(world_size) != "1" and not is_launched(env) and env.get("SLURM_PROCID") != str(rank):
        raise ValueError(
            f"contradictory environment: RANK={rank}, but SLURM_PROCID={env.get('SLURM_PROCID')}; do not export RANK, "
            "WORLD_SIZE and LOCAL_RANK under srun: SLURM's own variables are read"
        )


def _meeting_point(env: Mapping[str, str], source: str, one_machine: bool) -> tuple[str, int]:
    """The address and the port where rank 0 is to be found; MASTER_ADDR and MASTER_PORT always count."""
    address, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    if source != "the environment":
        address = address or ("127.0.0.1" if one_machine else first_node(nodes) if nodes else None)
        port = port or _port_of_job(env, one_machine)
    for name, value in (("MASTER_ADDR", address), ("MASTER_PORT", port)):
        if not value:
            fix = f"; {_PASS_ON[source]} passes it on" if source in _PASS_ON else "; or give --init_method"
            text = "the processes need an address and a port of rank 0's machine to meet at"
            raise ValueError(f"{name} is not set: {text}{fix}")
    number = _integer({"MASTER_PORT": str(port)}, "MASTER_PORT")
    if not 0 < number < 2**16:
        raise ValueError(f"MASTER_PORT={number} is no port; ports lie between 1 and 65535")
    return str(address), number


def first_node(nodes: str) -> str:
    """The first host of SLURM's list, such as n007 of `n[007-009,12],m1`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0]) if first else nodes


def _port_of_job(env: Mapping[str, str], one_machine: bool) -> int | None:
    """A port that all processes of the job know without being told, and other jobs on the machine hardly ever have.

    None where nothing names the job. It lies below the ports that Linux gives away by itself (32768 and up).
    """
    if "SLURM_JOB_ID" in env:  # each task of a job array has its own
        return 10_000 + (_integer(env, "SLURM_JOB_ID") * 16 + int(env.get("SLURM_STEP_ID", 0)) % 16) % 20_000
    job = next((env[name] for name in _JOB_NAMES if name in env), None)
    if job is None and one_machine:  # MPICH gives no name: the process that has started all ranks of a machine does
        with suppress(psutil.Error):
            job = next((f"{p.pid}" for p in psutil.Process().parents() if p.name().startswith("hydra_pmi_proxy")), None)
    return None if job is None else 10_000 + zlib.crc32(job.encode()) % 20_000


def on_this_machine() -> tuple[int, int]:
    """This process's number among the run's processes on this machine, and their count; see `Topology.export`."""
    if "LOCAL_RANK" not in os.environ:
        return 0, 1
    return int(os.environ["LOCAL_RANK"]), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def say_for_machine(text: str) -> None:
    """Print a message about the whole machine from its first process, with the host name unless that is rank 0."""
    if on_this_machine()[0] == 0:
        where = "" if os.environ.get("RANK", "0") == "0" else f"{socket.gethostname()}: "
        print(f"{where}{text}", flush=True)


def threads_per_process(topology: Topology) -> int:
    """An equal share of the processor cores that this process may use, at least one.

    The launchers export OMP_NUM_THREADS=1 for safety; it counts only when neither can have set it.
    """
    launched = topology.world_size > 1 or "ACCELERATE_MIXED_PRECISION" in os.environ
    if not launched and os.environ.get("OMP_NUM_THREADS", "").isdigit():
        return max(1, int(os.environ["OMP_NUM_THREADS"]))
    cores = len(usable_cores())
    # SLURM may have shared them out already.
    if topology.source == "SLURM" and os.environ.get("SLURM_CPUS_PER_TASK", "").isdigit():
        return max(1, min(cores, int(os.environ["SLURM_CPUS_PER_TASK"])))
    return max(1, cores // topology.local_world_size)


def is_launched(env: Mapping[str, str] | None = None) -> bool:
    """Whether torchrun or accelerate started this process and waits for it."""
    env = os.environ if env is None else env
    return "TORCHELASTIC_RUN_ID" in env or "ACCELERATE_DYNAMO_BACKEND" in env


def restarts_are_possible() -> bool:
    """Whether a launcher started this process that can start it again."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def restarts() -> int:
    """How often the launcher has started this run again (--max_restarts)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def _present(env: Mapping[str, str], names: tuple[str, ...]) -> str:
    return " and ".join(f"{name}={env[name]}" for name in names if name in env)


def _integer(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise ValueError(f"{name}={env[name]!r} is no whole number; unset it or set it right") from None
