"""Report NaN or infinite losses and weights with the update, the rank and the samples, before a checkpoint is saved."""

import json
import shlex

import numpy as np
import torch
from torch import nn

from utils.data.order import Plan, share
from utils.data.splits import Split
from utils.errors import UserError
from utils.launch.command import script_command
from utils.ranks.ranks import Ranks
from utils.runs.log import RunLog
from utils.runs.state import TrainState

_FIX = "lower --lr, increase --warmup_steps or set --clip_norm"
_EXPLODED = 10  # times the loss of guessing
_SHOWN = 8  # samples in the message; the log has all


def report_bad_loss(ranks: Ranks, log: RunLog, plan: Plan, train: Split, bad: tuple[int, int] | None) -> None:
    """Raise ValueError on all ranks, which names the first batch with a NaN or infinite loss; collective.

    `bad` is the first such batch of this rank, if any: its update, counted from 0, and the number of its microbatch.
    """
    step, microbatch = min(tuple(json.loads(text)) for text in ranks.gather_text(json.dumps(bad)) if text != "null")
    sizes = plan.microbatch_sizes(plan.at(step)[1])
    start = sum(sizes[:microbatch])
    samples = train.rows[samples_of(plan, step)[start : start + sizes[microbatch]]].tolist()
    processes = ranks.topology.world_size
    rank = next(r for r in range(processes) if microbatch in share(plan.microbatches, processes, r))
    log.write("bad_loss", step=step + 1, rank=rank, samples=samples)
    shown = ", ".join(map(str, samples[:_SHOWN]))
    place = ["--run", str(log.path.parent), "--update", str(step + 1), "--microbatch", str(microbatch)]
    place += ["--cpu"] * ranks.launch.cpu
    command = [*script_command("replay.py"), *place]
    more = f" and {len(samples) - _SHOWN} more (see {log.path})" if len(samples) > _SHOWN else ""
    raise UserError(
        f"the training loss is NaN or infinite at update {step + 1} on rank {rank}, samples {shown}{more}",
        f"{_FIX}; to see it: {shlex.join(command)}",
    )


def samples_of(plan: Plan, step: int) -> np.ndarray:
    """The samples of update `step`, counted from 0, as positions in the training split, in the order of the run."""
    epoch, position = plan.at(step)
    return plan.draws(epoch)[0][position : position + plan.update_size(position)]


def report_explosion(log: RunLog, state: TrainState, loss: float, guessing: float) -> None:
    """Report, once in a run, that the mean training loss since the last record is above 10 times that of guessing."""
    if loss > _EXPLODED * guessing and not state.exploded:
        state.exploded = True
        problem = f"the training loss is {loss:.4g}, while the loss of guessing is {guessing:.4g}"
        log.say(f"update {state.step}: {problem}; {_FIX}")


def check_weights(module: nn.Module, plan: Plan, train: Split, step: int) -> None:
    """Raise ValueError if a weight is NaN or infinite after `step` updates, although all losses were finite."""
    tensors = [tensor for tensor in module.state_dict().values() if tensor.is_floating_point()]
    if not torch.stack([tensor.isfinite().all() for tensor in tensors]).all():
        samples = train.rows[samples_of(plan, step - 1)].tolist()
        shown = ", ".join(map(str, samples[:_SHOWN]))
        raise UserError(
            f"weights are NaN or infinite after update {step}, of {len(samples)} samples {shown}..., although its "
            "loss was finite",
            _FIX,
        )
