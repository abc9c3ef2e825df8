"""How the global batch is divided over processes and accumulation steps."""

from utils.config.settings import TrainConfig
from utils.errors import UserError

LARGEST_BATCH = 128  # the largest global batch that is chosen from the data


def resolve_batch(config: TrainConfig, processes: int) -> tuple[int, int, int]:
    """Return (batch_size, grad_accum, global_batch_size). The last is the product of the first two and `processes`.

    With --microbatches, the first two are the largest numbers of samples in a microbatch, and of those of a process.
    Raises UserError, with values that work, if the settings contradict each other or are not divisible.
    """
    batch, accum, total = config.batch_size, config.grad_accum, config.global_batch_size
    if config.microbatches:
        return _largest_microbatch(config.microbatches, processes, total or LARGEST_BATCH)
    if batch is None:
        parts = processes * (accum or 1)
        if total is None and LARGEST_BATCH % parts:  # all batches that are chosen from the data are powers of two
            raise UserError(
                f"the default --global_batch_size is a power of two, so it is not divisible by {processes} processes "
                f"x {accum or 1} accumulation steps",
                f"set it to a multiple of {parts}, or use a different number of processes",
            )
        total = total or LARGEST_BATCH
        if total % parts:
            below, above = total // parts * parts, (total // parts + 1) * parts
            works = f"{below} or {above}" if below else f"{above}"
            raise UserError(
                f"--global_batch_size {total} is not divisible by {processes} processes x {accum or 1} accumulation "
                "steps",
                f"use {works}, or a different number of processes",
            )
        return total // parts, accum or 1, total
    if total is None:
        return batch, accum or 1, batch * processes * (accum or 1)
    if accum is None and total % (batch * processes) == 0:
        return batch, total // (batch * processes), total
    if accum is None or batch * processes * accum != total:
        product = batch * processes * (accum or 1)
        raise UserError(
            f"--batch_size {batch} x {processes} processes x {accum or 1} accumulation steps is {product}, not "
            f"--global_batch_size {total}",
            "leave out --batch_size to compute it from the others",
        )
    return batch, accum, total


def _largest_microbatch(microbatches: int, processes: int, total: int) -> tuple[int, int, int]:
    if processes > microbatches:
        problem = f"--microbatches {microbatches} is less than the number of processes, {processes}"
        raise UserError(problem, "use fewer processes, or start a new run with more microbatches")
    if total < microbatches:
        problem = f"a global batch of {total} cannot be divided into {microbatches} microbatches"
        raise UserError(problem, "set a larger --global_batch_size or fewer --microbatches")
    return -(-total // microbatches), -(-microbatches // processes), total
