"""How a script joins the processes of its launch, and how it exits. An error is one line from one rank."""

import atexit
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist

from utils.config.settings import LaunchConfig
from utils.errors import USER_ERRORS, AgreedError, one_line
from utils.launch.environment import Topology, is_launched, read_topology
from utils.launch.exits import (
    exit_with_error,
    inform_launcher,
    reports_for_machine,
    with_known_fix,
    with_rank,
)
from utils.ranks.data_watch import DataWatch
from utils.ranks.ranks import Ranks
from utils.ranks.watch import print_error


def _topology(launch: LaunchConfig) -> Topology:
    """The rank of this process and its launch, which may be a call of Accelerate's debug_launcher."""
    if not (dist.is_initialized() and "ACCELERATE_DEBUG_RDV_FILE" in os.environ):
        return read_topology(init_method=launch.init_method)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()  # `Ranks` creates a new one, with timeouts and a store
    meeting = Path(os.environ["ACCELERATE_DEBUG_RDV_FILE"])
    meeting.touch()  # the old group has deleted this file, but the launcher expects it
    launch.init_method = f"file://{meeting}.lockstep"
    return Topology(rank, world_size, rank, world_size, source="debug_launcher")


def _leave_group(error: BaseException | None) -> None:
    """Destroy the process group, except after an error over NCCL: then this process exits without doing so.

    NCCL would wait for kernels that wait for other ranks. Before it exits, the process completes its last save and
    prints its traceback.
    """
    if error is None or dist.get_backend() != "nccl":
        dist.destroy_process_group()
        return
    code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
    atexit.register(_exit_now, code)


def _exit_now(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextmanager
def distributed_session(prog: str, launch: LaunchConfig) -> Iterator[Ranks]:
    """A context with the ranks of this launch. After an error, all exit with code 2, and one rank prints one line."""
    topology: Topology | None = None
    ranks: Ranks | None = None
    watch: DataWatch | None = None
    try:
        topology = _topology(launch)
        ranks = Ranks(topology, launch, prog)
        watch = DataWatch(ranks)
        yield ranks
        ranks.finish()
    except KeyboardInterrupt as interrupt:
        if ranks is None or ranks.is_main:
            text = str(interrupt) or "interrupted"
            hint = "; resume from the last checkpoint with --run_name NAME --resume auto" * (prog == "train.py")
            print_error(prog, f"{text}{hint}", last=True)
        if ranks is not None:
            ranks.record_end(interrupt)
        raise SystemExit(getattr(interrupt, "code", 130)) from None
    except Exception as error:
        with suppress(ValueError):  # only the main thread can set a handler
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # PyTorch's handler would raise for the next dead worker
        error = with_known_fix(error)
        if ranks is not None and isinstance(error, AgreedError):
            ranks.finish()
        # Variables that were exported by hand may be wrong only in this shell.
        by_hand = topology is None and "RANK" in os.environ and not is_launched()
        reports = ranks.should_report(error) if ranks else by_hand or reports_for_machine()
        final = ranks.record_end(error) if ranks else error
        if not isinstance(final, USER_ERRORS):
            inform_launcher(f"{prog}: {type(final).__name__}: {one_line(final)}")
            raise  # a bug, which needs a traceback
        known = ranks is not None and ranks.expects_peers
        exit_with_error(final if known else with_rank(final), prog, reports, launch.traceback)
    finally:
        if watch is not None:
            watch.end()
        if dist.is_initialized():
            _leave_group(sys.exception())
