"""tests/helpers: logs that are being written, ranks that a failed test left, checks of GPUs."""

import json
import signal
import time
from pathlib import Path

import pytest
import torch
from helpers.ranks import end_leftovers, returned, start_ranks
from helpers.training_runs import ROOT, records, start
from helpers.waiting import has_logged, lives, records_so_far, until

LOG = Path("runs/run/log.jsonl")


def log_in_two_halves():
    """Write two records; between the halves of the second there is a pause that the test ends."""
    LOG.parent.mkdir(parents=True)
    with LOG.open("w") as log:
        for part in ('{"kind": "a", "step": 1}\n{"kind"', ': "a", "step": 2}\n'):
            log.write(part)
            log.flush()
            Path("half").touch()
            until(Path("go").exists)


def test_a_log_that_ends_in_half_a_line_is_read_up_to_it_and_then_on():
    launch = start_ranks(1, log_in_two_halves)
    until(Path("half").exists)
    assert [record["step"] for record in records_so_far(LOG)] == [1]
    assert has_logged(1)() and not has_logged(2)()
    # an error in the log of a run that has ended
    with pytest.raises(AssertionError, match="ends in half a line"):
        records("run")
    Path("go").touch()
    until(has_logged(2))
    assert launch.finish()[0].code == 0
    assert [record["step"] for record in records("run")] == [1, 2]


def test_ranks_that_a_failed_test_left_behind_are_ended_even_if_stopped():
    launch = start_ranks(2, time.sleep, 600, launcher=True)
    launch.kill(signal.SIGSTOP)
    end_leftovers()
    until(lambda: not any(map(lives, [*launch.pids, launch.launcher])))
    end_leftovers()  # a second time there is nothing to do


@pytest.mark.full
def test_ranks_train_after_torch_export_in_this_process():
    """A forked child could have no backward pass if autograd started threads for the CUDA device
    pretended here.
    """
    torch.export.export(torch.nn.Linear(2, 2), (torch.ones(2, 2),))
    torch.ones(1, requires_grad=True).backward()
    assert returned(2, gradient) == [3.0, 3.0]


def gradient():
    """The gradient of 3x."""
    number = torch.ones((), requires_grad=True)
    (3 * number).backward()
    return float(number.grad)


@pytest.mark.full  # three processes import PyTorch
def test_without_a_gpu_the_checks_are_skipped_and_the_table_says_so():
    earlier = {"outcome": "passed", "seconds": 1, "figures": {"images/s": 2}, "reason": ""}
    Path("gpu.json").write_text(json.dumps({"another machine": {"an earlier part": earlier}}))
    outside = {"LOCKSTEP_TESTS_GPUS": "", "PYTEST_XDIST_WORKER": ""}  # of this test
    ended = start("python", ROOT / "tests/gpu/run.py", "waits", "--report", ".", **outside)
    assert "| an earlier part | passed | 1 | images/s 2 |" in ended[1], ended
    others, rows = json.loads(Path("gpu.json").read_text()).values()
    assert others == {"an earlier part": earlier} and len(rows) >= 11
    assert {row["reason"] for row in rows.values()} == {"no GPU is visible"}
