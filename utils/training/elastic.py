"""Runs whose number of machines changes: torchrun --nnodes MIN:MAX (docs/elastic.md)."""

import os
from math import lcm

from utils.config.bounds import require
from utils.config.settings import TrainConfig
from utils.launch.command import elastic_nodes
from utils.launch.environment import local_rank_and_size

_VARIABLES = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 TORCH_ELASTIC_WORKER_IDENTICAL=1"


def check_elastic(config: TrainConfig) -> None:
    """Raise UserError if a restart by torchrun, after a machine has joined or left, would fail or
    start a new run.
    """
    nodes = elastic_nodes()
    if nodes is None:
        return
    # If launchers and ranks share a store, PyTorch 2.15 does not send its address to a machine that
    # joins later.
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    given = f"--nnodes {nodes[0]}:{nodes[1]}"
    problem = f"{given}: all launchers would fail when a machine joins, because they share a store"
    require(not shared, problem, f"put {_VARIABLES} before torchrun on all machines")
    depends = config.batch_size and not config.global_batch_size
    problem = "--batch_size is per process, so the global batch would depend on the number of machines at the start"
    require(not depends, problem, "set --global_batch_size instead")
    again = config.run_name and config.resume == "auto"
    problem = f"{given} restarts this command when a machine joins or leaves, as a new run"
    require(again, problem, "add --run_name NAME --resume auto to continue the run")


def check_elastic_sizes(config: TrainConfig, global_batch_size: int) -> None:
    """Raise UserError if the run cannot use every number of processes that torchrun can start."""
    nodes = elastic_nodes()
    if nodes is None:
        return
    sizes = [machines * local_rank_and_size()[1] for machines in range(nodes[0], nodes[1] + 1)]
    if config.microbatches:
        problem = f"--microbatches {config.microbatches} is less than the {sizes[-1]} processes of --nnodes"
        fix = "lower --nnodes, or start a new run with more microbatches"
        require(sizes[-1] <= config.microbatches, f"{problem} {nodes[0]}:{nodes[1]}", fix)
        return
    problem = f"the global batch of {global_batch_size} is not divisible by all possible numbers of processes"
    fix = f"use --microbatches, or set --global_batch_size to a multiple of {lcm(*sizes)}"
    require(global_batch_size % lcm(*sizes) == 0, f"{problem} ({', '.join(map(str, sizes))})", fix)
