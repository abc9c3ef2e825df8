"""Loader processes: how many there are, how they start, their signals, and how they send batches
through /dev/shm.

/dev/shm is shared memory. In containers it is often small.
"""

import os
import signal
import sys
import threading
import warnings
from collections.abc import Sequence
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from utils.console import say
from utils.data.datasets import Batch, ImageDataset
from utils.data.samplers import MicrobatchSampler
from utils.errors import UserError, one_line
from utils.launch import local_rank_and_size
from utils.memory import SHM, SHM_FIX, bytes_text, free_shm, usable_physical_cores
from utils.settings.data import DataSettings

AHEAD = 4  # batches that each worker prepares in advance
# with a GPU, whose batches are in page-locked memory, which nothing else can use
_AHEAD_OF_GPU = 2
# batches that the rank holds: the current one, and the next one, which Accelerate reads ahead
_IN_USE = 2
_SMALL = 2**16  # bytes of a batch besides its images: labels, indices, and rounding to pages
_USABLE = 0.9  # fraction of the free space to use; other programs need some too


def default_workers(threads: int, processes: int) -> int:
    """The default number of loader processes for each of a machine's `processes`, with `threads`
    threads each.

    At most 8, or one for each physical core of the process up to 16, whose photographs can keep one
    GPU busy.
    """
    return min(threads, max(8, min(16, usable_physical_cores() // processes)))


def choose_workers(sizes: Sequence[int], wanted: int, ahead: int = AHEAD) -> tuple[int, int]:
    """How many workers each loader of a rank has, and how many batches each worker prepares in
    advance, at most `ahead`.

    `sizes` has the bytes of each loader's batches. If not all batches fit into this rank's share of
    /dev/shm, fewer are prepared in advance, then there are fewer workers or none.
    """
    free = _USABLE * free_shm() / local_rank_and_size()[1]
    most = free / (sum(size + _SMALL for size in sizes) or 1) - _IN_USE
    workers = int(max(0, min(wanted, most)))
    return workers, int(min(ahead, most / max(1, workers)))


def move_to_shared_memory(batch: Any) -> Batch:
    """A `collate_fn` that moves the tensors of a Batch to shared memory if this is a loader
    process.

    If there is no space, the batch is empty, with an error. PyTorch would move them later, in a
    thread that only prints the error, and the rank would wait for this batch forever.
    """
    if not get_worker_info():
        return batch
    try:
        for tensor in (batch.images, batch.labels):
            if tensor.numel():  # an empty tensor takes no shared memory
                tensor.share_memory_()
    except RuntimeError as error:
        size = bytes_text(batch.images.nbytes)
        problem = f"a loader process could not write a batch of {size} ({one_line(error)[:160]})"
        return batch.failed(UserError(f"{SHM}: {problem}", f"{SHM_FIX}, or use --num_workers 0"))
    return batch


# How workers start. The default of Python 3.14 would import PyTorch again in each worker, and would
# start a process between the worker and its rank, so that neither would notice if the other one
# exits.
_START_METHOD = "fork" if sys.platform == "linux" else None


def worker_processes(count: int, ahead: int = 2) -> dict:
    """The keyword arguments of a DataLoader with `count` workers that each prepare `ahead` batches
    in advance. Also sets up PyTorch for such workers.
    """
    prepare_pytorch_for_workers()
    return {
        "num_workers": count,
        "prefetch_factor": ahead if count else None,
        "multiprocessing_context": _START_METHOD if count else None,
        # The rank passes its own process id: if it were killed first, the worker would have another
        # parent.
        "worker_init_fn": partial(_leave_signals_to_parent, os.getpid()),
        # because starting workers must not draw from the global generator
        "generator": torch.Generator(),
    }


def prepare_pytorch_for_workers() -> None:
    """Hide a warning about the number of workers, and end workers at once when their rank exits.

    When a process with a GPU exits, older versions of PyTorch wait 5 s for each of its workers,
    which were never told to end: 160 s with two loaders of 16 workers
    (https://github.com/pytorch/pytorch/issues/81794; PyTorch 2.15 tells them).
    """
    warnings.filterwarnings("ignore", message="This DataLoader will create")  # more than cores
    if hasattr(_MultiProcessingDataLoaderIter, "_clean_up_worker"):
        _MultiProcessingDataLoaderIter._clean_up_worker = staticmethod(_end_worker)


def _end_worker(worker: BaseProcess) -> None:
    # of the pin-memory thread, which loses its connection
    threading.excepthook = lambda _error: None
    worker.terminate()


def _leave_signals_to_parent(parent: int, worker: int) -> None:
    """Called in each worker, so that only its own rank, the process `parent`, can stop it.

    Ctrl-C in a terminal and scancel signal the workers too, but the rank needs them to finish its
    update.
    """
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.excepthook = _print_unless_disconnected
    if hasattr(signal, "sigtimedwait"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_await_parents_sigterm, args=(parent,), daemon=True).start()


def _print_unless_disconnected(kind: type[BaseException], *details: Any) -> None:
    """Print an error of a thread, except a lost connection: the rank was stopped while it was
    receiving a batch.
    """
    if not issubclass(kind, ConnectionError | EOFError):
        sys.__excepthook__(kind, *details)


def _await_parents_sigterm(parent: int) -> None:
    while os.getppid() == parent:  # a parent that is killed sends no signal
        received = signal.sigtimedwait({signal.SIGTERM}, 2)
        if received and received.si_pid == parent:
            break
    os._exit(0)


def make_loaders(
    parts: Sequence[tuple[ImageDataset, MicrobatchSampler]],
    config: DataSettings,
    threads: int,
    device: torch.device,
) -> list[DataLoader]:
    """The loaders of a rank, for `Accelerator.prepare`. They are created together, because they
    share /dev/shm.

    The machine's first rank prints a line if they have fewer workers than wanted.
    """
    wanted = config.num_workers
    if wanted is None:
        wanted = default_workers(threads, local_rank_and_size()[1])
    # Otherwise a batch is one copy of small images, which is faster than passing it between
    # processes.
    sizes = [each.largest * dataset.image_bytes for dataset, each in parts if dataset.in_loader]
    on_gpu = device.type == "cuda"
    most, ahead = choose_workers(sizes, wanted, _AHEAD_OF_GPU if on_gpu else AHEAD)
    if sizes and most < wanted:
        problem = (
            f"{SHM}: {bytes_text(int(free_shm()))} free, too little for --num_workers {wanted}"
        )
        say(f"{problem}; using {most} instead, which is slower; {SHM_FIX}", on_each_machine=True)
    loaders = []
    for dataset, sampler in parts:
        workers = most if dataset.in_loader else 0
        loader = DataLoader(
            dataset,
            batch_sampler=sampler,
            collate_fn=move_to_shared_memory,
            **worker_processes(workers, ahead),
            persistent_workers=workers > 0,
            pin_memory=on_gpu and not dataset.on_device,
        )
        loaders.append(loader)
    return loaders
