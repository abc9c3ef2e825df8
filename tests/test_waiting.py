"""utils/waiting.py: data that does not arrive is reported; at --timeout the run ends."""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.make_data import image_folder
from helpers.ranks import run_ranks, start_ranks
from helpers.training_runs import words
from helpers.waiting import has_logged, lives, until

import eval
import train
import utils.data.datasets
import utils.waiting
from utils.data.order import permutation
from utils.launch.exits import with_known_fix
from utils.ranks import watch
from utils.waiting import DataWait, wait_for_items

FLAGS = words("--data photos --model mlp --image_size 112 --threads 1 --global_batch_size 8")
FLAGS += ["--model_args", "{hidden: 2}", *words("--log_every 1 --max_steps 100000 --min_scale 1")]
FLAGS += words("--eval_every 100000 --save_every 100000 --run_name run")
NO_LINE = "has not arrived for"


@pytest.fixture
def photos():
    image_folder("photos/train", {"a": 20, "b": 20}, size=(112, 112))
    image_folder("photos/val", {"a": 4, "b": 4}, size=(112, 112))
    os.mkfifo("dead")
    yield
    for pid in readers():  # processes that still read if the test has failed
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_worker_that_ends_within_a_batch_is_reported_with_its_cause(
    monkeypatch,
):
    def broken():
        yield 1
        raise EOFError

    def with_cause(seconds):
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error. ")

    monkeypatch.setattr(utils.waiting, "time", SimpleNamespace(sleep=lambda seconds: None))
    with pytest.raises(ValueError, match=r"^a loader process exited while it was sending a batch"):
        list(wait_for_items(broken(), "a batch"))
    monkeypatch.setattr(utils.waiting, "time", SimpleNamespace(sleep=with_cause))
    with pytest.raises(RuntimeError, match="killed by signal") as caught:
        list(wait_for_items(broken(), "a batch"))
    assert "/dev/shm" in str(with_known_fix(caught.value)) and DataWait.current is None


def test_workers_of_a_loader_start_with_sigterm_blocked_until_the_first_item():
    def blocked():
        return signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ())

    # like Accelerate's loader, it starts the workers when the first item is asked for
    class Prepared:
        def __iter__(self):
            yield blocked()
            yield blocked()

    found = [(item, blocked()) for item in wait_for_items(Prepared(), "a batch")]
    assert found == [(True, False), (False, False)]


# Real runs whose data comes from a dead disk: a pipe that nobody writes to


def _dead_disk(main, flags, dead, seconds=0.0):
    """Reading the `dead` samples never returns, or takes so many `seconds`."""
    decode = utils.data.datasets.decode_image
    sys.stderr = sys.__stderr__  # captured output is lost when the process exits
    watch.PATIENCE = 0.5

    def dying(split, position, *arguments):
        if position in dead:
            if seconds:
                time.sleep(seconds)
                return decode(split, position, *arguments)
            Path(f"reads-{os.getpid()}").touch()
            signal.alarm(50)  # if nobody ends this process, the test must not wait forever
            Path("dead").read_bytes()
        return decode(split, position, *arguments)

    utils.data.datasets.decode_image = dying
    main(flags)


def readers():
    return [int(path.name[6:]) for path in Path().glob("reads-*")]


def all_gone():
    return not any(map(lives, readers()))


def begin(processes, *flags, halves=(0, 1), launcher=False):
    """Train for two updates; each of these halves of the fourth global batch, one half per rank,
    has a dead sample.
    """
    dead = [int(permutation(40, 0, 0)[3 * 8 + 4 * half + 1]) for half in halves]
    flags = [*FLAGS, *flags]
    launch = start_ranks(processes, _dead_disk, train.main, flags, dead, launcher=launcher)
    # so that the ranks have met for the last time: Accelerate reads one batch ahead
    until(has_logged(2))
    until(readers)
    return launch


@pytest.mark.full
@pytest.mark.parametrize(
    ("processes", "workers", "halves"),
    [(1, "0", [0]), (2, "1", [1]), pytest.param(2, "1", [0, 1], marks=pytest.mark.full)],
)
def test_a_run_that_is_to_stop_exits_though_no_batch_arrives(
    photos, capfd, processes, workers, halves
):
    launch = begin(processes, "--num_workers", workers, halves=halves)
    launch.kill(signal.SIGTERM)
    assert [outcome.code for outcome in launch.finish()] == [75] * processes
    said = capfd.readouterr().err
    assert said.count(NO_LINE) == 1 and "--resume auto" in said
    assert f"train.py: stopped (SIGTERM): a training batch {NO_LINE}" in said
    until(all_gone)


@pytest.mark.full
def test_a_run_whose_data_does_not_arrive_ends_after_the_timeout(photos, capfd):
    launch = begin(2, "--num_workers", "1", "--timeout", "8")
    assert [outcome.code for outcome in launch.finish()] == [2, 2]
    said = capfd.readouterr().err
    assert said.count(f"train.py: error: a training batch {NO_LINE}") == 1 and "--timeout" in said
    assert said.count("train.py: has waited 2 s for a training batch") == 1
    until(all_gone)


def test_ranks_whose_launcher_was_killed_exit_though_no_batch_arrives(photos, capfd):
    launch = begin(2, "--num_workers", "1", launcher=True)
    os.kill(launch.launcher, signal.SIGKILL)
    launch.finish()  # once all of them are gone
    line = f"train.py: stopped (the launcher has exited): a training batch {NO_LINE}"
    assert line in capfd.readouterr().err
    until(all_gone)


@pytest.mark.full
def test_the_timeout_counts_the_seconds_of_one_batch_only(photos):
    flags = [*FLAGS, *words("--max_steps 5 --timeout 6 --num_workers 0")]
    slow = [int(sample) for sample in permutation(40, 0, 0)[::8]]  # one in each update
    (outcome,) = run_ranks(1, _dead_disk, train.main, flags, slow, 1.5)
    assert outcome.code == 0, outcome.err


def test_images_to_decode_before_training_that_do_not_arrive_end_the_run(photos, capfd):
    flags = words("--data photos --image_size 32 --timeout 2 --model mlp --run_name run")
    (outcome,) = run_ranks(1, _dead_disk, train.main, flags, [7])
    assert outcome.code == 2
    assert capfd.readouterr().err.count(f"train.py: error: a decoded image {NO_LINE}") == 1


@pytest.mark.full
def test_an_evaluation_whose_data_does_not_arrive_ends_after_the_timeout(photos, capfd):
    (trained,) = run_ranks(1, train.main, [*FLAGS, "--max_steps", "1", "--num_workers", "0"])
    assert trained.code == 0, trained.err
    flags = ["--ckpt", "runs/run", "--timeout", "2", "--num_workers", "1"]
    (outcome,) = run_ranks(1, _dead_disk, eval.main, flags, [5])
    assert outcome.code == 2
    said = capfd.readouterr().err
    assert said.count(f"eval.py: error: an evaluation batch {NO_LINE}") == 1
    assert "--resume" not in said
