"""The address and port of rank 0: MASTER_ADDR and MASTER_PORT, or derived from SLURM or MPI."""

import re
import zlib
from os import environ

from utils.errors import UserError

# each job of Open MPI has its own values
_JOB_NAMES = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
_EXPORT = {
    "Open MPI": "export it with mpirun -x MASTER_ADDR=HOST",
    "MPICH": "export it with mpiexec -genv MASTER_ADDR HOST",
}


def address_of_rank_0(source: str, one_machine: bool) -> tuple[str, int]:
    """The address and port of rank 0; `source` is the kind of launcher.

    Raises UserError if they are not set and cannot be derived.
    """
    address = environ.get("MASTER_ADDR", "")
    port = integer_of("MASTER_PORT") if environ.get("MASTER_PORT") else 0
    if source != "the environment":
        nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
        address = address or ("127.0.0.1" if one_machine else first_node(nodes))
        port = port or _port_of_job()
    for name, value in (("MASTER_ADDR", address), ("MASTER_PORT", port)):
        if not value:
            need = "the processes need an address and a port of rank 0's machine"
            raise UserError(
                f"{name} is not set: {need}",
                _EXPORT.get(source, "export it, or give --init_method"),
            )
    if not 0 < port < 2**16:
        raise UserError(f"MASTER_PORT={port} is not a port", "choose one between 1 and 65535")
    return address, port


def first_node(nodes: str) -> str:
    """The first host in a SLURM list, such as n007 in `n[007-009,12],m1`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0]) if first else nodes


def _port_of_job() -> int:
    """A port derived from the number or name of the job, so that other jobs on the machine rarely
    have the same port; torchrun's default if the job has no name, as with MPICH.

    It is below the ports that Linux assigns automatically (32768 and up).
    """
    if "SLURM_JOB_ID" in environ:  # each task of a job array has its own
        step = int(environ.get("SLURM_STEP_ID", 0)) % 16
        return 10_000 + (integer_of("SLURM_JOB_ID") * 16 + step) % 20_000
    job = next((environ[name] for name in _JOB_NAMES if name in environ), None)
    return 10_000 + zlib.crc32(job.encode()) % 20_000 if job else 29_500


def integer_of(name: str) -> int:
    """The value of a variable. Raises UserError if it is not an integer."""
    try:
        return int(environ[name])
    except ValueError:
        raise UserError(
            f"{name}={environ[name]!r} is not an integer", "correct or unset it"
        ) from None
