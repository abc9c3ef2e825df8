"""How a script joins the processes of its launch, and how the ranks end after an error.

    Error                                   Printed by                                  Exit code
    --------------------------------------  ------------------------------------------  ---------
    before the ranks are connected: flags,  the first rank of each machine; each rank   2
      settings, launch                        if they were started by hand and may
                                              not see each other
    of all ranks (AgreedError)              rank 0                                      2
    of one rank                             the first rank with this error              2
    a lost rank (LostRank)                  rank 0; another one if it does not in time  2
    these three, if the store is lost       each rank                                   2
    any other exception, a bug              each rank that has it, as a traceback       1
    a signal before results are written     rank 0                                      75, 130 (1)
    a wait that the watchdog ends           the first rank that ends                    2, 75 (2)
    blocked after another rank's error      this rank too                               2
    blocked after another rank has stopped  the other rank                              75

    (1) 130 for SIGINT    (2) 75 if the run was asked to stop

Errors of PyTorch with a known cause, such as out of memory, become UserErrors with a fix first
(`with_known_fix`).

After an error, a rank first tells the store that it exits, and why (`Watch.end`). The rank that
prints then prints the line, and writes it to the error file of torchrun or accelerate, which they
repeat at the end. A bug is written there by each rank that has it. Ranks that do not print exit
last (`delay_exit`), because a launcher ends all ranks when one has exited. `ranks/watch.py` ends
waits, in a thread, and `launch/exits.py` prints and exits.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from utils.errors import USER_ERRORS, AgreedError, InUse, is_lost_rank, one_line
from utils.launch import (
    Topology,
    exit_with_error,
    how_to_resume,
    inform_launcher,
    is_launched,
    print_last_line,
    read_topology,
    reports_for_machine,
    with_known_fix,
    with_rank,
)
from utils.output import exit_with, hard_exit
from utils.ranks.ranks import Ranks
from utils.settings.ranks import LaunchConfig
from utils.waiting import wait_for_keys


@contextmanager
def distributed_session(
    prog: str, launch: LaunchConfig, fixed_order: bool = False
) -> Iterator[Ranks]:
    """A context with the ranks of this launch; `fixed_order` as in `check_sharding`.

    After an error, all exit with code 2, and one rank prints one line.
    """
    topology = None
    ranks = None
    try:
        topology = read_topology(init_method=launch.init_method)
        ranks = Ranks(topology, launch, prog, fixed_order)
        ranks.watch.start()
        yield ranks
        ranks.finish()
    except (Exception, KeyboardInterrupt) as error:
        _end(error, prog, launch, topology, ranks)
        raise  # a bug, which needs a traceback
    finally:
        if ranks:
            # If this thread were the last owner of the process groups, Python would crash when it
            # ends.
            ranks.watch.end()
            if sys.exception():  # after its line is printed: srun ends all when one rank exits
                ranks.watch.wait_for_readers()
        if dist.is_initialized():
            raised = sys.exception()
            connected = ranks and ranks.store
            if raised is None or (connected and "nccl" not in dist.get_backend()):
                dist.destroy_process_group()
            else:
                # After an error over NCCL, or while it connects, that would wait for other ranks,
                # so the process just ends.
                code = raised.code if isinstance(raised, SystemExit) else 1
                hard_exit(code if isinstance(code, int) else 1)


def _end(
    error: Exception | KeyboardInterrupt,
    prog: str,
    launch: LaunchConfig,
    topology: Topology | None,
    ranks: Ranks | None,
) -> None:
    """Exit after an error. Returns if it is a bug, which the caller raises again."""
    if isinstance(error, KeyboardInterrupt):
        if ranks is None or ranks.is_main:
            reason = str(error) or "interrupted"
            print_last_line(prog, reason + how_to_resume(prog))
        if ranks:
            ranks.record_end(error)
        exit_with(getattr(error, "code", 130))
    with suppress(ValueError):  # only the main thread can set a handler
        # PyTorch's handler would raise for the next dead worker
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    is_connecting = ranks is not None and ranks.expects_peers and ranks.store is None
    retry = is_connecting or _may_succeed_later(error)  # a missing rank may have died
    error = with_known_fix(error)
    if ranks and isinstance(error, AgreedError):
        ranks.finish()
    prints = _should_print(error, topology, ranks)
    final = ranks.record_end(error) if ranks else error
    if isinstance(final, USER_ERRORS):
        if ranks is None or not ranks.expects_peers:
            final = with_rank(final)
        exit_with_error(final, prog, prints, launch.traceback, retry)
    inform_launcher(f"{prog}: {type(final).__name__}: {one_line(final)}")


def _may_succeed_later(error: Exception) -> bool:
    """Whether another attempt may succeed: not after a problem that the user has to fix."""
    own: BaseException | None = error
    if isinstance(error, AgreedError):
        own = error.__cause__  # None if another rank raised it; that rank decides
    return isinstance(own, InUse) or not isinstance(own, USER_ERRORS)


def _should_print(error: Exception, topology: Topology | None, ranks: Ranks | None) -> bool:
    """Whether this rank prints the error that it exits with, as in the table above."""
    if ranks is None:
        # variables that were exported by hand may be wrong only in this shell
        by_hand = topology is None and "RANK" in os.environ and not is_launched()
        return reports_for_machine() or by_hand
    if ranks.store is None:  # not connected: rank 0 may be missing
        by_hand = ranks.expects_peers and not is_launched()
        return reports_for_machine() or by_hand
    if ranks.watch.store_lost:  # the ranks cannot agree on which of them prints
        return True
    try:
        return _is_chosen(error, ranks, ranks.store)
    except RuntimeError:  # the store is lost
        return True


def _is_chosen(error: Exception, ranks: Ranks, store: dist.Store) -> bool:
    """Whether this one of the connected ranks prints the error."""
    if ranks.is_main:
        store.set("main-prints", "")
    elif isinstance(error, AgreedError):
        return False
    elif is_lost_rank(error):  # rank 0 may be the lost one
        return not wait_for_keys(store, ["main-prints"], seconds=3)
    rank = str(ranks.topology.rank)
    first = store.compare_set(f"error {one_line(error)}", "", rank).decode()
    return first == rank
