"""Profile where the time of an update goes: --profile writes a trace of a few updates."""

import os
from contextlib import nullcontext
from typing import Any

import torch
from torch.autograd import DeviceType

from utils.console import table
from utils.errors import one_line
from utils.training.run import Run

WAIT, WARM_UP, ACTIVE = 8, 2, 10  # updates that are not recorded, recorded and discarded, recorded and kept


class Profile:
    """A context around the loop, which must call `step` after each update. With --profile, records ten updates."""

    def __init__(self, run: Run):
        self.path = run.folder.path / f"trace-rank{run.ranks.topology.rank}.json.gz"
        self.say, enabled = run.log.say, run.config.profile
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
        self.say(f"{_summary(profiler)}\ntrace: {self.path} (open it at https://ui.perfetto.dev)")


def _summary(profiler: torch.profiler.profile, most: int = 12) -> str:
    """The operations that took longest, in milliseconds per update, on the GPU if there is one.

    The times include evaluations and saves between the updates.
    """
    events = profiler.key_averages()
    updates = next(event.count for event in events if event.key == "ProfilerStep*")
    # The time of a kernel is also part of the operation that launched it, and of annotated ranges.
    kernels = [e for e in events if e.device_type != DeviceType.CPU and not e.is_user_annotation]
    on_gpu = any(event.self_device_time_total for event in kernels)
    if on_gpu:
        times = {kernel.key: kernel.self_device_time_total / 1e3 / updates for kernel in kernels}
    else:
        times = {e.key: e.self_cpu_time_total / 1e3 / updates for e in events if e.device_type == DeviceType.CPU}
        times["Python and its calls"] = times.pop("ProfilerStep*", 0.0)
    total = sum(times.values())
    longest = sorted(times.items(), key=lambda item: -item[1])[:most]
    rows = [(name[:50], f"{ms:8.3f} ms  {ms / total:4.0%}") for name, ms in longest]
    return table(f"One update: {total:.1f} ms on the {'GPU' if on_gpu else 'CPU'}", rows)
