"""A lost rank ends a run on GPUs with one line, with both classes that PyTorch has for NCCL."""

import shlex
import signal
from pathlib import Path

import pytest
from helpers.gpu_runs import (
    NCCL_CLASSES,
    await_update,
    begin,
    command,
    finish,
    pick,
    ranks,
    seconds_left,
)
from helpers.training_runs import MLP
from helpers.waiting import SOON, error_lines, until

pytestmark = pytest.mark.gpu

ENDLESS = shlex.join(MLP) + " --max_steps 1000000 --run_name run --timeout 15 --log_every 1"
ENDLESS += " --eval_every 1000000 --save_every 1000000"


FAULTS = {"killed": 4, "stopped": 13, "raises": 14}  # and their order in the part `first`
CASES = [pytest.param(fault, "NCCL", marks=pytest.mark.first(FAULTS[fault])) for fault in FAULTS]
CASES += [(fault, nccl) for nccl in NCCL_CLASSES[1:] for fault in FAULTS]


@pytest.mark.limit(120)
@pytest.mark.parametrize(("fault", "nccl"), CASES)
def test_a_lost_rank_ends_the_run_with_at_most_one_line(
    fault, nccl, pair, over_nccl, record_property
):
    env = {"TORCH_DIST_USE_NCCL2": "1" if nccl == "NCCL2" else "0", "LOCKSTEP_WATCHED": "raise"}
    script = "tests/gpu/watched/train.py" if fault == "raises" else "train.py"
    started = begin(command(2, script, f"{ENDLESS} {pair}"), **env)
    await_update(started, 25 if fault == "raises" else 5)
    second = ranks(started)[1] if fault != "raises" else None
    if second is not None:
        second.send_signal(signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
    if fault == "stopped":
        until(
            lambda: error_lines(Path("out.txt").read_text()), seconds=min(3 * SOON, seconds_left())
        )
        second.kill()
    ended = finish(started, seconds=3 * SOON)
    record_property("seconds to the end", f"{ended.seconds:.0f}")
    lines = error_lines(ended.out)
    # If a rank is killed, the launcher ends the other one before it can notice.
    assert ended.code and len(lines) <= 1 and (lines or fault != "stopped"), ended.out
    assert ("planted" in ended.out) == (fault == "raises"), ended.out
    assert ended.seconds < pick(SOON, 3 * SOON)
