"""Check that the processes of a launch fit together: machines, threads, versions, code, and the output folder.

The functions that take `ranks` are collective and must be called by all ranks or none.
"""

import hashlib
import os
import platform
import socket
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import accelerate
import torch

from utils.checks.findings import Finding
from utils.checks.machine import GB
from utils.config.scripts import DoctorConfig
from utils.errors import one_line
from utils.files import expand
from utils.launch.devices import nvidia_smi
from utils.launch.network import address_of
from utils.memory import free_memory, usable_cores
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
    """Machine, device, memory, threads, network and versions of each rank, in the order of the ranks; collective."""
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
        "threads": ranks.threads,
        "cores": sorted(usable_cores()),
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


def threads(facts: Sequence[dict]) -> Finding:
    """Check that each machine has a core for each thread of its processes."""
    short, values = [], []
    for host, members in _hosts(facts).items():
        cores = len({core for rank in members for core in facts[rank]["cores"]})
        wanted = sum(facts[rank]["threads"] for rank in members)
        values.append(f"{wanted} thread{'s' * (wanted > 1)} for {cores} core{'s' * (cores > 1)}")
        if wanted > cores:
            short.append(f"{host}: {values[-1]}")
    fix = "threads that share a core slow all ranks down; start at most one process for each core, and leave out "
    fix += "--threads, so that each process gets an equal share of the cores"
    return Finding("threads", "; ".join(short[:4] or dict.fromkeys(values)), not short, fix)


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
