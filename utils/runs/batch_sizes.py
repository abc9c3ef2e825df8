"""How the global batch is divided into batches of the processes."""

from utils.errors import UserError
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
    accum = config.grad_accum
    total = config.global_batch_size
    if config.shares and (len(config.shares), sum(config.shares)) != (
        processes,
        config.microbatches,
    ):
        given = f"{len(config.shares)} processes and --microbatches {sum(config.shares)}"
        problem = (
            f"--shares {','.join(map(str, config.shares))} is for {given}, not for {processes} and"
        )
        raise UserError(f"{problem} {config.microbatches}", "correct it, or leave it out")
    if config.microbatches:
        return _largest_microbatch(config.microbatches, processes, total or default)
    steps = accum or 1
    if batch:
        if not accum and total and total % (batch * processes) == 0:
            steps = total // (batch * processes)
        product = batch * processes * steps
        if total not in (None, product):
            raise UserError(
                f"--batch_size {batch} x {processes} processes x {steps} accumulation steps is {product}, not "
                f"--global_batch_size {total}",
                "leave out --batch_size to compute it from the others",
            )
        return batch, steps, product
    name = "--global_batch_size" if total else "the default global batch"
    total = total or default
    parts = processes * steps
    if total % parts:
        below = total // parts * parts
        above = (total // parts + 1) * parts
        raise UserError(
            f"{name} {total} is not divisible by {processes} processes x {steps} accumulation steps",
            f"set --global_batch_size to {f'{below} or ' * bool(below)}{above}, or use a different number of processes",
        )
    return total // parts, steps, total


def _largest_microbatch(microbatches: int, processes: int, total: int) -> tuple[int, int, int]:
    if processes > microbatches:
        problem = f"--microbatches {microbatches} is less than the number of processes, {processes}"
        raise UserError(problem, "use fewer processes, or start a new run with more microbatches")
    if total < microbatches:
        problem = f"a global batch of {total} cannot be divided into {microbatches} microbatches"
        raise UserError(problem, "set a larger --global_batch_size or fewer --microbatches")
    return -(-total // microbatches), -(-microbatches // processes), total
