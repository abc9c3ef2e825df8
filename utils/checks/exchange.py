"""Check that data arrives between the processes, how fast, and that a training step is correct.

All public functions are collective and must be called by all ranks or none.
"""

import math
import time
from collections.abc import Sequence
from copy import deepcopy

import torch
import torch.distributed as dist
from torch import Tensor, nn

from utils.checks.findings import Finding
from utils.checks.machine import GB
from utils.config.scripts import DoctorConfig
from utils.config.settings import TrainConfig
from utils.ranks.accelerator import compile_model, make_accelerator
from utils.ranks.ranks import Ranks

_SIZES = {"4 KB": 2**12, "64 KB": 2**16, "1 MB": 2**20, "16 MB": 2**24, "64 MB": 2**26}  # bytes that are summed
_SECONDS = 1.5  # for all sizes together


def bandwidth(ranks: Ranks, config: DoctorConfig, facts: Sequence[dict]) -> Finding:
    """Measure how fast gradients of several sizes are summed, in GB/s over each connection."""
    interfaces = ", ".join(dict.fromkeys(f"{fact['interface']} ({fact['address']})" for fact in facts))
    count, left = ranks.topology.world_size, _SECONDS
    numbers: dict[str, float] = {}
    for name, size in _SIZES.items():
        values = torch.zeros(size // 4, device=ranks.device)
        rounds = 3 if size > 2**20 else 10
        begun = _now(ranks)
        dist.all_reduce(values)  # the first call creates buffers and connections
        first = _now(ranks) - begun
        begun = _now(ranks)
        for _ in range(rounds):
            dist.all_reduce(values)
        took = (_now(ranks) - begun) / rounds
        seconds, spent = ranks.gather((took, first + took * rounds))[0]
        numbers[name] = 2 * (count - 1) / count * size / seconds / GB
        left -= spent
        if left < 4 * spent:  # the next size may take that long; all ranks use the time of the main process
            break
    value = ", ".join(f"{rate:.2g} at {name}" for name, rate in numbers.items())
    fix = (
        f"below --slow {config.slow} GB/s, training waits for gradients; check --interface and the switch port, or try "
    )
    fix += "--comm_hook bf16"
    return Finding(
        "all-reduce",
        f"{ranks.backend} over {interfaces}, GB/s: {value}",
        max(numbers.values()) >= config.slow,
        fix,
        numbers,
    )


def _now(ranks: Ranks) -> float:
    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)
    return time.perf_counter()


def gradients(ranks: Ranks) -> Finding:
    """Check that a training step of a small model on all ranks has the gradients of one process with the same batch."""
    count, rank = ranks.topology.world_size, ranks.topology.rank
    accelerator = make_accelerator(ranks, TrainConfig(mixed_precision="no"))
    torch.manual_seed(0)  # the same samples and weights on all ranks
    samples, targets = (torch.randn(4 * count + 3, size, dtype=torch.float64) for size in (20, 5))
    single = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 5)).double()
    module = deepcopy(single)
    compile_model(accelerator, nn.Identity())  # so that Accelerate does not compile the model for one step
    model = accelerator.prepare(module)

    ((single(samples) - targets) ** 2).sum().div(len(samples)).backward()
    mine, wanted = (values.tensor_split(count)[rank].to(ranks.device) for values in (samples, targets))
    ((model(mine) - wanted) ** 2).sum().mul(count / len(samples)).backward()  # DDP averages, see train.py
    expected, found = _gradient(single), _gradient(module)
    error = ((expected - found).norm() / expected.norm()).item()
    worst = max(ranks.gather(error if math.isfinite(error) else math.inf))
    fix = "training would differ from that on one process; try another --backend, or another version of torch or "
    fix += f"{ranks.backend}; check the lines `versions` and `code`"
    value = f"differ from those of one process by {worst:.0e}"
    if worst < 1e-9:
        value = f"equal those of one process to within {worst:.0e}"
    return Finding("gradients", value, worst < 1e-9, fix, {"difference": worst})


def _gradient(module: nn.Module) -> Tensor:
    """All gradients of a module in a row, on the CPU."""
    return torch.cat([p.grad.flatten().cpu() for p in module.parameters() if p.grad is not None])
