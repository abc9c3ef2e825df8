"""utils/ranks/stopping.py: a run told to stop saves, leaves together, and goes on as before."""

import os
import signal
import sys
import time
from itertools import count
from pathlib import Path

import psutil
import pytest
from accelerate import Accelerator
from helpers.make_data import image_folder
from helpers.ranks import Outcome, run_ranks, start_ranks
from helpers.training_runs import MLP as FLAGS
from helpers.training_runs import (
    codes,
    full,
    kill_myself,
    records,
    same_tensors,
    slow_train,
    steps,
    train_run,
    train_watched,
    weights,
    words,
)
from helpers.waiting import error_lines, has_logged, newest, until

import train
from utils.launch.command import resume_command
from utils.runs.manifest import sha256_of
from utils.training import setup


def check_stopped(outcomes: list[Outcome], reason: str) -> None:
    """All ranks left with the code that asks for a resume, and the main process said last how to go
    on.
    """
    assert codes(outcomes) == [75] * len(outcomes), outcomes[0].err
    assert f"Stopped after update {newest()} of" in outcomes[0].out and reason in outcomes[0].out
    last = outcomes[0].out.splitlines()[-1]
    assert last.startswith("resume with: ") and last.endswith("--run_name run --resume auto")
    assert all(outcome.err == "" for outcome in outcomes)


@pytest.mark.parametrize(
    "processes, number",
    [
        full(1, signal.SIGHUP),
        full(2, signal.SIGUSR1),
        (2, signal.SIGTERM),
        full(3, signal.SIGINT),
    ],
)
def test_a_signal_to_one_rank_stops_all_after_the_same_update_and_loses_nothing(processes, number):
    flags = [*FLAGS, "--max_steps", "150"]
    launch = start_ranks(processes, slow_train, flags, 0.01, 100)
    until(has_logged(50))
    os.kill(launch.pids[-1], number)
    Path("go").touch()
    check_stopped(launch.finish(), number.name if processes == 1 else "another rank was asked to")
    stopped = newest()
    assert 50 <= stopped < 150
    train_run(processes, "run", *flags, "--resume", "auto")
    whole = train_run(processes, "whole", *flags)
    assert steps("run", "start") == [0, stopped]
    found, expected = (
        [r["loss"] for r in log if r["kind"] != "start"] for log in (records("run"), whole)
    )
    assert found == expected
    seconds = [record["seconds"] for record in records("run", "train")]
    # time before the stop counts: 10 ms an update
    assert seconds == sorted(seconds) and seconds[-1] > 0.01 * stopped
    assert same_tensors(weights("run"), weights("whole"))


@pytest.mark.full
def test_ranks_whose_launcher_is_killed_save_and_leave():
    launch = start_ranks(2, slow_train, [*FLAGS, "--max_steps", "10000"], launcher=True)
    until(has_logged(20))
    os.kill(launch.launcher, signal.SIGKILL)
    check_stopped(launch.finish_soon(), "the launcher has exited")


@pytest.mark.full
def test_under_nohup_a_closed_terminal_does_not_stop_a_run():
    launch = start_ranks(1, _train_under_nohup, [*FLAGS, "--max_steps", "60"])
    until(has_logged(40))
    launch.kill(signal.SIGHUP)
    Path("go").touch()
    assert launch.finish()[0].code == 0


def _train_under_nohup(flags):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    slow_train(flags, 0.01, 50)


@pytest.mark.full
def test_a_stop_in_the_middle_of_an_evaluation_leaves_it_to_the_resumed_run():
    flags = [*FLAGS, *words("--max_steps 50 --eval_batch_size 4")]
    launch = start_ranks(2, _train_and_evaluate_slowly, flags)
    until(Path("evaluating").exists)
    os.kill(launch.pids[-1], signal.SIGTERM)
    Path("told").touch()
    check_stopped(launch.finish(), "")
    assert newest() == 40 and records("run", "eval") == []
    train_run(2, "run", *flags, "--resume", "auto")
    train_run(2, "whole", *flags)
    found, expected = (
        [r | {"seconds": 0} for r in records(run, "eval")] for run in ("run", "whole")
    )
    assert found == expected and steps("run", "eval") == [40, 50]
    best, expected = (Path(f"runs/{run}/checkpoints/best").read_text() for run in ("run", "whole"))
    assert best == expected
    # The resumed run has saved update 40 again before it has trained.
    again, before = (Path(f"runs/{run}/checkpoints/step-00000040") for run in ("run", "whole"))
    for file in ("model.safetensors", "optimizer.bin"):
        assert sha256_of(again / file) == sha256_of(before / file)


def _train_and_evaluate_slowly(flags):
    from utils.tasks.classification import Classification

    add, blocks = Classification.evaluate, count(1)

    def slow(*arguments):
        if next(blocks) == 2:
            Path("evaluating").touch()
            until(Path("told").exists)
        # so that the ranks, who meet once a second, meet before the last of 22 blocks
        time.sleep(0.4)
        return add(*arguments)

    Classification.evaluate = slow
    slow_train(flags)


