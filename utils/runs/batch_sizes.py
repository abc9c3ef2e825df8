"""How the global batch is divided into batches of the processes."""

from contextlib import suppress

from utils.config import require
from utils.errors import UserError
from utils.runs.metadata import Checkpoint
from utils.settings.train import TrainConfig

DEFAULT_BATCH = 128  # the largest default global batch


def resolve_batch(
    config: TrainConfig, processes: int, default: int = DEFAULT_BATCH
) -> tuple[int, int, int]:
    """Return (batch_size, grad_accum, global_batch_size). The last is the product of the first two
    and `processes`.

    With --microbatches, the first two are the most samples in a microbatch, and the most
    microbatches of a process. `default` is the global batch if neither batch size is set. Raises
    UserError, with values that work, if the settings contradict each other or are not divisible.
    """
    batch = config.batch_size
    total = config.global_batch_size
    steps = config.grad_accum or 1
    if config.shares:
        _check_shares(config.shares, config.microbatches, processes)
    if config.microbatches:
        return _largest_microbatch(config.microbatches, processes, total or default)
    if batch:
        if not config.grad_accum and total and total % (batch * processes) == 0:
            steps = total // (batch * processes)
        product = batch * processes * steps
        factors = f"--batch_size {batch} x {processes} processes x {steps} accumulation steps"
        problem = f"{factors} is {product}, not --global_batch_size {total}"
        fix = "leave out --batch_size to compute it from the others"
        require(total in (None, product), problem, fix)
        return batch, steps, product
    name = "--global_batch_size" if total else "the default global batch"
    total = total or default
    parts = processes * steps
    below = total // parts * parts
    values = f"{below + parts}"
    if below:
        values = f"{below} or {values}"
    divisor = f"{processes} processes x {steps} accumulation steps"
    fix = f"set --global_batch_size to {values}, or use a different number of processes"
    require(total % parts == 0, f"{name} {total} is not divisible by {divisor}", fix)
    return total // parts, steps, total


def _check_shares(shares: list[int], microbatches: int | None, processes: int) -> None:
    of_shares = f"{len(shares)} processes and --microbatches {sum(shares)}"
    of_run = f"{processes} and {microbatches}"
    problem = f"--shares {','.join(map(str, shares))} is for {of_shares}, not for {of_run}"
    fits = len(shares) == processes and sum(shares) == microbatches
    require(fits, problem, "correct it, or leave it out")


def _largest_microbatch(microbatches: int, processes: int, total: int) -> tuple[int, int, int]:
    if processes > microbatches:
        problem = f"--microbatches {microbatches} is less than the number of processes, {processes}"
        raise UserError(problem, "use fewer processes, or start a new run with more microbatches")
    if total < microbatches:
        problem = f"a global batch of {total} cannot be divided into {microbatches} microbatches"
        raise UserError(problem, "set a larger --global_batch_size or fewer --microbatches")
    return -(-total // microbatches), -(-microbatches // processes), total


def choose_batch(
    config: TrainConfig, saved: Checkpoint | None, processes: int
) -> tuple[int, int, int]:
    """(batch_size, grad_accum, global_batch_size) of this start; a resumed run keeps its global
    batch size.

    The batch size per process does not exceed --batch_size or, if it is not set, the largest one so
    far. Raises ValueError, which lists the numbers of processes that work.
    """
    if saved is None or config.microbatches:
        return resolve_batch(config, processes)
    with suppress(ValueError):  # these sizes do not fit
        if config.batch_size or config.grad_accum:
            return resolve_batch(config, processes)
    total = saved.config.global_batch_size
    *works, most = [f"{number}" for number in range(1, 2 * processes) if total % number == 0]
    problem = f"{saved.path}: its global batch of {total} is not divisible by {processes} processes"
    fix = f"resume with {', '.join(works)} or {most} processes"
    require(total % processes == 0, problem, fix)
    share = total // processes
    largest = config.batch_size or saved.state.batch_size
    batch_size = next(size for size in range(min(largest, share), 0, -1) if share % size == 0)
    return batch_size, share // batch_size, total
