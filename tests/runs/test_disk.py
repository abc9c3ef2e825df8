"""Disks that are full, read-only or gone, folders of two runs: one line, and nothing is lost."""

import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import time
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from accelerate import Accelerator
from helpers.make_data import image_folder
from helpers.ranks import Outcome, as_nobody, returned, run_ranks, start_ranks
from helpers.training_runs import (
    MLP,
    await_save,
    codes,
    hold,
    kill_myself,
    same_tensors,
    slow_train,
    steps,
    train_run,
    train_watched,
    weights,
    words,
)
from helpers.waiting import has_ended, records_so_far, until
from safetensors.torch import load_file

import train
import utils.files
import utils.runs.checkpoint
from utils.runs.manifest import WEIGHTS_FILE, verify
from utils.runs.writing import update_pointers

FLAGS = [*MLP, *words("--max_steps 12 --save_every 3 --eval_every 6 --log_every 2 --keep 9")]
AUTO = [*FLAGS, "--resume", "auto"]
# bytes: more than the log of these runs, less than any checkpoint's part that a rank writes
SMALL = 4096
CHECKPOINTS = Path("runs/run/checkpoints")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A function that gives the run folder of an uninterrupted run on so many processes."""

    @cache
    def trained(processes: int) -> Path:
        folder = tmp_path_factory.mktemp("whole")
        returned(
            processes, train.main, ["--output_dir", str(folder), "--run_name", "whole", *FLAGS]
        )
        return folder / "whole"

    return trained


def train_with(events, flags):
    """Train; `events` has for some numbers of finished updates what happens before the next one.

    They happen when no save is in progress, as its thread may take any time.
    """

    def happen(run):
        if run.state.step in events:
            await_save(run)
            events[run.state.step](run)

    train_watched(flags, happen)


def limit_files(run):
    """An event: from now on no file can grow beyond so many bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL, resource.RLIM_INFINITY))


def on_main(action):
    """An event on the main process alone."""
    return lambda run: run.ranks.is_main and action()


def names(folder=CHECKPOINTS):
    return sorted(path.name for path in folder.iterdir())


def check_failed(outcomes: list[Outcome], *texts: str) -> None:
    """All ranks left with code 2, and the main process said why on one line, which has all of the
    texts.
    """
    assert all(outcome.code == 2 for outcome in outcomes), outcomes
    error, *others = [outcome.err for outcome in outcomes]
    assert error.startswith("train.py: error: ") and error.count("\n") == 1, error
    assert not any(others) and all(text in error for text in texts), (error, others)


def check_intact(expected: Path, *steps: int) -> None:
    """These checkpoints, and no others nor parts of them, are there with the weights of the
    uninterrupted run.
    """
    folders = [f"step-{step:08d}" for step in steps]
    assert [name for name in names() if "step" in name] == folders
    assert (CHECKPOINTS / "latest").read_text() == folders[-1] + "\n"
    for name in folders:
        verify(CHECKPOINTS / name)
        places = CHECKPOINTS, expected / "checkpoints"
        assert same_tensors(*(load_file(place / name / WEIGHTS_FILE) for place in places))


def check_log(expected: Path) -> None:
    """The log has each record of the uninterrupted run once, with its numbers."""
    logs = [records_so_far(folder / "log.jsonl") for folder in (Path("runs/run"), expected)]
    found, whole = ([(r["kind"], r["step"], r["loss"]) for r in log if "loss" in r] for log in logs)
    assert found == whole


def check_done(whole, processes=1) -> None:
    check_intact(whole(processes), 3, 6, 9, 12)
    check_log(whole(processes))


# A full disk, which a limit on the size of files stands for


@pytest.mark.full
def test_a_checkpoint_that_cannot_be_written_ends_all_ranks_and_leaves_the_older_one(whole, capfd):
    outcomes = run_ranks(2, train_with, {4: limit_files}, FLAGS)
    check_failed(
        outcomes, f"{CHECKPOINTS}/.step-00000006.partial: the checkpoint cannot be written"
    )
    # c10d writes about its connections past Python; that is not tested here
    of_c10d = re.compile(r"\[[WE]\d+ .*(socket|TCPStore|ProcessGroup)")
    assert all(map(of_c10d.match, capfd.readouterr().err.splitlines()))
    check_intact(whole(2), 3)
    go_on(whole, 2)


