"""How a process ends after an error: one line that names the problem and the fix, on one rank, and an exit code."""

import re
import socket
import sys
import time
import traceback
from typing import NoReturn

from utils.errors import one_line
from utils.launch.environment import claimed_ranks, is_launched
from utils.memory import SHM, SHM_FIX, describe_shm

_KNOWN = {  # what DistributedDataParallel says at length
    "Expected to have finished reduction": "the model leaves parameters unused; --find_unused_parameters finds "
    "them in each update, --static_graph once if they are always the same",
    "Expected more than 1 value per channel": "batch normalisation got a single image, because others of its batch "
    "cannot be read; use larger batches, or fix the files and start a new run",
    "training graph has changed": "the model uses other parameters than in its first pass, so that "
    "--static_graph does not hold; use --find_unused_parameters instead",
}


def exit_with_error(error: BaseException, prog: str, show: bool = True, show_traceback: bool = False) -> NoReturn:
    """Print `error` as one line (or with its traceback) and exit with code 2."""
    if show and show_traceback:
        traceback.print_exception(error)
    if show:
        # One write, so that lines of several processes do not interleave.
        sys.stderr.write(f"{prog}: error: {one_line(error)}\n")
        sys.stderr.flush()
    else:  # a launcher that sees this rank gone ends the others, and this one once the one that speaks is done
        time.sleep(5 if is_launched() else 0.5)
    raise SystemExit(2)


def reports_for_machine() -> bool:
    """Whether this process tells the errors of its machine, judged before anything of the launch has been checked."""
    rank, local_rank = claimed_ranks()
    return rank == "0" or local_rank in ("0", None)


def with_rank(error: Exception) -> Exception:
    """An error from before the processes have met, with its rank and machine unless that is rank 0."""
    rank, _ = claimed_ranks()
    if rank in ("0", None):
        return error
    told = ValueError(f"rank {rank} on {socket.gethostname()}: {one_line(error)}")
    told.__cause__ = error
    return told


def is_out_of_memory(error: BaseException) -> bool:
    """Whether PyTorch could not get memory on a GPU or on the host."""
    return isinstance(error, RuntimeError) and re.search("out of memory|can't allocate memory", str(error)) is not None


def explain(error: Exception) -> Exception:
    """The error of a known cause outside this code as a ValueError with the fix; any other as it is."""
    text = one_line(error)
    if is_out_of_memory(error):
        return ValueError(f"out of memory ({text[:120]}); lower --batch_size, or raise --grad_accum")
    if is_killed_worker(error) and "Bus error" in f"{error} {error.__cause__}":
        return ValueError(
            f"a loader process found no room in {SHM} ({describe_shm()}); {SHM_FIX}, or lower --num_workers"
        )
    if is_killed_worker(error):
        return ValueError(f"a loader process was killed ({text[:100]}); if memory is short, lower --num_workers")
    for sign, fix in _KNOWN.items():
        if isinstance(error, RuntimeError | ValueError) and sign in text:
            return ValueError(fix)
    return error


def is_killed_worker(error: BaseException) -> bool:
    """Whether a loader's worker died; PyTorch raises that wherever the main thread then is."""
    return isinstance(error, RuntimeError) and "DataLoader worker (pid" in str(error)