@pytest.mark.full
def test_a_stop_while_a_checkpoint_is_written_leaves_after_it():
    launch = start_ranks(2, _train_and_save_slowly, [*FLAGS, "--max_steps", "500"])
    until(Path("written").exists)
    os.kill(launch.pids[-1], signal.SIGTERM)
    Path("told").touch()
    check_stopped(launch.finish(), "")
    assert newest() == 30  # the checkpoint that was being written is all that is needed


def _train_and_save_slowly(flags):
    write = Accelerator.save_state

    def slow(accelerator, folder):
        write(accelerator, folder)
        if folder.name == ".step-00000030.partial":
            Path("written").touch()
            until(Path("told").exists)

    Accelerator.save_state = slow
    slow_train(flags)


def test_a_second_interrupt_leaves_at_once():
    launch = start_ranks(1, _train_and_never_finish_an_update, FLAGS)
    for sign in ("training", "interrupted"):
        until(Path(sign).exists)
        launch.kill(signal.SIGINT)
    assert launch.finish()[0].code == -signal.SIGINT


def _train_and_never_finish_an_update(flags):
    def endless(run):
        Path("training").touch()
        until(lambda: run.stopping.request)
        Path("interrupted").touch()
        time.sleep(600)

    train_watched(flags, endless)


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_before_training_is_one_line(number, code):
    (outcome,) = run_ranks(1, _start_slowly, number)
    (line,) = outcome.err.splitlines()
    assert outcome.code == code and f"stopped by {number.name} before results were written" in line


def _start_slowly(number):
    load_data = setup.load_data

    def interrupted(*arguments):
        kill_myself(number)
        return load_data(*arguments)

    setup.load_data = interrupted
    train.main(["--run_name", "run", *FLAGS])


PHOTOS = words("--data photos --num_workers 2 --image_size 112 --threads 1 --model resnet18")
PHOTOS += words("--global_batch_size 8 --max_steps 300 --log_every 1")


@pytest.fixture
def photos():
    image_folder("photos", {"class0": 40, "class1": 40}, size=(120, 120))


@pytest.mark.full
def test_a_signal_to_the_whole_process_group_leaves_the_loader_workers_to_their_rank(photos):
    """As Ctrl-C in a terminal and scancel send it."""
    launch = start_ranks(1, _train_in_a_group_of_its_own, PHOTOS)
    until(has_logged(2))
    os.killpg(launch.pids[0], signal.SIGINT)
    check_stopped(launch.finish(), "SIGINT")


def _train_in_a_group_of_its_own(flags):
    os.setpgid(0, 0)
    slow_train(flags)


def test_a_second_signal_while_the_ranks_leave_changes_nothing():
    """SLURM and a launcher may both pass it on."""
    outcomes = run_ranks(1, _stop_and_be_told_again, [*FLAGS, "--max_steps", "500"])
    check_stopped(outcomes, "SIGTERM")


def _stop_and_be_told_again(flags):
    finish = train.Ranks.finish

    def told_again(ranks):
        kill_myself(signal.SIGTERM)
        finish(ranks)

    train.Ranks.finish = told_again
    train_watched(flags, after=_stop_after_7)


def _stop_after_7(run):
    if run.state.step == 7:
        kill_myself(signal.SIGTERM)


def test_the_command_to_go_on_is_the_one_that_was_typed():
    launched = "accelerate launch --config_file a.yaml train.py"
    typed = words(f"{launched} --resume=x --lr 0.1 --run_name y")
    expected = f"{launched} --lr 0.1 --output_dir 'o p' --run_name z --resume auto"
    assert resume_command(typed, "o p", "z") == expected


@pytest.mark.full
def test_a_killed_loader_worker_is_one_line(photos):
    launch = start_ranks(1, slow_train, PHOTOS, 0.01, 3)
    until(Path("held-0").exists)  # not in the middle of taking a batch from the one that is killed
    for child in psutil.Process(launch.pids[0]).children():
        child.kill()
    (outcome,) = launch.finish()
    assert outcome.code == 2 and "Traceback" not in outcome.err
    (line,) = error_lines(outcome.err)
    assert "a loader process was killed" in line


def test_output_that_nobody_reads_any_more_costs_no_checkpoint():
    """Ctrl-C ends the `tee` that a run is piped to as well."""
    flags = [*FLAGS, *words("--max_steps 500 --log_every 1")]
    assert run_ranks(1, _train_into_a_pipe, flags)[0].code == 75
    assert newest() == 7


def _train_into_a_pipe(flags):
    reading, writing = os.pipe()
    sys.stdout = os.fdopen(writing, "w")

    def told(run):
        if run.state.step == 3:
            os.close(reading)
        _stop_after_7(run)

    train_watched(flags, after=told)
