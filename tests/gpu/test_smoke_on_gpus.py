"""Do two ranks talk over NCCL, also on one GPU? run.py asks this once, and the other checks use what
it finds.
"""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from helpers.gpu_runs import ON_CPU, begin, end_started, finish, seconds_left
from helpers.ranks import free_port
from helpers.training_runs import ROOT

pytestmark = pytest.mark.gpu

# Where two ranks share a GPU, NCCL may need to be told what not to use.
SETTINGS: list[dict[str, str]] = [
    {"NCCL_NVLS_ENABLE": "0"},
    {"NCCL_NVLS_ENABLE": "0", "NCCL_P2P_DISABLE": "1"},
    {"NCCL_NVLS_ENABLE": "0", "NCCL_P2P_DISABLE": "1", "NCCL_CUMEM_ENABLE": "0"},
]


def decide(backend: str, reason: str, settings: dict[str, str]) -> None:
    """Tell run.py what two ranks use."""
    decision = {"backend": backend, "reason": reason, "settings": settings}
    if file := os.environ.get("LOCKSTEP_GPU_DECISION"):
        Path(file).write_text(json.dumps(decision))


def talk(settings: dict[str, str], seconds: float) -> tuple[dict | None, str]:
    """The milliseconds of two ranks with these variables, or None and what they said."""
    env = settings | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    env |= {"WORLD_SIZE": "2", "NCCL_DEBUG": "WARN", "TORCH_DIST_USE_NCCL2": "0"}
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
def test_two_ranks_talk_over_nccl(gpus, record_property):
    if ON_CPU:
        decide("gloo", "this is a dry run on CPUs", {})
    elif gpus == 1 and torch.cuda.nccl.version() < (2, 30):
        version = ".".join(map(str, torch.cuda.nccl.version()))
        reason = f"NCCL {version} does not let two ranks share a GPU; 2.30 does (--nccl FILE)"
        decide("gloo", reason, {})
        pytest.skip(reason)
    said = ""
    for settings in SETTINGS if gpus < 2 else [{}, *SETTINGS]:
        figures, said = talk(settings, min(40.0, seconds_left()))
        if figures is not None:
            for name, milliseconds in figures.items():
                record_property(f"all_reduce of {name}, ms", milliseconds)
            record_property("settings", " ".join(f"{k}={v}" for k, v in settings.items()))
            if not ON_CPU:
                decide("nccl", "two ranks have talked over it", settings)
            return
    decide("gloo", "NCCL did not work with any setting", {})
    raise AssertionError(said[-3000:])
