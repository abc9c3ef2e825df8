"""Read the topology of the run from the launcher's environment variables.

To add a launcher, add its variables to `_SOURCES`, and a rule to `_source`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from os import environ

from utils.errors import UserError
from utils.launch.address import address_of_rank_0, integer_of
from utils.memory import usable_cores

# For each launcher, the variables of rank, world size, local rank and local world size. Those of
# torchrun come first, because every launcher inside SLURM or MPI sets them. Open MPI comes before
# SLURM, because its mpirun may call srun.
_SOURCES = {
    "the environment": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "SLURM": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}
_ENGINES = {  # what an accelerate config can select instead of plain data parallelism
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "tensor, context or sharded parallelism",
}


def compile_backend() -> str:
    """The backend of torch.compile that the accelerate config asks for; empty if none."""
    backend = environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    return "" if backend == "no" else backend


@dataclass(frozen=True)
class Topology:
    """The rank of this process among `world_size`, and its local rank among the `local_world_size`
    of this machine.

    The processes connect at `address`:`port` of rank 0, which a single process does not need.
    `source` is the kind of launcher.
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
        """Set torchrun's variables, which Accelerate and other libraries read."""
        if self.source != "nobody":
            numbers = (self.rank, self.world_size, self.local_rank, self.local_world_size)
            environ.update(zip(_SOURCES["the environment"], map(str, numbers), strict=True))
        if self.address:
            environ.update(MASTER_ADDR=self.address, MASTER_PORT=str(self.port))


def read_topology(init_method: str = "env://") -> Topology:
    """The topology from the variables of accelerate, torchrun, srun or mpirun, or from variables
    set by hand.

    Without such variables the run is a single process. Raises UserError if they are incomplete or
    contradict each other, or if accelerate was asked to start several processes but started one.
    """
    for name, engine in _ENGINES.items():
        if is_set(name):
            large = "fsdp.yaml is for models that do not fit on a GPU"
            fix = f"use a file of accelerate_configs/; {large}"
            raise UserError(f"{engine} is not supported", fix)
    source = _source()
    if source is None:
        # Accelerate's single-process launcher exports an address only if it was asked to start
        # several processes.
        if "ACCELERATE_MIXED_PRECISION" in environ and "MASTER_ADDR" in environ:
            problem = "accelerate started one process instead of several"
            file = "--config_file accelerate_configs/2cpu.yaml"
            fix = f"use {file}, with --num_processes N for a different number"
            raise UserError(f"{problem}, as it does with --cpu or MULTI_CPU", fix)
        return Topology()
    names = _SOURCES[source]
    needed = (*names, "SLURM_NODEID") if source == "SLURM" else names[:3]
    missing = [name for name in needed if name not in environ]
    if missing:
        problem = f"{', '.join(missing)} not set although {_present(names)}"
        raise UserError(problem, "export all of them, or none")
    rank, world_size, local_rank = (integer_of(name) for name in names[:3])
    if source == "SLURM":
        local_world_size = _tasks_on_node(environ[names[3]], integer_of("SLURM_NODEID"))
    elif names[3] in environ:
        local_world_size = integer_of(names[3])
    else:
        local_world_size = _size_of_one_machine(source, world_size, init_method)
    if not 0 <= rank < world_size or not 0 <= local_rank < local_world_size <= world_size:
        problem = f"contradictory environment: {_present(names)}"
        raise UserError(problem, "correct them: ranks start at 0 and are below their world size")
    address = ""
    port = 0
    if world_size > 1 and init_method == "env://":
        address, port = address_of_rank_0(source, local_world_size == world_size)
    return Topology(rank, world_size, local_rank, local_world_size, address, port, source)


def is_set(name: str) -> bool:
    """Whether a variable of the environment is true."""
    return environ.get(name, "").lower() in ("1", "true", "yes")


def shards_model() -> bool:
    """Whether the accelerate config, or these variables, ask for FSDP."""
    return is_set("ACCELERATE_USE_FSDP")


def claimed_ranks() -> tuple[str | None, str | None]:
    """The launcher's values of rank and local rank, which may be invalid; None for a value that is
    not set.
    """
    rank, _, local_rank, _ = _SOURCES[_source() or "the environment"]
    return environ.get(rank), environ.get(local_rank)


def _source() -> str | None:
    """The launcher whose variables define the rank of this process."""
    if "RANK" in environ or "WORLD_SIZE" in environ or "LOCAL_RANK" in environ:
        return "the environment"
    for mpi in ("Open MPI", "MPICH"):
        rank, _, local_rank, _ = _SOURCES[mpi]
        if rank in environ and local_rank in environ:  # srun may set PMI_RANK without the others
            return mpi
    # in a batch script and in a shell of one task, SLURM_PROCID is 0 but not a rank
    if "SLURM_PROCID" in environ and environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        return "SLURM"
    return None


def _size_of_one_machine(source: str, world_size: int, init_method: str) -> int:
    """The world size, if the processes connect at a loopback address, so all are on one machine."""
    place = init_method
    if init_method == "env://":
        place = f"tcp://{environ.get('MASTER_ADDR', 'localhost')}"
    if world_size > 1 and not re.match(r"tcp://(localhost|127\.|\[?::1)", place):
        problem = f"{_SOURCES[source][3]} is not set"
        raise UserError(problem, "export the number of the run's processes on this machine")
    return world_size


def _tasks_on_node(counts: str, node: int) -> int:
    """The number of tasks on a node; SLURM's `2(x3),1` is two on each of the first three nodes, one
    on the fourth.
    """
    tasks = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
        tasks += [int(count)] * int(times or 1)
    if node < len(tasks):
        return tasks[node]
    problem = f"contradictory environment: SLURM_STEP_TASKS_PER_NODE={counts} has no node {node}"
    raise UserError(problem, "start all ranks with srun")


def local_rank_and_size() -> tuple[int, int]:
    """Local rank and local world size, from the variables that `Topology.export` has set."""
    if "LOCAL_RANK" not in environ:
        return 0, 1
    return int(environ["LOCAL_RANK"]), int(environ.get("LOCAL_WORLD_SIZE", "1"))


def threads_per_process(topology: Topology) -> int:
    """An equal share of the processor cores that this process may use, at least one.

    OMP_NUM_THREADS is used only without a launcher, because launchers set it to 1 if it is not set.
    """
    launched = topology.world_size > 1 or "ACCELERATE_MIXED_PRECISION" in environ
    cores = usable_cores()
    if not launched and environ.get("OMP_NUM_THREADS", "").isdigit():
        return max(1, min(cores, int(environ["OMP_NUM_THREADS"])))
    # already a share
    if topology.source == "SLURM" and environ.get("SLURM_CPUS_PER_TASK", "").isdigit():
        return max(1, min(cores, int(environ["SLURM_CPUS_PER_TASK"])))
    return max(1, cores // topology.local_world_size)


def is_launched(env: Mapping[str, str] = environ) -> bool:
    """Whether torchrun or accelerate started this process."""
    return "TORCHELASTIC_RUN_ID" in env or "ACCELERATE_DYNAMO_BACKEND" in env


def can_be_restarted() -> bool:
    """Whether the launcher of this process can restart it."""
    return "TORCHELASTIC_RUN_ID" in environ


def attempts_left() -> bool:
    """Whether the launcher will start the run again if it fails (--max_restarts)."""
    return int(environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > restart_count()


def restart_count() -> int:
    """How often the launcher has restarted this run (--max_restarts)."""
    return int(environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def _present(names: tuple[str, ...]) -> str:
    return " and ".join(f"{name}={environ[name]}" for name in names if name in environ)
