"""--profile: a trace of ten early updates for each rank."""

import os
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from accelerate.utils import ProfileKwargs
from torch.profiler import profile

from utils.console import say
from utils.errors import one_line
from utils.training import Run

_WAIT = 8  # updates that are not recorded
_WARM_UP = 2  # recorded and discarded
_ACTIVE = 10  # recorded and kept


def make_profiler(run: Run) -> AbstractContextManager[profile | None]:
    """A context that records ten updates; the loop calls the profiler's `step` after each one."""
    first = run.state.step + _WAIT + _WARM_UP + 1
    if first > run.updates:
        say(f"--profile: the run ends before update {first}, where the trace begins")
        return nullcontext()
    schedule = {"wait": _WAIT, "warmup": _WARM_UP, "active": _ACTIVE, "repeat": 1}
    writing = partial(_write_trace, run)
    return run.accelerator.profile(ProfileKwargs(schedule_option=schedule, on_trace_ready=writing))


def _write_trace(run: Run, profiler: profile) -> None:
    """Write the trace of this rank to the run folder."""
    path = run.folder / f"trace-rank{run.ranks.topology.rank}.json.gz"
    unfinished = path.with_name(f".partial-{path.name}")  # the suffix selects the compression
    try:
        profiler.export_chrome_trace(str(unfinished))
        os.replace(unfinished, path)
    except (OSError, RuntimeError) as error:  # the run continues without a trace
        say(f"--profile: {path} cannot be written ({one_line(error)[:120]})")
        return
    say(f"trace: {path} (open it at https://ui.perfetto.dev)")
