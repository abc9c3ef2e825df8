"""utils/memory.py: a small or full /dev/shm is used as far as it goes, or ends the run."""

import ctypes
import os
import signal
import subprocess
import time
from types import SimpleNamespace

import psutil
import pytest
from helpers.make_data import image_folder
from helpers.ranks import run_ranks, start_ranks
from helpers.training_runs import records, words
from helpers.waiting import has_logged, lives, until

import train
from utils.data.workers import choose_workers

MB = 2**20
FLAGS = words(
    "--data photos --model mlp --image_size 112 --threads 1 --global_batch_size 64 "
    "--log_every 1 --max_steps 4 --min_scale 1"
)
FLAGS += ["--model_args", "{hidden: 2}"]


ENDLESS = words("--max_steps 100000 --eval_every 100000 --save_every 100000 --num_workers 1")


@pytest.fixture
def photos():
    image_folder("photos/train", {"a": 70, "b": 70}, size=(112, 112), kind="bmp")
    image_folder("photos/val", {"a": 70, "b": 70}, size=(112, 112), kind="bmp", seed=1)


# The choice of workers


@pytest.mark.parametrize(
    ("sizes", "free", "ranks", "expected"),
    [
        ([MB], 70, 1, (8, 4)),
        ([MB], 33, 1, (8, 3)),
        ([MB], 10, 1, (6, 1)),
        ([MB], 2, 1, (0, 0)),
        ([MB, 2 * MB], 13, 1, (1, 1)),
        ([2 * MB], 100, 4, (8, 1)),  # all ranks of a machine share it
    ],
)
def test_first_fewer_batches_in_advance_then_fewer_workers_then_none(
    sizes, free, ranks, expected, monkeypatch
):
    space = SimpleNamespace(f_bavail=free, f_frsize=MB, f_blocks=200)
    monkeypatch.setattr(os, "statvfs", lambda _path: space)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert choose_workers(sizes, 8) == expected and choose_workers(sizes, 0)[0] == 0


# A /dev/shm of its own


def in_small_shm(megabytes: int, action, *arguments):
    """Run `action` in a process whose /dev/shm has that size; skips the test where that is not
    permitted.
    """
    (outcome,) = run_ranks(1, _mount_and_do, megabytes, action, arguments, seconds=150)
    if isinstance(outcome.value, str):
        pytest.skip(f"needs the right to mount: {outcome.value}")
    assert outcome.code == 0, outcome.err
    return outcome.value


def _mount_and_do(megabytes, action, arguments):
    # CLONE_NEWNS: mounts of this process's own
    if ctypes.CDLL(None, use_errno=True).unshare(0x20000):
        return os.strerror(ctypes.get_errno())
    for command in (
        ["--make-rprivate", "/"],
        ["-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", "/dev/shm"],
    ):
        done = subprocess.run(["mount", *command], capture_output=True, text=True)
        if done.returncode:
            return done.stderr
    return action(*arguments)


def _train(processes, *flags):
    return run_ranks(processes, train.main, [*FLAGS, *flags])


def losses(name):
    log = [*records(name, "train"), *records(name, "eval")]
    return [(record["step"], round(record["loss"], 5)) for record in log]


@pytest.mark.full
@pytest.mark.parametrize("processes", [1, 2])
def test_a_small_shared_memory_trains_on_the_same_samples_with_fewer_workers(photos, processes):
    outcomes = in_small_shm(16, _train, processes, "--run_name", "small", "--num_workers", "4")
    assert [outcome.code for outcome in outcomes] == [0] * processes, outcomes
    lines = "\n".join(outcome.out for outcome in outcomes).splitlines()
    (said,) = [line for line in lines if "/dev/shm" in line]
    assert said in outcomes[0].out and said.startswith("/dev/shm: 16.8 MB free, too lit")
    (whole,) = _train(1, "--run_name", "whole", "--num_workers", "0")
    assert "/dev/shm" not in whole.out and losses("small") == losses("whole")


def _fill(launch_flags, processes, name):
    """Train until something is logged; then a file takes the rest of /dev/shm.

    Returns the outcomes and the seconds.
    """
    launch = start_ranks(processes, train.main, [*FLAGS, "--run_name", name, *launch_flags])
    until(has_logged(2, name))
    started = time.monotonic()
    with open("/dev/shm/filler", "wb", buffering=0) as file:
        while any(lives(pid) for pid in launch.pids):
            try:
                file.write(b"x" * 2**16)
            except OSError:
                # The loaders may already hold their largest number of batches. They could then go
                # on with the memory that they free themselves, so the file takes this memory too.
                time.sleep(0.001)
    return launch.finish(), time.monotonic() - started


@pytest.mark.full
@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.full), 2])
def test_shared_memory_that_fills_up_ends_the_run_within_a_minute(photos, processes):
    outcomes, seconds = in_small_shm(
        24, _fill, [*ENDLESS, "--eval_batch_size", "16"], processes, "run"
    )
    assert [outcome.code for outcome in outcomes] == [2] * processes, outcomes
    errors = [outcome.err.count("train.py: error: ") for outcome in outcomes]
    assert errors == [1] + [0] * (processes - 1) and seconds < 60
    assert "/dev/shm: a loader process could not write a batch" in outcomes[0].err
    assert "--num_workers 0" in outcomes[0].err and "Traceback" not in outcomes[0].err


# Workers that die


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "problem"),
    [
        (signal.SIGBUS, "a loader process found no space in /dev/shm; docker run --shm-size"),
        pytest.param(signal.SIGKILL, "a loader process was killed (", marks=pytest.mark.full),
    ],
)
def test_the_death_of_a_worker_is_one_line_with_its_cause(photos, number, problem):
    launch = start_ranks(1, train.main, [*FLAGS, "--run_name", "run", *ENDLESS])
    until(has_logged(1))
    psutil.Process(launch.pids[0]).children()[0].send_signal(number)
    (outcome,) = launch.finish()
    assert outcome.code == 2 and outcome.err.count("train.py: error: ") == 1
    assert f"train.py: error: {problem}" in outcome.err
