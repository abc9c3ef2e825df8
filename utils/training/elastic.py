"""Runs whose number of machines changes: torchrun --nnodes MIN:MAX (docs/elastic.md)."""

import os
from math import lcm

from utils.config.bounds import require
from utils.config.settings import TrainConfig
from utils.launch.command import elastic_nodes
from utils.launch.environment import local_rank_and_size

_VARIABLES = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 TORCH_ELASTIC_WORKER_IDENTICAL=1"


def check_elastic(config: TrainConfig) -> None:
    """Raise UserError if the command could not start the run again after a machine has joined or left."""
    nodes = elastic_nodes()
    if nodes is None:
        return
    # PyTorch 2.15 gives a machine that joins no address of a store that is shared between its launchers and the ranks.
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    problem = f"with --nnodes {nodes[0]}:{nodes[1]}, all launchers fail when a machine joins, unless variables are set"
    require(not shared, problem, f"export {_VARIABLES} on all machines before torchrun")
    again = config.run_name is not None and config.resume == "auto"
    problem = f"--nnodes {nodes[0]}:{nodes[1]} starts this command again when a machine joins or leaves"
    require(again, problem, "add --run_name NAME --resume auto, which continue the run")


def check_elastic_sizes(config: TrainConfig, global_batch_size: int) -> None:
    """Raise UserError if the run does not work on each number of processes that torchrun may start."""
    nodes = elastic_nodes()
    if nodes is None:
        return
    sizes = [machines * local_rank_and_size()[1] for machines in range(nodes[0], nodes[1] + 1)]
    may_start = f"the {sizes[-1]} processes that --nnodes {nodes[0]}:{nodes[1]} may start"
    require(not config.shares, "--shares is for one number of processes", "leave out --shares, or MIN: of --nnodes")
    if config.microbatches:
        fix = "lower --nnodes, or start a new run with more microbatches"
        require(sizes[-1] <= config.microbatches, f"--microbatches {config.microbatches} is less than {may_start}", fix)
        return
    problem = f"the global batch of {global_batch_size} is not divisible by each number of processes up to {may_start}"
    fix = f"use --microbatches, or set --global_batch_size to a multiple of {lcm(*sizes)}"
    require(global_batch_size % lcm(*sizes) == 0, problem, fix)
