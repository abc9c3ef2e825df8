"""Print the machine and the versions of a table of checks as one JSON line. run.py runs it once."""

import json
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import common  # noqa: E402
import torch  # noqa: E402

from extras.doctor.processes import code_hash  # noqa: E402
from utils.launch.devices import nccl_version, nvidia_smi  # noqa: E402

PACKAGES = ["torch", "torchvision", "accelerate"]
ON_CPU = os.environ.get("LOCKSTEP_GPU_TESTS_ON_CPU") == "1"


def as_json() -> str:
    """Return the GPUs, the driver, the versions, and a short hash of train.py and utils/."""
    drivers = nvidia_smi("--query-gpu=driver_version")
    nccl = nccl_version() if torch.version.cuda else ()
    versions = {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}
    # with the build, such as +cu130
    versions |= {
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "NCCL": ".".join(map(str, nccl)) or None,
    }
    code = code_hash()
    known = common.machine()
    parts = [common.machine_line(), f"CUDA {versions['CUDA']}", f"NCCL {versions['NCCL']}"]
    parts += [f"driver {driver}" for driver in drivers[:1]]
    # rows of other code, and those of dry runs, are in a table of their own
    parts += [f"code {code}"] + ["dry run on CPUs"] * ON_CPU
    found = {
        "machine": ", ".join(parts),
        "gpus": known["gpus"],
        "card": known["gpu"],
        "processor": f"{known['cores']} x {known['cpu']} ({known['cpu_capability']})",
        "driver": drivers[0] if drivers else None,
        "versions": versions,
        "code": code,
    }
    return json.dumps(found)


if __name__ == "__main__":
    print(as_json())
