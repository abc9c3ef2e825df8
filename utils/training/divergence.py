"""Report NaN or infinite losses and weights with the update, the rank and the samples.

This happens before a checkpoint is saved. A training loss that is far too high is reported too.
"""

import math
import shlex
from itertools import accumulate

from utils.console import join_names, say
from utils.errors import UserError
from utils.launch import script_command
from utils.models import bad_tensors, is_sharded, sum_bits
from utils.runs import parameters_and_optimizer_state
from utils.training.run import Run

_FIX = "increase --warmup_steps or set --clip_norm"
_EXPLODED = 10  # times the loss of uniform predictions
_SHOWN = 8  # samples in the message; the log has all


def report_bad_loss(run: Run, bad: tuple[int, int], rank: int) -> None:
    """Raise ValueError for the microbatch `bad` of a rank, whose loss is NaN or infinite: its
    update, counted from 0, and its number.
    """
    step, microbatch = bad
    ends = list(accumulate(run.plan.microbatch_sizes(run.plan.at(step)[1]), initial=0))
    samples = samples_of_update(run, step)[slice(*ends[microbatch : microbatch + 2])]
    run.log.write("bad_loss", step=step + 1, rank=rank, samples=samples)
    command = script_command("replay.py", run.config.plugin)
    command += ["--run", str(run.folder), "--update", str(step + 1)]
    command += ["--microbatch", str(microbatch), *(["--cpu"] if run.config.cpu else [])]
    where = f"{step + 1} on rank {rank}, samples {join_names(samples, _SHOWN)}"
    fix = f"lower --lr, {_FIX}; to see it: {shlex.join(command)}"
    raise UserError(f"the training loss is NaN or infinite at update {where}", fix)


def samples_of_update(run: Run, step: int) -> list[int]:
    """The samples of update `step`, counted from 0, as rows of the data set, in the run's order."""
    epoch, position = run.plan.at(step)
    drawn = run.plan.draws(epoch)[0][position : position + run.plan.update_size(position)]
    return run.data.train.image_index[drawn].tolist()


def watch_loss(run: Run, kind: str, loss: float) -> None:
    """Report, once in a run, a loss of training above 10 times that of uniform predictions, or a
    loss of an evaluation that is NaN or infinite.
    """
    state = run.state
    limit = math.inf
    known = ""
    if kind == "training":
        limit = _EXPLODED * run.task.uniform_loss
        known = f", more than {_EXPLODED} times that of uniform predictions"
    if loss < limit or state.exploded:
        return
    state.exploded = True
    fix = f"lower --lr (for example to {run.config.lr / 10:.2g}), {_FIX}"
    say(f"update {state.step}: the {kind} loss is {loss:.4g}{known}; {fix}")


def check_weights(run: Run) -> None:
    """Raise ValueError if a weight is NaN or infinite, although all losses were finite."""
    if bad_tensors(run.module.state_dict()):
        step = run.state.step
        of = (
            f"after update {step} on samples {join_names(samples_of_update(run, step - 1), _SHOWN)}"
        )
        raise UserError(
            f"weights are NaN or infinite {of}, although its loss was finite", f"lower --lr, {_FIX}"
        )


def compare_ranks(run: Run) -> None:
    """Raise UserError on all ranks if the bits of their weights or optimizer states differ;
    collective.

    All ranks apply the same gradients, so a difference does not go away. If their processors may
    round differently, this is said once, and the run continues. Buffers are not compared, because
    batch statistics are those of each rank's own samples.
    """
    ranks = run.ranks
    state = run.state
    if ranks.topology.world_size == 1 or is_sharded(run.module):
        return
    sums = sum_bits(parameters_and_optimizer_state(run.module, run.optimizer))
    found = ranks.gather((ranks.rounding, sums))
    kinds = sorted({kind for kind, _ in found})
    for name in found[0][1]:
        values = [sums.get(name) for _, sums in found]
        usual = max(values, key=values.count)
        odd = [rank for rank, value in enumerate(values) if value != usual]
        if not odd:
            continue
        if len(kinds) == 1:
            where = (
                f"{name} of rank {join_names(odd)} differs from that of rank {values.index(usual)}"
            )
            fix = "your own code must treat all ranks alike; without own code, a device"
            fix = f"{fix} may be faulty: test the devices, then resume from the last checkpoint"
            raise UserError(f"after update {state.step}, {where}", fix)
        if not state.rounding_said:
            between = f"{'; '.join(kinds)}; checkpoints have those of rank 0"
            problem = "the ranks' weights differ; their processors may round differently"
            say(f"{problem}: {between}")
        state.rounding_said = True
        return