@pytest.mark.full
def test_a_disk_that_is_known_to_be_too_small_is_not_written_to(whole):
    def fill():
        shutil.disk_usage = lambda folder: SimpleNamespace(free=1000)
        Accelerator.save_state = None  # a call of it would be another error

    outcomes = run_ranks(2, train_with, {4: on_main(fill)}, FLAGS)
    check_failed(outcomes, "/.step-00000006.partial: No space left on device")
    check_intact(whole(2), 3)


@pytest.mark.full
@pytest.mark.parametrize("way, kind", [("microbatches", OSError), ("fsdp", RuntimeError)])
def test_an_error_of_save_state_is_one_line_and_leaves_no_part_of_a_checkpoint(
    way, kind, monkeypatch
):
    def fail(accelerator, folder):
        (Path(folder) / "part").touch()
        raise kind("planted")

    def break_it():
        Accelerator.save_state = fail

    flags = ["--microbatches", "4"] if way == "microbatches" else []
    if way == "fsdp":
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
        monkeypatch.setenv("FSDP_VERSION", "2")
    outcomes = run_ranks(2, train_with, {4: on_main(break_it)}, [*FLAGS, *flags])
    # With FSDP2 the others wait in a collective. They find rank 0 lost, and with it the store that
    # it serves here.
    check_failed(outcomes[: 1 if way == "fsdp" else None], "planted")
    assert all(outcome.code == 2 and "Traceback" not in outcome.err for outcome in outcomes)
    assert names() == ["latest", "step-00000003"]
    verify(CHECKPOINTS / "step-00000003")


def go_on(whole, processes=1):
    """Resume the run, and assert that it ends with the checkpoints and the log of the uninterrupted
    one.
    """
    train_run(processes, "run", *AUTO)
    check_done(whole, processes)


def limit_log():
    """The log has room for half a record more, every other file for all that it needs."""
    log = Path("runs/run/log.jsonl")
    with log.open("a") as file:
        file.write(json.dumps({"kind": "long", "step": 0, "text": " " * 300_000}) + "\n")
    resource.setrlimit(resource.RLIMIT_FSIZE, (log.stat().st_size + 50, resource.RLIM_INFINITY))


@pytest.mark.full
def test_a_log_that_cannot_be_written_ends_the_run_by_its_name(whole):
    outcomes = run_ranks(2, train_with, {4: on_main(limit_log)}, FLAGS)
    check_failed(outcomes, "runs/run/log.jsonl: File too large")
    check_intact(whole(2), 3)  # none that says that the record is on the disk
    go_on(whole, 2)


@pytest.mark.full
@pytest.mark.parametrize("processes, cause", [(2, "full"), (1, "gone")])
def test_a_stop_while_nothing_can_be_saved_leaves_all_the_same(processes, cause, whole):
    trouble = limit_files if cause == "full" else on_main(lambda: shutil.rmtree("runs/run"))

    def stop_last(run):
        if run.ranks.topology.rank == processes - 1:
            kill_myself(signal.SIGTERM)

    outcomes = run_ranks(processes, train_with, {4: trouble, 5: stop_last}, FLAGS)
    text = str(CHECKPOINTS) if cause == "full" else f"{CHECKPOINTS} no longer exists"
    check_failed(outcomes, text)  # what was trained since is lost: no code that says to go on
    if cause == "full":
        check_intact(whole(processes), 3)
    else:
        assert not Path("runs/run").exists()


# A disk of a few pages


@pytest.fixture
def disk():
    """Runs are on a disk of 4 MB, which root may mount."""
    Path("runs").mkdir()
    runs = str(Path("runs").resolve())
    command = [*words("mount -t tmpfs -o size=4m lockstep-test"), runs]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    yield
    subprocess.run(["umount", "-l", runs])


