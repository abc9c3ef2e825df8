"""Check that the processes of a launch fit together, how fast they exchange data, and that a
training step is correct.

The functions that take `ranks` are collective and must be called by all ranks or none.
"""

import hashlib
import math
import os
import platform
import socket
import time
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from copy import deepcopy
from pathlib import Path

import accelerate
import torch
import torch.distributed as dist
from torch import Tensor, nn

from extras.doctor.findings import Finding
from extras.doctor.machine import GB
from utils.files import check_output_folder, expand
from utils.launch import address_of, nccl_version, nvidia_smi
from utils.memory import free_memory
from utils.models import full_tensor
from utils.ranks import Ranks, compile_model, make_accelerator
from utils.settings.ranks import RankSettings
from utils.settings.scripts import DoctorConfig

# seconds until a new file must be visible; NFS caches the list of a folder for a few seconds
_PATIENCE = 5.0


def facts_of_all(ranks: Ranks) -> list[dict]:
    """Machine, device, memory, network and versions of each rank, in the order of the ranks;
    collective.
    """
    gpu = ranks.device.type == "cuda"
    device = ranks.device
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "accelerate": accelerate.__version__,
    }
    if gpu:
        driver = next(iter(nvidia_smi("--query-gpu=driver_version")), "?")
        versions |= {"CUDA": str(torch.version.cuda), "driver": driver}
        with suppress(AttributeError, ImportError):  # a build without NCCL
            versions["NCCL"] = ".".join(map(str, nccl_version()))
    facts = {
        "host": socket.gethostname(),
        "device": str(device),
        "kind": torch.cuda.get_device_name(device) if gpu else "cpu",
        "gpu_memory": torch.cuda.mem_get_info(device) if gpu else None,
        "memory": free_memory(),
        "network": f"{ranks.interface} ({address_of(ranks.interface)})" if ranks.interface else "",
        "versions": versions | {"code": code_hash()},
    }
    return ranks.gather(facts)


