"""The arithmetic of a step: the global batch over processes and accumulation, at the first start and at later ones."""

from utils.config.settings import TrainConfig


def resolve_batch(config: TrainConfig, processes: int) -> tuple[int, int, int]:
    """Return (batch_size, grad_accum, global_batch_size), the last the product of the first two and `processes`.

    Raises ValueError, with numbers that work, when the settings disagree or do not divide.
    """
    batch, accum, total = config.batch_size, config.grad_accum, config.global_batch_size
    if batch is None:
        total = total or 128
        parts = processes * (accum or 1)
        if total % parts:
            below, above = total // parts * parts, (total // parts + 1) * parts
            works = f"{below} or {above}" if below else f"{above}"
            raise ValueError(
                f"--global_batch_size {total} does not divide by {processes} processes x {accum or 1} accumulation "
                f"steps; {works} would, or another number of processes"
            )
        return total // parts, accum or 1, total
    if total is None:
        return batch, accum or 1, batch * processes * (accum or 1)
    if accum is None and total % (batch * processes) == 0:
        return batch, total // (batch * processes), total
    if accum is None or batch * processes * accum != total:
        product = batch * processes * (accum or 1)
        raise ValueError(
            f"--batch_size {batch} x {processes} processes x {accum or 1} accumulation steps is {product}, not "
            f"--global_batch_size {total}; leave out --batch_size to have it derived"
        )
    return batch, accum, total
