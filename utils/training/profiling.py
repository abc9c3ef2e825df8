"""Profile where the time of an update goes: --profile writes a trace of a few updates."""

import os
from contextlib import nullcontext
from typing import Any

import torch

from utils.errors import one_line
from utils.training.run import Run

WAIT, WARM_UP, ACTIVE = 8, 2, 10  # updates that are not recorded, recorded and discarded, recorded and kept
_ROWS = 12  # operations in the table


class Profile:
    """A context around the loop, which must call `step` after each update. With --profile, records ten updates."""

    def __init__(self, run: Run):
        self.path = run.folder / f"trace-rank{run.ranks.topology.rank}.json.gz"
        self.say, self.kind, enabled = run.log.say, run.ranks.device.type, run.config.profile
        self._enabled, self._written = enabled, False
        self._profiler: Any = nullcontext()
        if enabled:
            schedule = torch.profiler.schedule(wait=WAIT, warmup=WARM_UP, active=ACTIVE, repeat=1)
            self._profiler = torch.profiler.profile(schedule=schedule, on_trace_ready=self._write)
        self.step = self._profiler.step if enabled else lambda: None

    def __enter__(self) -> "Profile":
        self._profiler.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        self._profiler.__exit__(*exception)
        if self._enabled and not self._written:
            self.say(f"--profile: the run ended before update {WAIT + WARM_UP + 1}, where the trace starts")

    def _write(self, profiler: torch.profiler.profile) -> None:
        partial = self.path.with_name(f".partial-{self.path.name}")  # the suffix selects the compression
        self._written = True
        try:
            profiler.export_chrome_trace(str(partial))
            os.replace(partial, self.path)
        except (OSError, RuntimeError) as error:  # the run continues without a trace
            self.say(f"--profile: {self.path} cannot be written ({one_line(error)[:120]})")
            return
        longest = profiler.key_averages().table(f"self_{self.kind}_time_total", _ROWS, max_name_column_width=40)
        self.say(f"{longest}trace: {self.path} (open it at https://ui.perfetto.dev)")
