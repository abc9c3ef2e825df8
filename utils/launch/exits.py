"""How a process exits after an error: one rank prints the problem and the fix on one line; the exit
code is 2.
"""

import json
import multiprocessing
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from utils.errors import LostRank, UserError, one_line, shorten, split_error
from utils.files import write_file
from utils.launch.command import is_elastic, launcher_words
from utils.launch.devices import ONE_EACH
from utils.launch.environment import attempts_left, claimed_ranks, is_launched
from utils.launch.status import end_status
from utils.memory import SHM, SHM_FIX
from utils.output import exit_with
from utils.waiting import call_with_timeout

_CLEAR_LINE = "\r\x1b[K"
_WHEELS = "https://pytorch.org/get-started/locally"
# a part of PyTorch's message: problem, in which {} stands for the start of the message, and fix
_KNOWN = {
    "Expected to have finished reduction": (
        "the model does not use all of its parameters",
        "set --find_unused_parameters, or name the unused ones in --freeze",
    ),
    "Expected more than 1 value per channel": (
        "batch normalisation got a single image, because the others in its batch cannot be read",
        "use larger batches, or fix the files and start a new run",
    ),
    # the texts of NCCL before and since 2.30, for parts of a GPU (MIG)
    "Duplicate GPU detected": ("two ranks share a GPU", ONE_EACH),
    "Multiple Ranks are using the same GPU": ("two ranks share a GPU", ONE_EACH),
    "no kernel image is available": (
        "this build of PyTorch does not support this GPU",
        f"install one that does from {_WHEELS}, or use the CPU with --cpu",
    ),
    "does not have a deterministic implementation": (
        "{}",
        "use another model, or leave out --deterministic and --microbatches",
    ),
}


def print_line(prog: str, text: str) -> None:
    """Print a line to stderr, unless it is closed or on a full disk. It replaces a progress bar.

    One write, so that the lines of several processes do not mix. `tqdm.write` would wait for a
    lock, which another thread, or after a fork another rank, may never release.
    """
    if sys.stderr is None:
        return
    with suppress(OSError, ValueError):
        start = _CLEAR_LINE if sys.stderr.isatty() else ""
        sys.stderr.write(f"{start}{prog}: {text}\n")
        sys.stderr.flush()


def print_last_line(prog: str, text: str) -> None:
    """Print the line with which this process exits, also in the launcher's table (see
    `inform_launcher`).
    """
    text = shorten(text, 1500)
    print_line(prog, text)
    inform_launcher(f"{prog}: {text}")


def exit_with_error(
    error: BaseException,
    prog: str,
    prints: bool = True,
    show_traceback: bool = False,
    retry: bool = False,
) -> NoReturn:
    """Exit with code 2. If `prints`, print the error as one line first, after its traceback if
    `show_traceback`.

    Unless `retry`, the launcher of an elastic run ends too, by a signal. Otherwise it would restart
    the ranks until none of --max_restarts is left, and then close the rendezvous for all machines
    and for later starts.
    """
    is_final = not retry and is_elastic()
    if is_final:
        os.environ["TORCHELASTIC_MAX_RESTARTS"] = "0"  # the launcher makes no other attempt
    if not prints:
        delay_exit()
    else:
        if show_traceback:
            traceback.print_exception(error)
        # The cause, not its effect on this rank, belongs into the launcher's table.
        show = print_line if isinstance(error, LostRank) else print_last_line
        show(prog, f"error: {one_line(error)}")
    if is_final and launcher_words():
        time.sleep(0.75)  # the other machines read why in the store, which the launcher may serve
        os.kill(os.getppid(), signal.SIGTERM)
    exit_with(2)


def exit_now(code: int, text: str) -> NoReturn:
    """Exit from a thread, with `text` as the reason, although the main thread is blocked where no
    exception can reach it.

    Loader processes are killed, because they may be blocked as well.
    """
    end_status(code, text)
    # the program that reads the output may be suspended, or the disk with the output full
    with suppress(RuntimeError, OSError, ValueError):
        if sys.stdout is not None:
            call_with_timeout(sys.stdout.flush, 1.0)
    for worker in multiprocessing.active_children():
        worker.kill()
    os._exit(code)


def how_to_resume(prog: str) -> str:
    """What to do after train.py has exited without saving, to append to its last line."""
    text = "; resume from the last checkpoint with --run_name NAME --resume auto"
    return text if prog == "train.py" else ""


def delay_exit() -> None:
    """Wait before exiting, so that another process can print the error before the launcher ends it.

    The wait is shorter if the launcher will restart the run, because it delays the restart.
    """
    if attempts_left():
        time.sleep(2)
    elif is_launched():
        time.sleep(5)
    else:
        time.sleep(0.5)


def inform_launcher(text: str) -> None:
    """Let torchrun or accelerate launch repeat the text at the end of its own error message, if
    there is a launcher.

    The launcher reads a file of each rank, in the format of
    `torch.distributed.elastic.multiprocessing.ErrorHandler`.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        # The launcher prints the earliest error last. It rounds the times of ranks that exit
        # without a file down to seconds: hence - 1.
        info = {"py_callstack": text, "timestamp": str(int(time.time()) - 1)}
        with suppress(OSError):
            write_file(Path(file), json.dumps({"message": {"message": text, "extraInfo": info}}))


def reports_for_machine() -> bool:
    """Whether this process reports errors of its machine.

    Works before the launch has been checked.
    """
    rank, local_rank = claimed_ranks()
    return rank == "0" or local_rank in ("0", None)


def with_rank(error: Exception) -> Exception:
    """An error from before the processes are connected, with its rank and machine unless it is from
    rank 0.
    """
    rank, _ = claimed_ranks()
    if rank in ("0", None):
        return error
    problem, fix = split_error(error)
    result = UserError(f"rank {rank} on {socket.gethostname()}: {problem}", fix)
    result.__cause__ = error
    return result


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory could not be allocated, on a GPU or on the host."""
    signs = "out of memory|can't allocate memory|STATUS_ALLOC_FAILED"
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and bool(re.search(signs, str(error)))
    )


@contextmanager
def fix_for_memory() -> Iterator[None]:
    """Raise UserError with a fix if an evaluation in the `with` block cannot allocate memory."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        problem = f"out of memory ({one_line(error)[:120]})"
        raise UserError(problem, "lower --eval_batch_size") from error


def with_known_fix(error: Exception) -> Exception:
    """A UserError with the fix for a PyTorch error of a known cause; other errors unchanged."""
    text = one_line(error)
    if is_out_of_memory(error):
        more = "in a run with --microbatches, start a new run with more of them"
        fix = f"raise --grad_accum, or, {more}"
        return UserError(f"out of memory ({text[:120]})", fix)
    # raised anywhere in the main thread
    if isinstance(error, RuntimeError) and "DataLoader worker (pid" in text:
        if "Bus error" in f"{text} {error.__cause__}":
            fix = f"{SHM_FIX}, or lower --num_workers"
            return UserError(f"a loader process found no space in {SHM}", fix)
        return UserError(
            f"a loader process was killed ({text[:100]})", "if memory is short, lower --num_workers"
        )
    for sign, (problem, fix) in _KNOWN.items():
        if isinstance(error, RuntimeError | ValueError) and sign in text:
            return UserError(problem.format(text.split(",")[0]), fix)
    return error
