"""Settings of processes and devices."""

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from utils.config import Bound, PositiveFloat, PositiveInt, Settings, at_most

Seconds = Annotated[PositiveFloat, at_most(7 * 24 * 3600)]  # gloo and the store count milliseconds
Precision = Literal["no", "bf16", "fp16", "auto"]
LAUNCH_GROUP = {
    "processes and devices": [
        "cpu",
        "backend",
        "init_method",
        "interface",
        "threads",
        "timeout",
        "plugin",
        "traceback",
    ]
}
_PLACE = Bound(
    "env:// or tcp://HOST:PORT",
    re.compile(r"env://$|tcp://([^/:]+|\[[^/\]]+\]):[1-9]\d{0,4}$").match,
)


@dataclass(kw_only=True)
class LaunchConfig(Settings):
    """How the processes of any script start."""

    groups = LAUNCH_GROUP

    cpu: bool = False
    """Run on the CPU even if there are GPUs."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """Communication backend of the process group; auto is nccl on GPUs and gloo on CPUs."""
    init_method: Annotated[str, _PLACE] = "env://"
    """Where the processes connect: env:// uses the launcher's MASTER_ADDR and MASTER_PORT, and
    tcp://HOST:PORT a port on the machine of rank 0."""
    interface: str | None = None
    """Network interface between the machines, such as eth0 (default: the one that reaches rank 0's
    machine)."""
    threads: PositiveInt | None = None
    """CPU threads per process (default: an equal share of the cores)."""
    timeout: Seconds = 600.0
    """Seconds that a rank waits for another before the run fails; a download on the main process
    may take longer."""
    plugin: str | None = None
    """Python file to import, which adds your own models, losses, optimizers and other parts."""
    traceback: bool = False
    """Print the Python traceback of an error as well."""


@dataclass(kw_only=True)
class RankSettings(LaunchConfig):
    """What `utils.ranks` reads."""

    mixed_precision: Precision | None = None
    """Precision of the model: no is float32, auto is bf16 if all devices support it natively
    (default: as in the accelerate config, else auto on GPUs and no on CPUs)."""
    tf32: bool | None = None
    """Use TF32 for float32 on GPUs: matrix products and convolutions round their inputs to a 10-bit
    mantissa, which is faster (default: true, but false with --deterministic)."""
    comm_hook: Literal["no", "fp16", "bf16"] = "no"
    """Convert gradients to this type for the exchange between processes (no: float32). fp16 and
    bf16 halve the traffic, but runs on different numbers of processes then differ by more than
    float32 rounding."""
    find_unused_parameters: bool = False
    """Allow a model that does not use all of its parameters in each forward pass; slower."""
    deterministic: bool = False
    """Use deterministic GPU kernels; slower. An operation without such a kernel is an error."""
