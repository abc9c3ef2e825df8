"""The device that a rank computes on, and the backend of its process group."""

import ctypes
import os
import re
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress

import torch

from utils.console import join_names, say
from utils.errors import UserError, counted
from utils.launch.environment import Topology, is_set

_OWN = "or only its own (srun --gpus-per-task 1)"
ONE_EACH = f"start at most one process per GPU; each must see all GPUs, {_OWN}"


def cpu_is_requested(flag: bool) -> bool:
    """Whether --cpu, the accelerate config or the environment selects the CPU."""
    # as accelerate_configs/2cpu.yaml does
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("-1")
    return flag or hidden or is_set("ACCELERATE_USE_CPU")


def choose_device(topology: Topology, cpu: bool) -> torch.device:
    """This rank's GPU, or the CPU if there is no GPU or the user has selected the CPU.

    Raises UserError if there are fewer GPUs than processes, or if PyTorch cannot use the GPUs of
    the machine.
    """
    if cpu_is_requested(cpu):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        _check_unusable_gpus()
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    number = topology.local_rank
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES") or topology.source in (
        "SLURM",
        "Open MPI",
        "MPICH",
    )
    if gpus == 1 and chosen:
        # a scheduler or a wrapper may show each process only its own GPU; NCCL refuses a shared one
        number = 0
    # NCCL then accepts several ranks on one GPU, for tests
    elif os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
        number %= gpus
    elif topology.local_world_size > gpus:
        problem = f"{topology.local_world_size} processes on this machine"
        on_cpu = "on the CPU with --cpu or accelerate_configs/2cpu.yaml"
        fix = f"launch with --num_processes {gpus}, or {on_cpu}"
        raise UserError(f"{problem}, but {counted(gpus, 'GPU')}", fix)
    device = torch.device("cuda", number)
    # before any other CUDA call, or every rank would open a context on GPU 0
    torch.cuda.set_device(device)
    return device


def _check_unusable_gpus() -> None:
    """Raise UserError if PyTorch finds no GPU although nvidia-smi lists some and they are not
    hidden.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    # CUDA sees none after another word
    if visible is not None and not re.match(r"\s*(\d|GPU-|MIG-)", visible):
        return
    if gpus := nvidia_smi("--query-gpu=name"):
        problem = f"nvidia-smi lists {counted(len(gpus), 'GPU')}, but PyTorch finds none"
        if visible:
            problem += f" with CUDA_VISIBLE_DEVICES={visible}"
        built = "built without CUDA"
        if torch.version.cuda:
            built = f"built for CUDA {torch.version.cuda}"
        install = "install a PyTorch build that supports it, or use the CPU with --cpu"
        raise UserError(
            f"{problem} (torch {torch.__version__} is {built})",
            f"update the NVIDIA driver, {install}",
        )


def gpu_id(device: torch.device) -> str:
    """The UUID of a GPU; empty for a CPU, and for a MIG instance, which is a part of a GPU."""
    if device.type == "cpu" or "MIG" in torch.cuda.get_device_name(device):
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def check_shared_gpus(gpus: Sequence[tuple[str, str]], backend: str) -> None:
    """Print which ranks share a GPU; `gpus` has the host and the `gpu_id` of each rank.

    Raises UserError if the backend is NCCL and does not allow it.
    """
    ranks_of = defaultdict(list)
    for rank, (host, gpu) in enumerate(gpus):
        if gpu:
            ranks_of[host, gpu].append(rank)
    shared = [ranks for ranks in ranks_of.values() if len(ranks) > 1]
    if not shared:
        return
    problem = f"ranks {join_names(shared[0])} share a GPU"
    if backend == "nccl":
        version = nccl_version()
        if not is_set("NCCL_MULTI_RANK_GPU_ENABLE") or version < (2, 30):
            name = ".".join(map(str, version))
            raise UserError(f"{problem}, which NCCL {name} does not allow", ONE_EACH)
    say(f"{problem}: training is slower than with one process")


def nccl_version() -> tuple[int, ...]:
    """The version of the NCCL library in use, which may be a preloaded one; PyTorch's number is a
    constant.
    """
    code = ctypes.c_int()
    for library in (None, "libnccl.so.2"):  # None: what this process has loaded
        with suppress(OSError, AttributeError):
            ctypes.CDLL(library).ncclGetVersion(ctypes.byref(code))
            return code.value // 10_000, code.value // 100 % 100, code.value % 100
    return torch.cuda.nccl.version()  # it is a part of PyTorch's own library


def nvidia_smi(query: str) -> list[str]:
    """The lines that nvidia-smi prints; none if it is missing, fails or takes over ten seconds."""
    with suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=True
        ).stdout.splitlines()
    return []


def choose_backend(topology: Topology, backend: str, device: torch.device) -> str:
    """The backend of --backend; auto means NCCL on GPUs and gloo on CPUs.

    A single process has "none".
    """
    if topology.world_size == 1:
        return "none"
    if backend == "nccl" and device.type == "cpu":
        raise UserError("--backend nccl needs GPUs", "leave it out to use gloo on CPUs")
    if backend == "auto":
        return "nccl" if device.type == "cuda" else "gloo"
    return backend
