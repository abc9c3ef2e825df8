"""Which device a rank computes on, and what its group speaks over."""

import os

import torch

from utils.launch.environment import Topology


def cpu_was_asked_for(flag: bool) -> bool:
    """Whether --cpu, the accelerate config or the environment say so."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("-1")  # as accelerate_configs/2cpu.yaml does
    return flag or hidden or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")


def choose_device(topology: Topology, cpu: bool) -> torch.device:
    """This rank's GPU, or the CPU where there is none or it was asked for."""
    if not torch.cuda.is_available() or cpu_was_asked_for(cpu):
        return torch.device("cpu")
    gpus, number = torch.cuda.device_count(), topology.local_rank
    if gpus == 1 and topology.source in ("SLURM", "Open MPI", "MPICH"):
        number = 0  # each task sees the one GPU that was given to it (--gpus-per-task); NCCL refuses a shared one
    elif topology.local_world_size > gpus:
        raise ValueError(
            f"{topology.local_world_size} processes on this machine, but {gpus} GPU{'s' * (gpus != 1)}; "
            f"launch with --num_processes {gpus}, or on the CPU with --cpu or accelerate_configs/2cpu.yaml"
        )
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)  # first of all, or every rank would open a context on GPU 0
    return device


def choose_backend(topology: Topology, asked: str, device: torch.device) -> str:
    """NCCL between GPUs and gloo between CPUs, or what `--backend` asks for; none for a single process."""
    if topology.world_size == 1:
        return "none"
    if asked == "nccl" and device.type == "cpu":
        raise ValueError("--backend nccl needs GPUs; leave it out, and gloo is used on CPUs")
    return ("nccl" if device.type == "cuda" else "gloo") if asked == "auto" else asked


def gpu_id(device: torch.device) -> str:
    """What tells one GPU from all others, in whatever order a process sees them; empty for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
