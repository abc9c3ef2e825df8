"""Report NaN or infinite losses and weights with the update, the rank and the samples.

This happens before a checkpoint is saved. A training loss that is far too high is reported too.
"""

import math
import shlex

from utils.console import join_names, say
from utils.errors import UserError
from utils.launch.command import script_command
from utils.models.checking import bad_tensors, sum_bits
from utils.models.sharded import is_sharded
from utils.runs.loading import trained_tensors
from utils.training.run import Run

_ALSO = "increase --warmup_steps or set --clip_norm"
_FIX = f"lower --lr, {_ALSO}"
_EXPLODED = 10  # times the loss of uniform predictions
_NOISE = 10  # the mean loss of n samples differs by less than this / sqrt(n) times that loss
LEARNED = 0.8  # of that loss: a run with a lower training loss has learned
_SHOWN = 8  # samples in the message; the log has all


def report_bad_loss(run: Run, rank: int, step: int, microbatch: int) -> None:
    """Raise ValueError, which names a microbatch whose loss is NaN or infinite; `step` counts from
    0.
    """
    sizes = run.plan.microbatch_sizes(run.plan.at(step)[1])
    start = sum(sizes[:microbatch])
    samples = find_samples(run, step)[start : start + sizes[microbatch]]
    run.log.write("bad_loss", step=step + 1, rank=rank, samples=samples)
    command = script_command("replay.py", run.config.plugin)
    command += ["--run", str(run.folder), "--update", str(step + 1)]
    command += ["--microbatch", str(microbatch), *(["--cpu"] if run.config.cpu else [])]
    shown = join_names(samples, _SHOWN)
    problem = f"the training loss is NaN or infinite at update {step + 1} on rank {rank}"
    problem = f"{problem}, samples {shown}"
    raise UserError(problem, f"{_FIX}; to see it: {shlex.join(command)}")


def find_samples(run: Run, step: int) -> list[int]:
    """The samples of update `step`, counted from 0, as rows of the data set, in the run's order."""
    epoch, position = run.plan.at(step)
    drawn = run.plan.draws(epoch)[0][position : position + run.plan.update_size(position)]
    return run.data.train.image_index[drawn].tolist()


def watch_loss(run: Run, loss: float, count: float) -> None:
    """Report, once in a run, a high mean loss of a train record of `count` samples.

    The limit is 10 times the loss of uniform predictions. After the run has learned, it is
    1 + 10 / sqrt(count) times that loss.
    """
    uniform, state = run.task.uniform_loss, run.state
    limit = min(_EXPLODED, 1 + _NOISE / math.sqrt(count)) if state.learned else _EXPLODED
    state.learned |= loss < LEARNED * uniform
    if loss > limit * uniform:
        known = f"while the loss of uniform predictions is {uniform:.4g}"
        _report(run, f"the training loss is {loss:.4g}, {known}")


def watch_evaluation(run: Run, loss: float) -> None:
    """Report, once in a run, that the loss of an evaluation is NaN or infinite."""
    if not math.isfinite(loss):
        _report(run, f"the loss of the evaluation is {loss}")


def _report(run: Run, problem: str) -> None:
    if run.state.exploded:
        return
    run.state.exploded = True
    fix = f"lower --lr (for example to {run.config.lr / 10:.2g}), {_ALSO}"
    if not run.state.learned:
        fix = f"{fix}; if the loss has hardly changed, raise --lr"
    say(f"update {run.state.step}: {problem}; {fix}")


def check_weights(run: Run) -> None:
    """Raise ValueError if a weight is NaN or infinite, although all losses were finite."""
    if bad_tensors(run.module.state_dict()):
        step = run.state.step
        of = f"after update {step} on samples {join_names(find_samples(run, step - 1), _SHOWN)}"
        raise UserError(f"weights are NaN or infinite {of}, although its loss was finite", _FIX)


def compare_ranks(run: Run) -> None:
    """Raise UserError on all ranks if the bits of their weights or optimizer states differ;
    collective.

    All ranks apply the same gradients, so a difference does not go away. If their processors may
    round differently, this is said once, and the run continues. Buffers are not compared, because
    batch statistics are those of each rank's own samples.
    """
    if run.ranks.topology.world_size == 1 or is_sharded(run.module):
        return
    found = run.ranks.gather(
        (run.ranks.rounding, sum_bits(trained_tensors(run.module, run.optimizer)))
    )
    kinds = sorted({kind for kind, _ in found})
    for name in found[0][1]:
        values = [sums.get(name) for _, sums in found]
        usual = max(values, key=values.count)
        odd = [rank for rank, value in enumerate(values) if value != usual]
        if not odd:
            continue
        if len(kinds) > 1:
            if not run.state.rounding_said:
                between = f"{'; '.join(kinds)}; checkpoints have those of rank 0"
                say(f"the ranks' weights differ; their processors may round differently: {between}")
            run.state.rounding_said = True
            return
        where = f"after update {run.state.step}, {name} of rank {join_names(odd)} differs from that of rank"
        fix = "your own code must treat all ranks alike; without own code, a device"
        fix = f"{fix} may be faulty: test the devices, then resume from the last checkpoint"
        raise UserError(f"{where} {values.index(usual)}", fix)
