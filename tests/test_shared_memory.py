"""/dev/shm that is small or gets full: loaders use what there is, or the run ends with one line; nothing hangs."""

import ctypes
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from helpers.make_data import image_folder
from helpers.ranks import run_ranks, start_ranks
from helpers.training_runs import records
from helpers.waiting import has_logged, until

import eval
import train
from utils.data import workers
from utils.data.workers import bytes_needed, choose_workers
from utils.launch.exits import with_known_fix

MB = 2**20
FLAGS = ["--data", "photos", "--model", "mlp", "--model_args", "{hidden: 2}", "--image_size", "112", "--threads", "1"]
FLAGS += ["--global_batch_size", "64", "--log_every", "1", "--max_steps", "4", "--min_scale", "1"]


@pytest.fixture
def photos():
    image_folder("photos/train", {"a": 70, "b": 70}, size=(112, 112))
    image_folder("photos/val", {"a": 70, "b": 70}, size=(112, 112), seed=1)


# The choice of workers


@pytest.mark.parametrize(
    ("sizes", "free", "expected"),
    [
        ([MB], 60, (8, 4)),
        ([MB], 30, (8, 1)),
        ([MB], 9, (6, 1)),
        ([MB], 3, (0, 1)),
        ([MB, 2 * MB], 120, (8, 4)),
        ([MB, 2 * MB], 12, (1, 1)),
        ([MB, 2 * MB], 0, (0, 1)),
        ([], 0, (8, 4)),
    ],
)
def test_first_one_batch_in_advance_then_fewer_workers_then_none(sizes, free, expected, monkeypatch):
    monkeypatch.setattr(workers, "_USABLE", 1)
    monkeypatch.setattr(workers, "shm_space", lambda: (free * MB, 200 * MB))
    assert choose_workers(sizes, 8) == expected
    assert bytes_needed(sizes, *expected) <= free * MB


def test_a_rank_without_workers_needs_no_shared_memory(monkeypatch):
    monkeypatch.setattr(workers, "shm_space", lambda: (0, 0))
    assert choose_workers([MB], 0)[0] == 0 and bytes_needed([MB, MB], 0, 4) == 0


def test_all_ranks_of_a_machine_share_its_room(monkeypatch):
    monkeypatch.setattr(workers, "shm_space", lambda: (100 * MB, 200 * MB))
    assert choose_workers([2 * MB], 8) == (8, 4)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert choose_workers([2 * MB], 8) == (8, 1)


# A /dev/shm of its own


def in_small_shm(megabytes: int, action, *arguments):
    """Run `action` in a process whose /dev/shm has that size; skips the test where that is not permitted."""
    (outcome,) = run_ranks(1, _mount_and_do, megabytes, action, arguments, seconds=150)
    if isinstance(outcome.value, str):
        pytest.skip(f"needs the right to mount: {outcome.value}")
    assert outcome.code == 0, outcome.err
    return outcome.value


def _mount_and_do(megabytes, action, arguments):
    if ctypes.CDLL(None, use_errno=True).unshare(0x20000):  # CLONE_NEWNS: mounts of this process's own
        return os.strerror(ctypes.get_errno())
    for command in (["--make-rprivate", "/"], ["-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", "/dev/shm"]):
        done = subprocess.run(["mount", *command], capture_output=True, text=True)
        if done.returncode:
            return done.stderr
    return action(*arguments)


def _train(processes, *flags):
    return run_ranks(processes, train.main, [*FLAGS, *flags])


def losses(name):
    return [
        (record["step"], round(record["loss"], 5)) for record in records(name) if record["kind"] in ("train", "eval")
    ]


@pytest.mark.full
@pytest.mark.parametrize("processes", [1, 2])
def test_a_small_shared_memory_trains_on_the_same_samples_with_fewer_workers_and_reports_it(photos, processes):
    outcomes = in_small_shm(16, _train, processes, "--run_name", "small", "--num_workers", "2")
    assert [outcome.code for outcome in outcomes] == [0] * processes, [outcome.err for outcome in outcomes]
    said = [line for outcome in outcomes for line in outcome.out.splitlines() if "/dev/shm" in line]
    assert len(said) == 1 and said[0] in outcomes[0].out
    assert said[0].startswith("/dev/shm: 17 of 17 MB free, ") and "--shm-size=8g or --ipc=host" in said[0]
    assert "needed for --num_workers 2; using " in said[0] and "instead, which is slower" in said[0]
    assert not any("shared memory" in outcome.err for outcome in outcomes)
    (whole,) = _train(1, "--run_name", "whole", "--num_workers", "0")
    assert whole.code == 0 and "/dev/shm" not in whole.out
    assert losses("small") == losses("whole")


@pytest.mark.full
def test_evaluation_alone_may_use_all_of_it(photos):
    (trained,) = _train(1, "--run_name", "run", "--num_workers", "0", "--eval_batch_size", "35")
    assert trained.code == 0, trained.err
    (outcome,) = in_small_shm(16, run_ranks, 1, eval.main, ["--ckpt", "runs/run", "--num_workers", "2"])
    assert outcome.code == 0 and outcome.value["count"] == 140, outcome.err
    assert "using " not in outcome.out