PAGE = os.sysconf("SC_PAGESIZE")


def leave_pages(pages):
    """Fill the disk up so that so many pages are free."""
    filler = Path("runs/filler")
    filler.unlink(missing_ok=True)
    filler.write_bytes(b"x" * (PAGE * (os.statvfs("runs").f_bavail - pages)))
    assert os.statvfs("runs").f_bavail == pages


@pytest.mark.full
def test_a_full_disk_ends_a_run_with_one_line_and_is_said_at_the_next_start(disk, whole):
    fill = on_main(lambda: leave_pages(3))
    check_failed(run_ranks(1, train_with, {4: fill}, FLAGS), "runs/run/")
    check_intact(whole(1), 3)
    leave_pages(0)
    for name, flags in (("run", AUTO), ("other", FLAGS)):
        outcomes = run_ranks(1, train.main, ["--run_name", name, *flags])
        check_failed(outcomes, f"runs/{name}/", "No space left on device")
    check_intact(whole(1), 3)
    Path("runs/filler").unlink()
    go_on(whole)


# Folders that a run has no right to


def test_a_folder_that_cannot_be_written_to_is_named_before_anything_is_read(anyones_folder):
    def no_data(*_):
        raise AssertionError("the data were read")

    def start(flags):
        np.loadtxt = no_data  # as digits are read
        train.main([*FLAGS, *flags])

    returned(1, as_nobody, train.main, ["--run_name", "run", *FLAGS, "--max_steps", "3"])
    Path("runs").chmod(0o555)
    for flags in ([], ["--output_dir", "runs/deep/er"]):
        outcomes = run_ranks(1, as_nobody, start, flags)
        check_failed(outcomes, "--output_dir runs", "runs is not a writable folder")
        assert names(Path("runs")) == ["run"]


# Folders that vanish


@pytest.mark.full
def test_a_run_whose_folder_was_deleted_leaves_a_new_run_of_that_name_alone(whole):
    old = start_ranks(2, train_with, {4: hold}, [*FLAGS, "--seed", "1"])
    until(Path("held-0").exists)
    shutil.rmtree("runs/run")
    train_run(1, "run", *FLAGS)
    Path("go").touch()
    check_failed(old.finish(), "runs/run was deleted and now belongs to another run")
    check_done(whole)


# Two runs that want one folder


def impatient(flags, seconds=1.0):
    """Train, but wait no longer than this for others to leave the folder."""
    utils.runs.checkpoint._ORPHANS_EXIT_WITHIN = seconds
    train.main(["--run_name", "run", *flags])


@pytest.mark.full
def test_a_second_run_is_refused_with_the_place_of_the_first(whole):
    first = start_ranks(2, train_with, {4: hold}, FLAGS)
    until(Path("held-0").exists)
    outcomes = run_ranks(1, impatient, AUTO)
    place = f"process {first.pids[0]} on {socket.gethostname()}"
    check_failed(outcomes, f"runs/run is in use by {place}")
    Path("go").touch()
    assert codes(first.finish()) == [0, 0]
    check_done(whole, 2)


@pytest.mark.full
def test_a_killed_run_frees_its_folder_though_its_loader_workers_live_on():
    image_folder("photos", {"class0": 40, "class1": 40}, size=(100, 100))
    flags = words("--data photos --num_workers 2 --model mlp --image_size 100 --threads 1")
    flags += ["--model_args", "{hidden: 2}", *words("--global_batch_size 8 --save_every 2")]
    first = start_ranks(1, slow_train, [*flags, "--max_steps", "10000"], 0.2)
    until((CHECKPOINTS / "step-00000002").exists)
    workers = psutil.Process(first.pids[0]).children()
    for worker in workers:
        worker.suspend()  # else they would end within five seconds after their parent
    try:
        os.kill(first.pids[0], signal.SIGKILL)
        # its files are closed when the last of its threads has ended
        first_one = psutil.Process(first.pids[0])
        until(lambda: first_one.status() == psutil.STATUS_ZOMBIE and first_one.num_threads() <= 1)
        (outcome,) = run_ranks(1, impatient, [*flags, "--resume", "auto", "--max_steps", "10"], 0.0)
        assert len(workers) >= 2 and all(worker.is_running() for worker in workers)
    finally:
        for worker in workers:
            worker.kill()
    assert outcome.code == 0 and "waiting" not in outcome.out, outcome.err
    assert "resuming from runs/run/checkpoints/step-" in outcome.out
    assert first.finish()[0].code == -signal.SIGKILL


