"""The machine and the versions of a table of checks: prints one JSON line. run.py runs it once."""

import json
import platform
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import common  # noqa: E402
import torch  # noqa: E402

from utils.checks.processes import code_hash  # noqa: E402
from utils.launch.devices import nvidia_smi  # noqa: E402

PACKAGES = ["torch", "torchvision", "accelerate"]


def as_json() -> str:
    """The GPUs, the driver, the versions, and a short hash of train.py and utils/."""
    drivers = nvidia_smi("--query-gpu=driver_version")
    nccl = torch.cuda.nccl.version() if torch.version.cuda else ()
    versions = {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}
    # with the build, such as +cu130
    versions |= {
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "NCCL": ".".join(map(str, nccl)) or None,
    }
    line = f"{common.machine_line()}, CUDA {versions['CUDA']}, NCCL {versions['NCCL']}, driver"
    found = {
        "machine": ", ".join([line, *drivers]),
        "gpus": torch.cuda.device_count(),
        "card": common.machine()["gpu"],
        "driver": drivers[0] if drivers else None,
        "versions": versions,
        "code": code_hash(),
    }
    return json.dumps(found)


if __name__ == "__main__":
    print(as_json())
