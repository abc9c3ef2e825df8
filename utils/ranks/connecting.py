"""Create the groups of processes, over which all ranks communicate."""

import os
import re
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store

from utils.errors import UserError, one_line
from utils.launch import Topology, address_of, is_set, shards_model
from utils.waiting import call_with_timeout

_PATIENCE = timedelta(days=1)  # for slow work on one rank, such as a download
# more for NCCL, which prints a dump and aborts: the watch reports a timeout first
_NCCL_LATER = timedelta(seconds=30)
_CONNECT = 36.0  # seconds to connect 32 ranks


def connect(
    store: Store,
    topology: Topology,
    device: torch.device,
    backend: str,
    timeout: float,
    interface: str,
) -> tuple[Any, Any]:
    """Create the default group, and two groups of gloo: one whose collectives wait for `timeout`
    seconds, and one that waits for slow work. Returns the two groups of gloo.

    Raises UserError if the processes cannot connect.
    """

    def create() -> tuple[Any, Any]:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # also in this thread
        limit = timedelta(seconds=timeout)
        # FSDP with offload keeps its shards on the host, where only gloo can exchange them.
        offloads = backend == "nccl" and shards_model() and is_set("FSDP_OFFLOAD_PARAMS")
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if offloads else backend,
            store=dist.PrefixStore("group", store),
            rank=topology.rank,
            world_size=topology.world_size,
            timeout=limit + _NCCL_LATER if backend == "nccl" else limit,
        )
        fast = dist.new_group(backend="gloo", timeout=limit)
        return fast, dist.new_group(backend="gloo", timeout=_PATIENCE)

    try:
        return call_with_timeout(create, connect_timeout(backend, topology.world_size, timeout))
    except (RuntimeError, ValueError) as error:
        reason = re.sub(r"\[/\S+\] ", "", one_line(error))  # gloo names its source files
        place = f"from {address_of(interface)} on interface {interface} of {socket.gethostname()}"
        raise UserError(
            f"the processes found each other but could not connect over {backend}, {place} ({reason[:160]})",
            "check --interface, and whether a firewall is between the machines",
        ) from error


def connect_timeout(backend: str, processes: int, timeout: float) -> float:
    """The seconds that the processes, which are all running, have to connect."""
    # ProcessGroupNCCL2 starts NCCL in this time, the older class later
    if backend == "nccl" and os.environ["TORCH_DIST_USE_NCCL2"] != "0":
        return timeout
    # They connect immediately, or one has died. With the time limit of a group, gloo would block
    # for up to five times as long.
    return min(timeout, _CONNECT * max(1.0, processes / 32))