def code_hash() -> str:
    """A short hash of train.py, utils/ and extras/."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    folders = [*(root / "utils").rglob("*.py"), *(root / "extras").rglob("*.py")]
    for path in [root / "train.py", *sorted(folders)]:
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def machines(facts: Sequence[dict]) -> list[Finding]:
    """A line for each machine, with its ranks, devices and free memory."""
    findings = []
    for host, members in _ranks_by(fact["host"] for fact in facts).items():
        mine = [facts[rank] for rank in members]
        text = f"{host}: {_name_ranks(members)}, {_free(mine[0]['memory'])} memory free"
        if mine[0]["gpu_memory"]:
            kinds = " and ".join(dict.fromkeys(fact["kind"] for fact in mine))
            devices = " to ".join(dict.fromkeys((mine[0]["device"], mine[-1]["device"])))
            least = min(fact["gpu_memory"] for fact in mine)
            text += f"\n{len(mine)} x {kinds} ({devices}), at least {_free(least)} free"
        else:
            text += ", on the CPU"
        findings.append(Finding("machine", text, numbers={"host": host, "ranks": members}))
    return findings


def _ranks_by(texts: Iterable[str]) -> dict[str, list[int]]:
    """The ranks that have each text."""
    found: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        found.setdefault(text, []).append(rank)
    return found


def _name_ranks(ranks: Sequence[int]) -> str:
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{word} {', '.join(map(str, ranks))}"


def _free(pair: tuple[int, int]) -> str:
    return f"{pair[0] / GB:.1f} of {pair[1] / GB:.1f} GB"


def versions(facts: Sequence[dict]) -> Finding:
    """Check that all ranks have the same torch, accelerate and code.

    Other differences are listed, but not red.
    """
    differ = any(
        len({fact["versions"][name] for fact in facts}) > 1
        for name in ("torch", "accelerate", "code")
    )
    texts = _ranks_by(
        ", ".join(f"{name} {version}" for name, version in fact["versions"].items())
        for fact in facts
    )
    lines = [*texts]
    if len(texts) > 1:
        lines = [f"{text} on {_name_ranks(ranks)}" for text, ranks in texts.items()]
    value = "\n".join(lines)
    same = "copy the same code (train.py and utils/) and run"
    command = "`pip install -r requirements.txt -c constraints.txt`"
    fix = f"the ranks may compute different numbers; on every machine, {same} {command}"
    return Finding("versions", value, not differ, fix, facts[0]["versions"])


def folder(ranks: Ranks, config: DoctorConfig) -> Finding | list[Finding]:
    """Check that the ranks see the files that rank 0 writes to the output folder, if there are
    several.
    """
    names = ranks.gather(f".doctor-{uuid.uuid4().hex}")
    if len(names) == 1:
        return []
    with ranks.agree():
        path = expand(config.output_dir)
        existing = check_output_folder("--output_dir", path)
        # Ranks may name different folders that do not exist yet: their names become part of the
        # file's name.
        missing = path.absolute().relative_to(existing.absolute())
        file = existing / "-".join([names[0], *missing.parts])
    try:
        ranks.from_main(file.touch)
        deadline = time.monotonic() + _PATIENCE
        while not os.path.exists(file) and time.monotonic() < deadline:
            time.sleep(0.1)
        unseen = [rank for rank, seen in enumerate(ranks.gather(os.path.exists(file))) if not seen]
    finally:  # also if a rank fails meanwhile
        if ranks.is_main:
            file.unlink(missing_ok=True)
    value = (
        f"no files of rank 0 seen by {_name_ranks(unseen)}"
        if unseen
        else "all ranks see the files of rank 0"
    )
    problem = "all machines must use the same run folder"
    fix = f"{problem}; set --output_dir to a folder on a disk that they share"
    return Finding("folder", f"{value} in {config.output_dir}", not unseen, fix)


# bytes that are summed
_SIZES = {"4 KB": 2**12, "64 KB": 2**16, "1 MB": 2**20, "16 MB": 2**24, "64 MB": 2**26}
_ROUNDS = 3


def bandwidth(ranks: Ranks, config: DoctorConfig, facts: Sequence[dict]) -> Finding | list[Finding]:
    """Measure how fast gradients of several sizes are summed, in GB/s over each connection, if
    there are any.
    """
    if len(facts) == 1:
        return []
    interfaces = ", ".join(dict.fromkeys(fact["network"] for fact in facts))
    numbers = {}
    for name, size in _SIZES.items():
        values = torch.zeros(size // 4, device=ranks.device)
        dist.all_reduce(values)  # the first call creates buffers and connections
        begun = _now(ranks)
        for _ in range(_ROUNDS):
            dist.all_reduce(values)
        seconds = ranks.gather(_now(ranks) - begun)[0]  # of the main process on all ranks
        sent = 2 * (len(facts) - 1) / len(facts) * size * _ROUNDS
        numbers[name] = sent / seconds / GB
        if seconds > 0.3:  # the next size may take 16 times as long
            break
    rates = ", ".join(f"{rate:.2g} at {name}" for name, rate in numbers.items())
    value = f"{ranks.backend} over {interfaces}, GB/s: {rates}"
    healthy = max(numbers.values()) >= config.slow
    problem = f"below --slow {config.slow} GB/s, training waits for gradients"
    fix = f"{problem}; check --interface and the switch port, or try --comm_hook bf16"
    return Finding("all-reduce", value, healthy, fix, numbers)


def _now(ranks: Ranks) -> float:
    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)
    return time.perf_counter()


def gradients(ranks: Ranks) -> Finding:
    """Check that a training step of a small model on all ranks has the gradients of one process
    with the same batch.
    """
    count = ranks.topology.world_size
    rank = ranks.topology.rank
    accelerator = make_accelerator(ranks, RankSettings(mixed_precision="no"), fixed_order=False)
    torch.manual_seed(0)  # the same samples and weights on all ranks
    samples, targets = (torch.randn(4 * count + 3, size, dtype=torch.float64) for size in (20, 5))
    single = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 5)).double()
    module = deepcopy(single)
    # so that Accelerate does not compile the model for one step
    compile_model(accelerator, nn.Identity())
    if accelerator.is_fsdp2:
        # it may name layers that only the user's model has
        accelerator.state.fsdp_plugin.auto_wrap_policy = None
    # FSDP2 needs both in one call
    model, _ = accelerator.prepare(module, torch.optim.SGD(module.parameters()))

    ((single(samples) - targets) ** 2).sum().div(len(samples)).backward()
    mine, wanted = (
        values.tensor_split(count)[rank].to(ranks.device) for values in (samples, targets)
    )
    ((model(mine) - wanted) ** 2).sum().mul(count / len(samples)).backward()  # DDP and FSDP average
    expected = _gradient(single)
    found = _gradient(module)
    error = ((expected - found).norm() / expected.norm()).item()
    worst = max(ranks.gather(error if math.isfinite(error) else math.inf))
    problem = "training would differ from that on one process"
    other = f"another --backend, or another version of torch or {ranks.backend}"
    fix = f"{problem}; try {other}; check the line `versions`"
    value = f"differ from those of one process by {worst:.0e}"
    if worst < 1e-9:
        value = f"equal those of one process to within {worst:.0e}"
    return Finding("gradients", value, worst < 1e-9, fix, {"difference": worst})


def _gradient(module: nn.Module) -> Tensor:
    """All gradients of a module, concatenated, on the CPU; collective if the module is sharded."""
    return torch.cat(
        [full_tensor(p.grad).flatten().cpu() for p in module.parameters() if p.grad is not None]
    )
