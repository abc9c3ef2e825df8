"""How a script joins the processes of its launch, and how it ends: with one line on one rank if there is an error."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist

from utils.config.settings import LaunchConfig
from utils.errors import USER_ERRORS, AgreedError
from utils.launch.environment import Topology, is_launched, read_topology
from utils.launch.exits import exit_with_error, reports_for_machine, with_known_fix, with_rank
from utils.ranks.data_watch import DataWatch
from utils.ranks.ranks import Ranks
from utils.ranks.watch import print_error


def _topology(launch: LaunchConfig) -> Topology:
    """This process's rank among those launched, also in a function that Accelerate's debug_launcher has started."""
    if not (dist.is_initialized() and "ACCELERATE_DEBUG_RDV_FILE" in os.environ):
        return read_topology(init_method=launch.init_method)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()  # Ranks makes its own, with timeouts and a store
    meeting = Path(os.environ["ACCELERATE_DEBUG_RDV_FILE"])
    meeting.touch()  # the last rank to leave the old group has deleted it, and the launcher expects it
    launch.init_method = f"file://{meeting}.lockstep"
    return Topology(rank, world_size, rank, world_size, source="debug_launcher")


@contextmanager
def distributed_session(prog: str, launch: LaunchConfig) -> Iterator[Ranks]:
    """The ranks of this launch; an error inside ends this process with code 2, and one rank prints it on one line."""
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
            print_error(prog, f"{text}; resume from the last checkpoint with --run_name NAME --resume auto")
        if ranks is not None:
            ranks.record_end(interrupt)
        raise SystemExit(getattr(interrupt, "code", 130)) from None
    except Exception as error:
        with suppress(ValueError):  # only the main thread may do this
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # PyTorch's handler would raise here for the next dead worker
        error = with_known_fix(error)
        if ranks is not None and isinstance(error, AgreedError):
            ranks.finish()
        # Variables that were exported by hand may be wrong in this shell only.
        by_hand = topology is None and "RANK" in os.environ and not is_launched()
        reports = ranks.should_report(error) if ranks else by_hand or reports_for_machine()
        final = ranks.record_end(error) if ranks else error
        if not isinstance(final, USER_ERRORS):
            raise  # a bug: its traceback is what helps
        known = ranks is not None and ranks.expects_peers
        exit_with_error(final if known else with_rank(final), prog, reports, launch.traceback)
    finally:
        if watch is not None:
            watch.end()
        if dist.is_initialized():
            dist.destroy_process_group()
