"""The arithmetic of a step: the global batch over processes and accumulation, at the first start and at later ones."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from utils.config import TrainConfig
from utils.saved import read_saved
from utils.state import TrainState


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


def batch_of_start(config: TrainConfig, checkpoint: Path | None, processes: int) -> TrainConfig:
    """The settings with batch sizes that keep a checkpoint's global batch on this number of processes.

    The batch size per process grows no larger than it was, or than --batch_size. Raises ValueError with the numbers of
    processes that would work.
    """
    if checkpoint is None:
        resolve_batch(config, processes)
        return config
    saved = read_saved(checkpoint)
    total = saved["global_batch_size"]
    if config.global_batch_size not in (None, total):
        raise ValueError(
            f"{checkpoint}: was trained with a global batch size of {total}, not {config.global_batch_size}; give the "
            "same settings"
        )
    config = replace(config, global_batch_size=total)
    if config.batch_size or config.grad_accum:
        with suppress(ValueError):
            resolve_batch(config, processes)
            return config
    if total % processes:
        *works, most = [str(number) for number in range(1, 2 * processes) if total % number == 0]
        raise ValueError(
            f"{checkpoint}: the global batch of {total} does not divide by {processes} processes; go on with "
            f"{', '.join(works)} or {most} processes"
        )
    share, largest = total // processes, config.batch_size or TrainState.from_dict(saved["state"]).batch_size
    batch = next(size for size in range(min(largest, share), 0, -1) if share % size == 0)
    return replace(config, batch_size=None, grad_accum=share // batch)
