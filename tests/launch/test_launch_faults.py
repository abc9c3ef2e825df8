"""Signals, kills and restarts under the real launchers.

python -m pytest -m slow -s tests/launch/test_launch_faults.py
"""

import random
import shlex
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from helpers.launched_runs import FLAGS, LAUNCHERS, begin, ranks_of
from helpers.training_runs import BIN, records, same_tensors, train_run, weights, words
from helpers.waiting import PATIENCE, has_logged, newest, records_so_far, until

UPDATES = 1200  # of a run that is killed: the last is seconds after the kill, on a fast machine too
LOG = Path("runs/run/log.jsonl")
ACCELERATE = "accelerate launch, 2 processes"
BIG = ["--model_args", "{hidden: 20000}"]  # a checkpoint of 130 MB


def wait_for_all(process, ranks, seconds=PATIENCE):
    """The exit code of what was started, once all ranks are gone too."""
    code = process.wait(timeout=seconds)
    _, alive = psutil.wait_procs(ranks, timeout=seconds)
    assert not alive, "a rank is still there"
    return code


def command_to_resume(text):
    *_, line = [line for line in text.splitlines() if line.startswith("resume with: ")]
    return shlex.split(line.removeprefix("resume with: "))


def trains_again():
    kinds = [record["kind"] for record in records_so_far(LOG)]
    return kinds.count("start") == 2 and kinds[-1] == "train"


@pytest.mark.full
def test_after_ctrl_c_the_resume_command_is_above_the_launchers_traceback():
    process = begin(ACCELERATE, "--max_steps", str(UPDATES))
    until(has_logged(3))
    # the ranks have sessions of their own: a terminal sends it to the launcher
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=PATIENCE) == 1
    text = Path("out.txt").read_text()
    assert command_to_resume(text) and "SignalException" in text.splitlines()[-1]


@pytest.mark.full
def test_torchrun_restarts_killed_ranks_and_sigterm_saves_within_30_seconds():
    """The other launchers, signals and moments are in the slow tests below."""
    flags = ["--threads", "1", "--lr_schedule", "constant", "--max_steps", str(UPDATES)]
    process = begin("torchrun, 2 processes", *flags, restarts=1)
    until(has_logged(25))
    ranks = ranks_of(process)
    ranks[1].kill()
    _, alive = psutil.wait_procs(ranks, timeout=PATIENCE)
    until(trains_again)
    ranks, signalled = ranks_of(process), time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert wait_for_all(process, ranks) != 0 and time.monotonic() - signalled < 30 and not alive
    steps = [record["step"] for record in records("run", "train")]
    restarted_at = records("run", "start")[-1]["step"]
    assert steps == list(range(1, newest() + 1)) and 20 <= restarted_at < newest() < UPDATES
    command = command_to_resume(Path("out.txt").read_text())
    assert Path(command[0]).name == "torchrun" and command[-2:] == ["--resume", "auto"]
    train_run(2, "whole", *FLAGS, *flags, "--max_steps", str(steps[-1]), "--run_name", "whole")
    assert same_tensors(weights("run"), weights("whole"))


MOMENTS = {
    "training": ([], has_logged(30)),
    # 45,000 blocks take each of two ranks ten seconds or more; the signal may come before the first
    "evaluation": (
        [
            *words("--data synthetic/10x28x100000 --eval_fraction 0.9 --eval_every 30"),
            *words("--eval_batch_size 1 --save_every 1000"),
        ],
        has_logged(30),
    ),
    "saving": (BIG, lambda: any(Path("runs/run/checkpoints").glob(".step-*.partial/*"))),
}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("moment", MOMENTS)
def test_sigterm_to_what_was_started_saves_and_ends_all_ranks_within_30_seconds(launcher, moment):
    flags, reached = MOMENTS[moment]
    process = begin(launcher, *flags)
    until(reached)
    ranks, told = ranks_of(process), time.monotonic()
    process.send_signal(signal.SIGTERM)
    code = wait_for_all(process, ranks)
    seconds = time.monotonic() - told
    text = Path("out.txt").read_text()
    print(f"\n| {launcher} | {moment} | SIGTERM | {seconds:.1f} s | exit code {code} |")
    assert seconds < 30 and code == (75 if launcher == "python" else code) != 0
    steps = [record["step"] for record in records("run", "train")]
    assert newest() == steps[-1], "something was lost"
    command = command_to_resume(text)
    assert command[-2:] == ["--resume", "auto"] and Path(LAUNCHERS[launcher][0]).name in command[0]
    # what it says to type goes on from there
    more = ["--model_args", BIG[1] if moment == "saving" else "{}", "--eval_batch_size", "1000"]
    more += ["--max_steps", str(steps[-1] + 1)]
    typed = [str(BIN / command[0]), *command[1:], *more]
    again = subprocess.run(typed, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr[-2000:]
    assert records("run", "start")[-1]["step"] == steps[-1]
    if moment == "evaluation":
        assert [record["step"] for record in records("run", "eval")] == [30, 31]


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["a rank", "all ranks", "the launcher"])
def test_a_kill_under_accelerate_launch_ends_all_and_the_run_goes_on(whom):
    process = begin(ACCELERATE, "--max_steps", str(UPDATES))
    until(has_logged(random.Random(whom).randrange(20, 60)))
    ranks, told = ranks_of(process), time.monotonic()
    for victim in {"a rank": ranks[1:], "all ranks": ranks, "the launcher": [process]}[whom]:
        victim.kill()
    assert wait_for_all(process, ranks) != 0
    print(f"\n| kill -9 of {whom} | {time.monotonic() - told:.1f} s |")
    # the kill may have cut off the last line
    reached = max(record["step"] for record in records_so_far(LOG) if record["kind"] == "train")
    process = begin(ACCELERATE, "--max_steps", str(UPDATES), "--resume", "auto")
    assert process.wait(timeout=2 * PATIENCE) == 0
    start = records("run", "start")[-1]["step"]
    assert start > 0 and reached - start <= 20
    check_against_a_whole_run()


@pytest.mark.slow
def test_max_restarts_goes_on_by_itself_each_time():
    """Three kills at random moments, one command, no --resume."""
    process = begin(ACCELERATE, "--max_steps", str(UPDATES), restarts=3)
    chance = random.Random(5)
    for step in (30, 130, 230):
        until(has_logged(step + chance.randrange(60)))
        ranks = ranks_of(process)
        chance.choice(ranks).kill()
        psutil.wait_procs(ranks, timeout=60)
    assert process.wait(timeout=2 * PATIENCE) == 0, Path("out.txt").read_text()[-3000:]
    starts = [record["step"] for record in records("run", "start")]
    print(f"\n| --max_restarts 3 | three kills | started from updates {starts} |")
    assert len(starts) == 4 and sorted(starts) == starts and starts[1] > 0
    check_against_a_whole_run()


def check_against_a_whole_run():
    process = begin(ACCELERATE, "--max_steps", str(UPDATES), "--run_name", "whole")
    assert process.wait(timeout=2 * PATIENCE) == 0
    assert same_tensors(weights("run"), weights("whole"))
    assert [record["step"] for record in records("run", "train")] == list(range(1, UPDATES + 1))
