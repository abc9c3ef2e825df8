"""Choose how many loader processes decode photographs, and how many batches they prepare in advance."""

import math
import os
from collections.abc import Sequence

from utils.launch.environment import local_rank_and_size, print_for_machine
from utils.memory import MB, SHM, SHM_FIX, describe_shm, shm_space, usable_physical_cores

AHEAD = 4  # batches that each worker prepares in advance
_IN_USE = 2  # batches that the rank holds: the current one, and the next one, which Accelerate reads ahead
_SMALL = 2**16  # bytes of a batch besides its images: labels, indices, and rounding to pages
_USABLE = 0.9  # fraction of the free space to use; other programs need some too
_PER_CORE = 8  # most loader processes per core of a machine, far more than is useful


def default_workers(threads: int, processes: int) -> int:
    """The default number of loader processes for each of a machine's `processes`, with `threads` threads each.

    At most 8, or one for each physical core of the process up to 16, whose photographs can keep one GPU busy.
    """
    return min(threads, max(8, min(16, usable_physical_cores() // processes)))


def bytes_needed(sizes: Sequence[int], workers: int, ahead: int) -> int:
    """The most bytes of /dev/shm that a rank's loaders use, with batches of `sizes` bytes."""
    return sum(size + _SMALL for size in sizes) * (workers * ahead + _IN_USE) if workers else 0


def choose_workers(sizes: Sequence[int], wanted: int) -> tuple[int, int]:
    """How many workers each loader of a rank has, and how many batches each worker prepares in advance.

    `sizes` has the bytes of each loader's batches. If the wanted workers do not fit into this machine's /dev/shm, there
    are fewer or none, and each prepares one batch.
    """
    space, (_, processes) = shm_space(), local_rank_and_size()
    free = math.inf if space is None else _USABLE * space[0] / processes
    if bytes_needed(sizes, wanted, AHEAD) <= free:
        return wanted, AHEAD
    fitting = int(free // sum(size + _SMALL for size in sizes)) - _IN_USE
    return max(0, min(wanted, fitting)), 1


def workers_that_fit(sizes: Sequence[int], wanted: int) -> tuple[int, int]:
    """`choose_workers`. The machine's first rank prints a line if there are fewer than `wanted`."""
    processes, cores = local_rank_and_size()[1], os.cpu_count() or 1
    most = max(1, _PER_CORE * cores // processes)
    if wanted > most:
        print_for_machine(f"--num_workers {wanted}: too many for {cores} processor cores; using {most} instead")
        wanted = most
    workers, ahead = choose_workers(sizes, wanted)
    if (workers, ahead) != (wanted, AHEAD):
        need = processes * bytes_needed(sizes, wanted, AHEAD) / MB
        problem = f"{SHM}: {describe_shm()}, {need:.0f} MB needed for --num_workers {wanted}"
        print_for_machine(f"{problem}; using {workers} instead, which is slower; {SHM_FIX}")
    return workers, ahead