@pytest.mark.full
def test_a_start_waits_for_ranks_without_a_launcher_to_save_and_leave(whole):
    first = start_ranks(2, _train_and_leave_slowly, FLAGS, launcher=True)
    until((CHECKPOINTS / "step-00000003").exists)
    os.kill(first.launcher, signal.SIGKILL)
    Path("go").touch()
    outcomes = run_ranks(2, _train_and_tell_of_waiting, AUTO)
    assert codes(outcomes) == [0, 0], outcomes[0].err
    assert "is in use by process" in outcomes[0].out and "waiting up to 20 s" in outcomes[0].out
    assert codes(first.finish()) == [75, 75]
    saved = steps("run", "start")[-1]
    assert 3 <= saved < 12 and f"resuming from {CHECKPOINTS}/step-{saved:08d}" in outcomes[0].out
    check_log(whole(2))
    theirs = load_file(whole(2) / "checkpoints/step-00000012/model.safetensors")
    assert same_tensors(weights("run"), theirs)


def _train_and_leave_slowly(flags):
    close = train.log_end

    def slow(*arguments):
        until(Path("waiting").exists)
        return close(*arguments)

    train.log_end = slow
    slow_train(flags, 0.0, 5)


def _train_and_tell_of_waiting(flags):
    def sleep(seconds):
        Path("waiting").touch()
        time.sleep(seconds)

    # it sleeps where it waits for the lock
    utils.files.time = SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
    train.main(["--run_name", "run", *flags])


@pytest.mark.full
def test_of_two_starts_of_one_name_at_the_same_time_exactly_one_gets_the_folder(whole):
    starts = [start_ranks(1, _train_when_both_are_ready, FLAGS) for _ in range(2)]
    until(lambda: any(has_ended(start.pids[0]) for start in starts))  # the one that is refused
    Path("go").touch()
    outcomes = sorted((start.finish()[0] for start in starts), key=lambda outcome: outcome.code)
    assert codes(outcomes) == [0, 2]
    check_failed(outcomes[1:], "runs/run")
    check_done(whole)


def _train_when_both_are_ready(flags):
    """Both have found no such folder when the first makes it."""
    mkdir = os.mkdir

    def together(path, *more):
        if "run" in Path(path).parts:
            Path(f"ready-{os.getpid()}").touch()
            until(lambda: len(list(Path().glob("ready-*"))) == 2)
        mkdir(path, *more)

    os.mkdir = together
    utils.runs.checkpoint._ORPHANS_EXIT_WITHIN = 0.3
    slow_train(flags, 0.0, 5)


# Pointers that cannot be moved


@pytest.mark.parametrize("name", ["latest", "best"])
def test_the_best_checkpoint_is_kept_while_no_pointer_names_it(name):
    for step in range(1, 7):
        (CHECKPOINTS / f"step-{step:08d}").mkdir(parents=True)
    (CHECKPOINTS / name / "x").mkdir(parents=True)
    with pytest.raises(OSError, match="not a regular file"):
        update_pointers(CHECKPOINTS, 6, best_step=3, keep=2)
    kept = [f"step-{step:08d}" for step in (3, 5, 6)]
    assert [path for path in names() if path.startswith("step")] == kept
    shutil.rmtree(CHECKPOINTS / name)
    update_pointers(CHECKPOINTS, 6, best_step=3, keep=2)
    assert names() == ["best", "latest", *kept]
    assert (CHECKPOINTS / "best").read_text() == "step-00000003\n"
