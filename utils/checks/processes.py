"""Check that the processes of a launch fit together, how fast they exchange data, and that a training step is correct.

The functions that take `ranks` are collective and must be called by all ranks or none.
"""

import hashlib
import math
import os
import platform
import socket
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from pathlib import Path

import accelerate
import torch
import torch.distributed as dist
from torch import Tensor, nn

from utils.checks.findings import Finding
from utils.checks.machine import GB
from utils.config.scripts import DoctorConfig
from utils.config.settings import TrainConfig
from utils.errors import one_line
from utils.files import expand
from utils.launch.devices import nvidia_smi
from utils.launch.network import address_of
from utils.memory import free_memory
from utils.ranks.accelerator import compile_model, make_accelerator
from utils.ranks.ranks import Ranks

_PATIENCE = 5.0  # seconds until a new file must be visible; NFS caches the list of a folder for a few seconds


def named_ranks(texts: Sequence[str]) -> str:
    """The texts that are not empty, each with its rank."""
    parts = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
    return "; ".join(parts[:4]) + f"; and {len(parts) - 4} more" * (len(parts) > 4)


def different(texts: Sequence[str]) -> str:
    """A line for each different text, with its ranks; empty if all ranks have the same text."""
    kinds = {text: [rank for rank, other in enumerate(texts) if other == text] for text in dict.fromkeys(texts)}
    if len(kinds) < 2:
        return ""
    return "\n".join(f"{text} on rank{'s' * (len(r) > 1)} {', '.join(map(str, r))}" for text, r in kinds.items())


def facts_of_all(ranks: Ranks) -> list[dict]:
    """Machine, device, memory, network and versions of each rank, in the order of the ranks; collective."""
    gpu, device = ranks.device.type == "cuda", ranks.device
    versions = {"python": platform.python_version(), "torch": torch.__version__, "accelerate": accelerate.__version__}
    if gpu:
        driver = next(iter(nvidia_smi("--query-gpu=driver_version")), "?")
        versions |= {"CUDA": str(torch.version.cuda), "driver": driver}
        with suppress(AttributeError, ImportError):  # a build without NCCL
            versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    facts = {
        "host": socket.gethostname(),
        "device": str(device),
        "kind": torch.cuda.get_device_name(device) if gpu else "cpu",
        "gpu_memory": torch.cuda.mem_get_info(device) if gpu else None,
        "memory": free_memory(),
        "interface": ranks.interface,
        "address": address_of(ranks.interface) if ranks.interface else "",
        "versions": versions,
        "code": code_hash(),
    }
    return ranks.gather(facts)


def code_hash() -> str:
    """A short hash of train.py and everything in utils/."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for path in [root / "train.py", *sorted((root / "utils").rglob("*.py"))]:
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def machines(facts: Sequence[dict]) -> list[Finding]:
    """A line for each machine, with its ranks, devices and free memory."""
    findings = []
    for host, members in _hosts(facts).items():
        mine = [facts[rank] for rank in members]
        span = f"rank{'s' * (len(members) > 1)} {members[0]}" + f" to {members[-1]}" * (len(members) > 1)
        text = f"{host}: {span}, {_free([mine[0]['memory']])} memory free"
        if mine[0]["gpu_memory"]:
            kinds = " and ".join(dict.fromkeys(fact["kind"] for fact in mine))
            devices = " to ".join(dict.fromkeys((mine[0]["device"], mine[-1]["device"])))
            text += f"\n{len(mine)} x {kinds} ({devices}), {_free([fact['gpu_memory'] for fact in mine])} free"
        else:
            text += ", on the CPU"
        findings.append(Finding("machine", text, numbers={"host": host, "ranks": members}))
    return findings


def _hosts(facts: Sequence[dict]) -> dict[str, list[int]]:
    hosts: dict[str, list[int]] = {}
    for rank, fact in enumerate(facts):
        hosts.setdefault(fact["host"], []).append(rank)
    return hosts


def _free(pairs: Sequence[tuple[int, int]]) -> str:
    least, most = (f"{pick(free for free, _ in pairs) / GB:.1f}" for pick in (min, max))
    return f"{least if least == most else f'{least} to {most}'} of {pairs[0][1] / GB:.1f} GB"


def versions(facts: Sequence[dict]) -> Finding:
    """Check that all ranks have the same torch and accelerate. Other differences are listed, but not red."""
    texts = [", ".join(f"{name} {version}" for name, version in fact["versions"].items()) for fact in facts]
    differ = {name for name in ("torch", "accelerate") if len({fact["versions"][name] for fact in facts}) > 1}
    install = "pip install -r requirements.txt -c constraints.txt"
    fix = f"the ranks may compute different numbers; run `{install}` on every machine"
    return Finding("versions", different(texts) or texts[0], not differ, fix, facts[0]["versions"])


def code(facts: Sequence[dict]) -> Finding:
    """Check that all ranks have the same train.py and utils/."""
    hashes = [fact["code"] for fact in facts]
    value = different(hashes) or f"train.py and utils/ have the hash {hashes[0]}" + " on all ranks" * (len(hashes) > 1)
    fix = "the ranks would run different programs; copy the same code to all machines, or run `git pull` on each"
    return Finding("code", value, len(set(hashes)) == 1, fix)


def folder(ranks: Ranks, config: DoctorConfig) -> Finding:
    """Check that every rank can write to the output folder and sees the files of the other ranks there."""
    token, path = ranks.gather(uuid.uuid4().hex)[0], expand(config.output_dir)
    made = [place for place in (path, *path.absolute().parents) if not os.path.exists(place)]
    own = path / f".doctor-{token}-{ranks.topology.rank}"
    try:
        errors = ranks.gather(_write(own))
        writers = [rank for rank, error in enumerate(errors) if not error]
        unseen = ranks.gather(_unseen(path, token, writers) if all(not error for error in errors) else "")
    finally:
        with suppress(OSError):
            own.unlink(missing_ok=True)
        ranks.gather("")  # after this, all ranks have deleted their files
        for place in made:
            with suppress(OSError):
                place.rmdir()
    if text := named_ranks(errors):
        return Finding("folder", text, False, "set --output_dir to a folder where every rank can write")
    fix = "all machines must use the same run folder; set --output_dir to a folder on a disk that they share"
    text = named_ranks(unseen)
    seen = " and sees the files of the others" if ranks.topology.world_size > 1 else ""
    return Finding("folder", text or f"every rank can write to {path}{seen}", not text, fix)


def _write(file: Path) -> str:
    """Write a file in a folder, which is created if it does not exist; returns the error, if any."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    except OSError as error:
        return one_line(error)
    return ""


def _unseen(path: Path, token: str, writers: Sequence[int]) -> str:
    deadline = time.monotonic() + _PATIENCE
    while missing := [str(rank) for rank in writers if not (path / f".doctor-{token}-{rank}").exists()]:
        if time.monotonic() > deadline:
            plural = "s" * (len(missing) > 1)
            return f"does not see the file{plural} of rank{plural} {', '.join(missing)} in {path}"
        time.sleep(0.1)
    return ""


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
