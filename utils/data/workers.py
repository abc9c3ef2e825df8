"""Choose how many loader processes decode photographs, and how many batches they prepare in advance."""

import math
import os
from collections.abc import Sequence

from utils.errors import UserError
from utils.launch.environment import local_rank_and_size, print_for_machine
from utils.memory import MB, SHM, SHM_FIX, shm_space, usable_physical_cores

AHEAD = 4  # batches that each worker prepares in advance
_IN_USE = 2  # batches that the rank holds: the current one, and the next one, which Accelerate reads ahead
_SMALL = 2**16  # bytes of a batch besides its images: labels, indices, and rounding to pages
_USABLE = 0.9  # fraction of the free space to use; other programs need some too
_PER_CORE = 8  # most loader processes per core of a machine, far more than is useful

Choice = tuple[int, int]  # worker processes of a loader, and batches that each prepares in advance


def check_workers(count: int | None) -> None:
    """Raise ValueError if --num_workers `count` starts far more processes than this machine has cores."""
    most = most_workers()
    if count is not None and count > most:
        _, processes = local_rank_and_size()
        total = f"{processes} x {count} loader processes" if processes > 1 else f"{count} loader processes"
        raise UserError(
            f"--num_workers {count}: {total} are too many for the {os.cpu_count()} processor cores of this machine",
            f"use at most {most}, or leave it out",
        )


def default_workers(threads: int, processes: int) -> int:
    """The default number of loader processes for each of a machine's `processes`, with `threads` threads each.

    At most 8, or one for each physical core of the process up to 16, whose photographs can keep one GPU busy.
    """
    return min(threads, max(8, min(16, usable_physical_cores() // processes)))


def most_workers() -> int:
    """The highest --num_workers that this machine allows."""
    return max(1, _PER_CORE * (os.cpu_count() or 1) // local_rank_and_size()[1])


def bytes_needed(sizes: Sequence[int], choices: Sequence[Choice]) -> int:
    """The most bytes of /dev/shm that a rank's loaders use, with batches of `sizes` bytes."""
    pairs = zip(sizes, choices, strict=True)
    return sum((size + _SMALL) * (workers * ahead + _IN_USE) for size, (workers, ahead) in pairs if workers)


def choose_workers(sizes: Sequence[int], workers: int, ahead: int, free: float) -> list[Choice]:
    """Choose the workers, and the batches in advance, of each loader of a rank so that they fit into `free` bytes.

    The batches in advance are reduced first, then the workers. If one worker per loader does not fit, the last loader
    gets none, and the rank decodes its images in its own process.
    """
    options = [(workers, fewer) for fewer in range(ahead, 0, -1)] + [(fewer, 1) for fewer in range(workers - 1, 0, -1)]
    for option in options if workers else ():
        if bytes_needed(sizes, [option] * len(sizes)) <= free:
            return [option] * len(sizes)
    return [*choose_workers(sizes[:-1], workers, ahead, free), (0, 0)] if sizes else []


def usable_shm() -> float:
    """Bytes of /dev/shm that each rank of this machine may use."""
    space = shm_space()
    return math.inf if space is None else _USABLE * space[0] / local_rank_and_size()[1]


def workers_that_fit(sizes: dict[str, int], wanted: int) -> list[Choice]:
    """`choose_workers` for this machine's /dev/shm. The machine's first rank prints a line if fewer than `wanted` fit.

    `sizes` maps the name of each loader to the bytes of its batches.
    """
    space, (_, processes) = shm_space(), local_rank_and_size()
    if space is None or not sizes:
        return [(wanted, AHEAD)] * len(sizes)
    free, size = space
    choices = choose_workers(list(sizes.values()), wanted, AHEAD, usable_shm())
    if any(choice != (wanted, AHEAD) for choice in choices) and wanted:
        used = ", ".join(f"{_describe(*choice)} for {name}" for name, choice in zip(sizes, choices, strict=True))
        if len(set(choices)) == 1:
            used = _describe(*choices[0])
        need = processes * bytes_needed(list(sizes.values()), [(wanted, AHEAD)] * len(sizes))
        ranks = f" in each of {processes} ranks" if processes > 1 else ""
        print_for_machine(
            f"{SHM}: {free / MB:.0f} of {size / MB:.0f} MB free, {need / MB:.0f} MB needed for "
            f"{_describe(wanted, AHEAD)}{ranks}; using {used} instead, which is slower; {SHM_FIX}"
        )
    return choices


def _describe(workers: int, ahead: int) -> str:
    if not workers:
        return "no loader process"
    processes = f"{workers} loader process{'es' * (workers > 1)}"
    return f"{processes} with {ahead} batch{'es' * (ahead > 1)} in advance"
