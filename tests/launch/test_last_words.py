"""utils/launch/exits.py: the failure table of a launcher ends with our own line.

The tests print the table with torchrun's own code.
"""

import os
from pathlib import Path

import pytest
from helpers.ranks import run_ranks, start_ranks
from helpers.training_runs import MLP, slow_train
from helpers.waiting import has_logged, newest, until
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import doctor
import train


def last_lines(outcomes: list, count: int) -> list[str]:
    """The last lines of the table that torchrun prints for ranks that end like this, without the
    rule below them.
    """
    ends = {
        rank: ProcessFailure(
            local_rank=rank, pid=1, exitcode=outcome.code, error_file=f"error-{rank}.json"
        )
        for rank, outcome in enumerate(outcomes)
    }
    *lines, rule = str(ChildFailedError("train.py", ends)).splitlines()
    assert set(rule) == {"="}
    return [line.strip().removeprefix("traceback : ") for line in lines[-count:]]


def under_launcher(function, *arguments):
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"error-{os.environ['RANK']}.json"
    function(*arguments)


def _diverge(rank: int, error: type[Exception]):
    update = train.train_update

    def failing(run, batches):
        update(run, batches)
        if run.state.step == 3 and run.ranks.topology.rank == rank:
            raise error("sample 7")

    train.train_update = failing
    train.main(["--run_name", "run", *MLP, "--timeout", "60"])


@pytest.mark.full
@pytest.mark.parametrize(
    ("error", "text"),
    [
        pytest.param(ValueError, "train.py: error: sample 7", marks=pytest.mark.full),
        (KeyError, "train.py: KeyError: 'sample 7'"),
    ],
)
def test_the_table_ends_with_the_error_of_the_rank_that_failed(error, text):
    outcomes = run_ranks(2, under_launcher, _diverge, 1, error)
    assert last_lines(outcomes, 1) == [text]


@pytest.mark.full
def test_the_table_ends_with_the_command_that_resumes_a_stopped_run():
    launch = start_ranks(2, under_launcher, slow_train, [*MLP, "--max_steps", "10000"])
    until(has_logged(5))
    os.kill(launch.pids[1], 15)
    outcomes = launch.finish()
    assert [outcome.code for outcome in outcomes] == [75, 75]
    title, command = last_lines(outcomes, 2)
    assert title.startswith(
        f"Stopped after update {newest()} of 10000 (another rank was asked to stop)"
    )
    assert command == outcomes[0].out.splitlines()[-1] and command.startswith("resume with: ")


@pytest.mark.full
def test_the_table_ends_with_what_the_doctor_found():
    Path("file").touch()
    outcomes = run_ranks(2, under_launcher, doctor.main, ["--output_dir", "file"])
    *found, verdict = last_lines(outcomes, 4)
    assert verdict == outcomes[0].out.splitlines()[-1] and "are red" in verdict
    assert any(line.startswith("disk: --output_dir file: file is not") for line in found)