def _fill(launch_flags, processes, name):
    """Train until something is logged; then a file takes the rest of /dev/shm. Returns the outcomes and the seconds."""
    launch = start_ranks(processes, train.main, [*FLAGS, "--run_name", name, *launch_flags])
    until(has_logged(2, name))
    with open("/dev/shm/filler", "wb", buffering=0) as file:
        try:
            while file.write(b"x" * 2**16):
                pass
        except OSError:
            pass
    filled = time.monotonic()
    return launch.finish(), time.monotonic() - filled


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.full), 2])
def test_shared_memory_that_fills_up_later_ends_the_run_within_a_minute_with_one_line(photos, processes):
    flags = ["--max_steps", "100000", "--eval_every", "100000", "--save_every", "100000", "--num_workers", "1"]
    flags += ["--eval_batch_size", "16"]
    outcomes, seconds = in_small_shm(24, _fill, flags, processes, "run")
    assert [outcome.code for outcome in outcomes] == [2] * processes, [outcome.err for outcome in outcomes]
    errors = [line for line in outcomes[0].err.splitlines() if line.startswith("train.py: error: ")]
    assert len(errors) == 1 and not outcomes[-1].err.count("train.py: error: ") - (processes == 1)
    assert "/dev/shm: a loader process could not write a batch" in errors[0]
    assert "of 25 MB free" in errors[0] and "--shm-size=8g" in errors[0] and "--num_workers 0" in errors[0]
    assert "Traceback" not in outcomes[0].err and seconds < 60


# Workers that die


def _bus_error(flags):
    from utils.data import datasets as loader

    decode = loader.decode

    def broken(*arguments):
        if Path("now").exists():
            signal.signal(signal.SIGBUS, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGBUS)
        return decode(*arguments)

    loader.decode = broken
    train.main([*FLAGS, *flags])


def test_a_bus_error_of_a_worker_is_explained_by_shared_memory(photos):
    flags = ["--max_steps", "100000", "--eval_every", "100000", "--save_every", "100000", "--num_workers", "1"]
    launch = start_ranks(1, _bus_error, ["--run_name", "run", *flags])
    until(has_logged(1))
    Path("now").touch()
    (outcome,) = launch.finish()
    assert outcome.code == 2 and "found no space in /dev/shm (" in outcome.err and "--shm-size" in outcome.err
    assert outcome.err.count("train.py: error: ") == 1


def _one_dead_worker_after_the_other(flags):
    """While the death of the training loader's is explained, that of the evaluation's dies."""
    from utils.ranks import session

    with_known_fix = session.with_known_fix

    def interrupted(error):
        others = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
        assert others
        for worker in others:
            worker.kill()
        until(lambda: all(worker.status() == psutil.STATUS_ZOMBIE for worker in others))
        return with_known_fix(error)

    session.with_known_fix = interrupted
    update = train.train_update

    def killing(run, batches):
        update(run, batches)
        if run.state.step == 2:
            psutil.Process().children()[0].kill()

    train.train_update = killing
    train.main([*FLAGS, *flags])


def test_workers_of_two_loaders_that_die_one_after_the_other_are_one_line(photos):
    flags = ["--max_steps", "100000", "--eval_every", "1", "--num_workers", "1"]
    (outcome,) = run_ranks(1, _one_dead_worker_after_the_other, ["--run_name", "run", *flags])
    assert outcome.code == 2 and "a loader process was killed" in outcome.err and outcome.err.count("\n") == 1


def test_another_death_of_a_worker_is_not_blamed_on_shared_memory():
    error = with_known_fix(RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "))
    assert isinstance(error, ValueError) and "/dev/shm" not in str(error)


# Too many workers


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.full), 2])
def test_thousands_of_workers_are_lowered_and_reported(photos, processes):
    outcomes = run_ranks(processes, train.main, [*FLAGS, "--run_name", "run", "--num_workers", "3000"])
    assert [outcome.code for outcome in outcomes] == [0] * processes, outcomes[0].err
    cores, most = os.cpu_count(), 8 * os.cpu_count() // processes
    line = f"--num_workers 3000: too many for {cores} processor cores; using {most} instead"
    assert [outcome.out.count(line) for outcome in outcomes] == [1, 0][:processes]


@pytest.mark.full
def test_eval_lowers_the_workers_of_a_run_on_a_larger_machine(photos):
    (trained,) = _train(1, "--run_name", "run", "--num_workers", "0")
    assert trained.code == 0, trained.err
    (outcome,) = run_ranks(1, _evaluate_a_run_of_a_larger_machine)
    assert outcome.code == 0 and outcome.value == (8, 140), outcome.err


def _evaluate_a_run_of_a_larger_machine():
    from utils.data import workers as loader

    settings, started = eval.settings_of, []
    os.cpu_count = lambda: 1
    processes = loader.worker_processes

    def enlarged(*arguments):
        config, own = settings(*arguments)
        config.num_workers = 3000
        return config, own

    def counted(workers, ahead):
        started.append(workers)
        return processes(min(workers, 1), ahead)

    eval.settings_of, loader.worker_processes = enlarged, counted
    record = eval.main(["--ckpt", "runs/run", "--threads", "1"])
    return started[0], record["count"]
