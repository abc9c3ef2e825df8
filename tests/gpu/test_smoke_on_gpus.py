"""Two ranks communicate over NCCL, also on one GPU.

run.py asks this once, and the other checks use what it finds.
"""

import json
import os
import sys
from pathlib import Path

import pytest
from helpers.gpu_runs import ON_CPU, REPORT, begin, end_started, finish, seconds_left
from helpers.ranks import free_port
from helpers.training_runs import ROOT

from utils.launch.devices import nccl_version

pytestmark = pytest.mark.gpu

# Where two ranks share a GPU, NCCL may need to be told what not to use.
SETTINGS: list[dict[str, str]] = [
    {"NCCL_NVLS_ENABLE": "0"},
    {"NCCL_NVLS_ENABLE": "0", "NCCL_P2P_DISABLE": "1"},
    {"NCCL_NVLS_ENABLE": "0", "NCCL_P2P_DISABLE": "1", "NCCL_CUMEM_ENABLE": "0"},
]


def write_decision(backend: str, reason: str, settings: dict[str, str]) -> None:
    """Tell run.py the backend of two ranks, and why."""
    decision = {"backend": backend, "reason": reason, "settings": settings}
    if file := os.environ.get("LOCKSTEP_GPU_DECISION"):
        Path(file).write_text(json.dumps(decision))


def talk(settings: dict[str, str], seconds: float) -> tuple[dict | None, str]:
    """Run two ranks with these variables; return times in ms, or None, and output."""
    env = settings | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    env |= {"WORLD_SIZE": "2", "TORCH_DIST_USE_NCCL2": "0"}
    words = [sys.executable, f"{ROOT}/tests/gpu/smoke.py"]
    outs = ["rank0.txt", "rank1.txt"]
    ranks = [
        begin(words, out, RANK=str(rank), LOCAL_RANK=str(rank), **env)
        for rank, out in enumerate(outs)
    ]
    try:
        ended = [finish(rank, out, seconds) for rank, out in zip(ranks, outs, strict=True)]
    except AssertionError as error:  # NCCL may also hang
        return None, str(error)
    finally:
        end_started()
    said = "\n".join(each.out for each in ended)
    figures = [line for line in said.splitlines() if line.startswith("{")]
    return (json.loads(figures[0]) if not any(each.code for each in ended) else None), said


@pytest.mark.limit(130)
def test_two_ranks_communicate_over_nccl(gpus, record_property):
    if ON_CPU:
        write_decision("gloo", "this is a dry run on CPUs", {})
    elif gpus == 1 and nccl_version() < (2, 30):
        version = ".".join(map(str, nccl_version()))
        reason = f"NCCL {version} does not let two ranks share a GPU; 2.30 does (--nccl FILE)"
        write_decision("gloo", reason, {})
        pytest.skip(reason)
    REPORT.mkdir(parents=True, exist_ok=True)
    for number, settings in enumerate(SETTINGS if gpus < 2 else [{}, *SETTINGS]):
        # the first try says all, because it shows what NCCL found on the machine
        detail = {"NCCL_DEBUG": "WARN" if number else "INFO"}
        figures, said = talk(detail | settings, min(40.0, seconds_left()))
        (REPORT / f"nccl-{number + 1}.txt").write_text(said)
        if figures is not None:
            for name, milliseconds in figures.items():
                record_property(f"all_reduce of {name}, ms", milliseconds)
            record_property("settings", " ".join(f"{k}={v}" for k, v in settings.items()))
            if not ON_CPU:
                write_decision("nccl", "two ranks have communicated over it", settings)
            return
    write_decision("gloo", "NCCL did not work with any setting", {})
    raise AssertionError(said[-3000:])
