"""Report NaN or infinite losses and weights with the update, the rank and the samples, before a checkpoint is saved."""

import math
import shlex
from collections.abc import Mapping
from typing import Any

from utils.console import join_names
from utils.errors import UserError
from utils.launch.command import script_command
from utils.models.checking import bad_tensors
from utils.training.run import Run
from utils.training.schedule import count_updates

_ALSO = "increase --warmup_steps or set --clip_norm"
_FIX = f"lower --lr, {_ALSO}"
_EXPLODED = 10  # times the loss of uniform predictions
_NOISE = 10  # the mean loss of n samples differs by less than this / sqrt(n) times that loss
LEARNED = 0.8  # of that loss: a run with a lower training loss has learned
_NEARLY = 0.95  # of that loss, because always predicting a frequent class can have a lower one
_FEW = 20  # samples of an evaluation; a finite loss of fewer is ignored
_BEGINNING = 100  # updates after the warm-up, in which a network may predict one class for everything
_SHOWN = 8  # samples in the message; the log has all


def report_bad_loss(run: Run, rank: int, step: int, microbatch: int) -> None:
    """Raise ValueError, which names a microbatch of update `step`, counted from 0, whose loss is NaN or infinite."""
    sizes = run.plan.microbatch_sizes(run.plan.at(step)[1])
    start = sum(sizes[:microbatch])
    samples = find_samples(run, step)[start : start + sizes[microbatch]]
    run.log.write("bad_loss", step=step + 1, rank=rank, samples=samples)
    command = [*script_command("replay.py"), "--run", str(run.folder), "--update", str(step + 1)]
    command += ["--microbatch", str(microbatch), *(["--cpu"] if run.config.cpu else [])]
    shown = join_names(samples, _SHOWN)
    problem = f"the training loss is NaN or infinite at update {step + 1} on rank {rank}, samples {shown}"
    raise UserError(problem, f"{_FIX}; to see it: {shlex.join(command)}")


def find_samples(run: Run, step: int) -> list[int]:
    """The samples of update `step`, counted from 0, as rows of the data set, in the order of the run."""
    epoch, position = run.plan.at(step)
    drawn = run.plan.draws(epoch)[0][position : position + run.plan.update_size(position)]
    return run.data.train.rows[drawn].tolist()


def watch_loss(run: Run, loss: float, count: float) -> None:
    """Report, once in a run, that training diverges: a train record of `count` samples has a high mean loss.

    The limit is 10 times the loss of uniform predictions. After the run has learned, it is 1 + 10 / sqrt(count) times
    that loss.
    """
    uniform, state = run.task.uniform_loss, run.state
    limit = min(_EXPLODED, 1 + _NOISE / math.sqrt(count)) if state.learned else _EXPLODED
    state.last_loss = loss
    state.learned |= loss < LEARNED * uniform
    if loss > limit * uniform:
        _report(run, f"the training loss is {loss:.4g}, while the loss of uniform predictions is {uniform:.4g}")


def watch_evaluation(run: Run, metrics: Mapping[str, Any]) -> None:
    """Report, once in a run, an evaluation that shows that training diverges.

    Its loss is NaN or infinite. Or it has at least 20 samples, a loss of at least 0.95 times that of uniform
    predictions, and

    * all predictions are the same, although the model has learned or has had 100 updates after the warm-up, or
    * the model has learned, the loss of the last train record is again at least 0.8 times that of uniform predictions,
      and the metric is worse than in the first evaluation by more than 2 / sqrt(count).
    """
    task, state, loss, count = run.task, run.state, metrics["loss"], metrics["count"]
    if not math.isfinite(loss):
        return _report(run, f"the loss of the evaluation is {loss}")
    value = metrics.get(task.metric)
    state.first_metric = value if state.first_metric is None else state.first_metric
    if loss < _NEARLY * task.uniform_loss or count < _FEW:
        return
    fall = 0.0 if value is None or state.first_metric is None else state.first_metric - value
    forgets = state.learned and (state.last_loss or math.inf) >= LEARNED * task.uniform_loss
    usual = 0.3 if run.config.lr_schedule == "onecycle" else 0
    warmup = count_updates(usual if run.config.warmup_steps is None else run.config.warmup_steps, run.updates)
    if run.evaluator.is_constant and (state.learned or state.step >= warmup + _BEGINNING):
        _report(run, f"all {count} predictions are the same, with a loss of {loss:.4g}")
    elif forgets and (fall if task.higher_is_better else -fall) > 2 / math.sqrt(count):
        _report(run, f"{task.metric} was {state.first_metric:.4f} in the first evaluation and is {value:.4f} now")


def _report(run: Run, problem: str) -> None:
    if run.state.exploded:
        return
    run.state.exploded = True
    fix = f"lower --lr (for example to {run.config.lr / 10:.2g}), {_ALSO}"
    if not run.state.learned:
        fix = f"{fix}; if the loss has hardly changed, raise --lr"
    run.log.say(f"update {run.state.step}: {problem}; {fix}")


def check_weights(run: Run) -> None:
    """Raise ValueError if a weight is NaN or infinite after the last update, although all losses were finite."""
    if bad_tensors(run.module.state_dict()):
        of = f"after update {run.state.step} on samples {join_names(find_samples(run, run.state.step - 1), _SHOWN)}"
        raise UserError(f"weights are NaN or infinite {of}, although its loss was finite", _FIX)
