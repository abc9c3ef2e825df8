"""How a script joins the processes of its launch, and leaves them."""

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from utils.config.settings import LaunchConfig
from utils.launch.environment import Topology, read_topology
from utils.output import restore_interrupt
from utils.ranks.failure import end_session
from utils.ranks.ranks import Ranks


@contextmanager
def distributed_session(prog: str, launch: LaunchConfig) -> Iterator[Ranks]:
    """A context with the ranks of this launch. After an error, all exit with code 2, and one rank prints one line."""
    topology: Topology | None = None
    ranks: Ranks | None = None
    try:
        restore_interrupt()
        topology = read_topology(init_method=launch.init_method)
        ranks = Ranks(topology, launch, prog)
        ranks.watch.start()
        yield ranks
        ranks.finish()
    except (Exception, KeyboardInterrupt) as error:
        end_session(error, prog, launch, topology, ranks)
        raise  # a bug, which needs a traceback
    finally:
        if ranks is not None:
            # If this thread were the last owner of the process groups, Python would crash when it ends.
            ranks.watch.end()
        if dist.is_initialized():
            _leave_group(sys.exception())


def _leave_group(error: BaseException | None) -> None:
    """Destroy the process group, except after an error over NCCL: then this process exits without doing so.

    NCCL would wait for kernels that wait for other ranks. Before it exits, the process completes its last save and
    prints its traceback.
    """
    if error is None or dist.get_backend() != "nccl":
        dist.destroy_process_group()
        return
    code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
    atexit.register(_exit_without_cleanup, code)


def _exit_without_cleanup(code: int) -> None:
    sys.stdout.flush()  # at this point, Python cannot start the thread of `exit_now`
    sys.stderr.flush()
    os._exit(code)
