"""sweep.py: which runs a sweep has, and that each is the one that train.py trains alone."""

import csv
import errno
import fcntl
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from helpers.launched_runs import end_commands
from helpers.ranks import run_ranks, start_ranks
from helpers.training_runs import (
    BIN,
    ROOT,
    clean_environment,
    full,
    records,
    refused,
    start,
    train_run,
    words,
)
from helpers.waiting import newest, records_so_far, until

import sweep
from extras.sweep.trials import make_trials, write_trials
from extras.sweep.worker import Worker
from utils.config import parse_args
from utils.runs.manifest import sha256_of
from utils.settings.scripts import SweepConfig

TIMES = {"seconds", "images_per_second", "data_wait", "computing", "waiting"}
# with times, the day, or the folder
OTHERS = "state.json", "manifest.json", "samples.parquet", "config.yaml"
FLAGS = words("--data digits --model mlp --global_batch_size 120 --max_train_samples 480")
FLAGS += words("--microbatches 2 --log_every 5 --eval_every 40 --save_every 30 --max_steps 60")
FLAGS += words("--threads 1")
GRID = words("--name lr --grid lr=0.01,0.02 label_smoothing=0,0.1")

# stands for train.py: records when it runs, and fails on the settings in the file `bad`
STUB = """
import fcntl, json, sys, time
from pathlib import Path
flags = dict(zip(sys.argv[1:-1], sys.argv[2:]))
folder = Path(flags["--output_dir"]) / flags["--run_name"]
folder.mkdir(exist_ok=True)
time.sleep(0.05)
lock = (folder / ".lock").open("a")
fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
def status(state, **more):
    (folder / "s").write_text(json.dumps({"state": state, "time": time.time(), **more}))
    (folder / "s").replace(folder / "status.json")
with Path("starts").open("a") as file:
    file.write(f"{folder.name}\\n")
time.sleep(0.1)
status("running")
time.sleep(0.1)
if Path("bad").exists() and Path("bad").read_text() in folder.name:
    status("failed", line="it is bad")
    sys.exit(2)
if Path("stop").exists():
    Path("stop").unlink()
    status("stopped", line="stopped from outside")
    sys.exit(75)
status("complete")
"""


def trials_of(*own, flags=()):
    """The runs of a sweep."""
    return make_trials(parse_args(SweepConfig, "sweep.py", [*GRID, *own]), [*FLAGS, *flags])


def work(*own: str) -> tuple[int, dict]:
    """Train a sweep with the stub; returns the exit code and the runs that have failed."""
    Path("stub.py").write_text(STUB)
    trials = trials_of("--launch", f"{sys.executable} -S stub.py", *own)
    write_trials(trials)
    with Worker(trials) as worker:
        return worker.work(), worker.failed


def starts() -> list[str]:
    return Path("starts").read_text().split()


# -- which runs


def test_a_sweep_has_a_run_for_each_combination_and_seed():
    trials = trials_of("--seeds", "5,3")
    assert [trial.name for trial in trials[:2]] == [
        "lr=0.01,label_smoothing=0-seed5",
        "lr=0.01,label_smoothing=0.1-seed5",
    ]
    assert len({trial.name for trial in trials}) == 8
    assert trials[-1].command[-9:] == words(
        "--lr=0.02 --label_smoothing=0.1 --seed=3 --output_dir runs/lr "
        "--run_name lr=0.02,label_smoothing=0.1-seed3 --resume auto"
    )
    (only,) = make_trials(SweepConfig(name="one"), words("--seed 4 --output_dir out"))
    assert (only.name, str(only.folder)) == ("one-seed4", "out/one/one-seed4")


def test_a_list_of_combinations_may_leave_settings_out_and_have_values_with_commas():
    rows = [["lr", "mean"], ["0.1", ""], ["", "0.4,0.5,0.6"]]
    with Path("list.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    trials = make_trials(SweepConfig(name="a", trials="list.csv"), [])
    assert [trial.values for trial in trials] == [{"lr": "0.1"}, {"mean": "0.4,0.5,0.6"}]
    assert re.fullmatch(r"mean=[0-9a-f]{8}-seed0", trials[1].name)
    write_trials(trials)
    Path("list.csv").write_text("\ufeff" + Path("list.csv").read_text())  # as Excel writes it
    assert make_trials(SweepConfig(name="a", trials="list.csv"), []) == trials
    _, second = listed("a")
    assert (second["lr"], second["mean"], second["seed"]) == ("", "0.4,0.5,0.6", "0")


@pytest.mark.parametrize(
    "own, flags, problem",
    [
        ("--grid lrr=1", "", "unknown setting lrr; did you mean lr?"),
        ("--grid lr=1,-1", "", "--lr must be above 0, got -1"),
        (
            "--grid lr=0.1,0.10",
            "",
            "lr=0.1-seed0 and lr=0.10-seed0 have the same settings; leave one",
        ),
        ("--grid lr=0.1,", "", "--grid lr=0.1,: a value is missing"),
        ("--grid lr=1 lr=2", "", "--grid names a setting twice"),
        ("--grid best_metric=accuracy,loss", "", "a sweep cannot vary best_metric"),
        ("--seed 3", "", "--seed is a flag of train.py; use --seeds"),
        ("--data digits", "", "--data is a flag of train.py; write it after --"),
        ("--grid seed=1,2", "", "a sweep cannot vary seed; use --seeds"),
        ("--grid lr=1,2", "--lr 3", "lr is in the sweep and in the flags; leave one out"),
        ("--grid lr=1,2 --trials a", "", "--grid and --trials cannot be used together"),
        ("--seeds 0", "", "--seeds must be at least 1"),
        ("--seeds 3,3", "", "--seeds must be different seeds"),
        ("--seeds 3", "--seed 1", "--seeds and --seed cannot be used together"),
        ("", "--stop_after 9", "a sweep does not take --stop_after of train.py"),
        (
            "",
            "--lr_schedule cosinus",
            "--lr_schedule cosinus: no such lr schedule; did you mean cosine?",
        ),
    ],
)
def test_settings_that_make_no_sense_are_one_line_before_anything_starts(own, flags, problem):
    given = ["--name", "a", *words(own), "--", *words(flags)]
    assert problem in refused(sweep.main, *given) and not Path("runs").exists()


def test_a_long_combination_has_a_short_name():
    names = words("lr weight_decay momentum ema_decay mixup cutmix mix_prob label_smoothing cutout")
    grid = [f"{name}={0.1 + place / 1e9}" for place, name in enumerate(names[:-1])]
    (trial,) = make_trials(SweepConfig(name="a", grid=[*grid, "cutout=3"]), [])
    assert re.fullmatch(r"[0-9a-f]{8}-seed0", trial.name)


def test_a_sweep_does_not_write_into_a_run():
    Path("runs/lr").mkdir(parents=True)
    Path("runs/lr/log.jsonl").touch()
    assert "runs/lr is a run; choose another --name" in refused(sweep.main, *GRID, "--", *FLAGS)


def test_a_sweep_with_other_flags_needs_another_name_and_more_trials_do_not():
    write_trials(trials_of("--seeds", "1"))
    write_trials(trials_of("--seeds", "2"))
    assert len(Path("runs/lr/trials.csv").read_text().splitlines()) == 9
    write_trials(trials_of("--seeds", "2", flags=["--num_workers", "1"]))  # of this machine
    other = refused(sweep.main, *GRID, "--", *FLAGS, "--epochs", "2")
    assert "lr=0.01,label_smoothing=0-seed0 is in runs/lr/trials.csv with other settings" in other
    assert other.endswith("; use the flags in this file, or choose another --name")


def test_train_py_names_sweep_py():
    import train

    assert "unknown flag --seeds; use sweep.py --seeds" in refused(train.main, "--seeds", "3")


# -- workers


def test_workers_share_the_runs_and_one_computes_what_all_need():
    workers = [start_ranks(1, work, "--seeds", "2") for _ in range(3)]
    until(lambda: Path("starts").exists())
    assert len(starts()) == 1  # the others wait until it has begun
    ended = [worker.finish()[0] for worker in workers]
    for outcome in ended:
        assert outcome.value == (0, {}), outcome
    assert sorted(starts()) == sorted(trial.name for trial in trials_of("--seeds", "2"))
    assert all(each.value == (0, {}) for each in run_ranks(1, work, "--seeds", "2"))
    assert len(starts()) == 8


def test_killed_workers_leave_runs_that_others_finish_and_no_run_is_trained_twice_at_once():
    chance = random.Random(3)
    for _ in range(6):
        workers = [start_ranks(1, work, "--seeds", "3") for _ in range(chance.randint(1, 3))]
        time.sleep(chance.uniform(0.1, 0.5))
        for worker in workers:
            worker.kill(signal.SIGKILL)
            worker.finish()
    (outcome,) = run_ranks(1, work, "--seeds", "3")
    assert outcome.value == (0, {}), outcome  # the stub fails if its folder is in use
    assert {*starts()} == {trial.name for trial in trials_of("--seeds", "3")}


def test_a_failed_run_is_named_the_others_go_on_and_the_next_start_repeats_it():
    Path("bad").write_text("lr=0.02,label_smoothing=0-")
    for _ in range(2):
        (outcome,) = run_ranks(1, work)
        failed = {"lr=0.02,label_smoothing=0-seed0": "it is bad"}
        assert outcome.value == (1, failed), outcome
    assert len(starts()) == 5
    Path("bad").unlink()
    assert run_ranks(1, work)[0].value == (0, {}) and len(starts()) == 6


def test_a_run_that_others_stop_stops_the_worker_and_has_not_failed():
    Path("stop").touch()
    assert run_ranks(1, work)[0].value == (75, {}) and len(starts()) == 1
    assert run_ranks(1, work)[0].value == (0, {}) and len(starts()) == 5


def hold_lock(path: str) -> None:
    with open(path, "a") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        until(Path("go").exists)


def test_a_run_whose_worker_was_killed_is_left_alone_until_it_ends():
    (name, *others) = [trial.name for trial in trials_of()]
    Path(f"runs/lr/{name}").mkdir(parents=True)
    holder = start_ranks(1, hold_lock, f"runs/lr/{name}/.lock")
    until(Path(f"runs/lr/{name}/.lock").exists)
    worker = start_ranks(1, work)
    until(lambda: Path("starts").exists() and starts() == others)
    Path("go").touch()
    (outcome,) = worker.finish()
    assert outcome.value == (0, {}) and starts() == [*others, name]
    assert outcome.out.count(name) == 1  # not even tried before
    holder.finish()


def test_a_worker_leaves_the_last_runs_to_those_that_train_them():
    (name, *others) = [trial.name for trial in trials_of()]
    Path("runs/lr").mkdir(parents=True)
    holder = start_ranks(1, hold_lock, f"runs/lr/{name}.claim")
    until(Path(f"runs/lr/{name}.claim").exists)
    (outcome,) = run_ranks(1, work)
    Path("go").touch()
    holder.finish()
    assert outcome.value == (0, {}) and starts() == others
    assert "other workers train the rest (1); the last one prints the result" in outcome.out


def without_locks() -> tuple[int, dict]:
    def lockf(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    fcntl.lockf = lockf
    return work()


def test_without_locks_one_line_says_so_and_a_worker_under_nohup_ignores_the_terminal():
    launch = start_ranks(1, without_locks)
    until(lambda: Path("starts").exists())
    launch.kill(signal.SIGHUP)
    (outcome,) = launch.finish()
    assert outcome.value == (0, {}) and len(starts()) == 4
    assert outcome.out.count("this file system has no locks (No locks available): start") == 1


def test_a_signal_stops_the_worker_after_its_run():
    launch = start_ranks(1, work, "--seeds", "9")
    until(lambda: Path("starts").exists())
    launch.kill(signal.SIGTERM)
    (outcome,) = launch.finish()
    assert outcome.value == (75, {}) and "run the same command again" in outcome.out
    assert len(starts()) == 1


# -- real runs


def check_alone(name: str, processes: int) -> None:
    """The run of the sweep is the one that train.py trains alone."""
    flags = words(next(row for row in listed() if row["trial"] == name)["flags"])
    train_run(processes, f"alone-{name}", *flags)
    found = []
    for run in (f"alone-{name}", f"lr/{name}"):
        checkpoint = Path(f"runs/{run}/checkpoints/step-{newest(run):08}")
        files = {path.name: sha256_of(path) for path in checkpoint.iterdir()}
        log = [{k: v for k, v in each.items() if k not in TIMES} for each in records(run)]
        log = [record for record in log if record["kind"] != "start"]
        found.append((log, {file: files[file] for file in files.keys() - {*OTHERS}}))
    assert found[0] == found[1]


def listed(name: str = "lr") -> list[dict]:
    """The rows of trials.csv."""
    with Path(f"runs/{name}/trials.csv").open(newline="") as file:
        return [*csv.DictReader(file)]


TWO = ["--launch", f"{BIN}/accelerate launch --config_file {ROOT}/accelerate_configs/2cpu.yaml"]


def begin(*own: str) -> subprocess.Popen:
    """Start a worker of the sweep."""
    command = [sys.executable, str(ROOT / "sweep.py"), *GRID, *own, "--", *FLAGS]
    with Path("out.txt").open("a") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, env=clean_environment())


def updates_so_far() -> int:
    logs = [records_so_far(log) for log in Path("runs").glob("lr/*/log.jsonl")]
    return sum(record["kind"] == "train" for log in logs for record in log)


def alive(started: list[subprocess.Popen]) -> list[subprocess.Popen]:
    return [worker for worker in started if worker.poll() is None]


def kill_some(started: list[subprocess.Popen], chance: random.Random) -> None:
    """Kill a worker, a process of its run, or all of a worker."""
    if not alive(started):
        return
    worker = chance.choice(alive(started))
    below = psutil.Process(worker.pid).children(recursive=True)
    whom = chance.choice(["worker", "rank", "all"])
    if whom != "rank":
        worker.kill()
    for process in {"worker": [], "rank": below[-1:], "all": below}[whom]:
        with suppress(psutil.NoSuchProcess):
            process.kill()


@pytest.mark.parametrize(
    "kills, seeds, launch",
    [full(2, "1", []), full(1, "1", TWO), pytest.param(20, "2", [], marks=pytest.mark.slow)],
)
def test_after_kills_each_run_of_a_sweep_has_the_bits_of_the_run_alone(kills, seeds, launch):
    chance = random.Random(kills)
    own = ["--seeds", seeds, *launch]
    count = 4 * int(seeds)
    places = sorted(chance.sample(range(1, 12 * count - 6), kills))
    started: list[subprocess.Popen] = []
    try:
        for place in places:
            for _ in range(chance.randint(1, 3) - len(alive(started))):
                started.append(begin(*own))
            # workers whose runs were killed may end before
            until(lambda place=place: updates_so_far() >= place or not alive(started))
            kill_some(started, chance)
        for worker in started:  # otherwise the last one may leave runs to them
            worker.wait(1200)
        end = begin(*own)
        assert end.wait(1200) == 0, Path("out.txt").read_text()[-3000:]
    finally:
        end_commands(started)
    names = [row["trial"] for row in listed()]
    assert len(names) == count
    for name in names if count > 4 else chance.sample(names, 2):
        check_alone(name, 1)
    said = Path("out.txt").read_text()
    assert re.search(r"^lr=0.02,label_smoothing=0 +accuracy 0\.\d{4}", said, re.M)
    page = Path("runs/lr/report.html").read_text()
    assert all(name in page for name in names)


@pytest.mark.full
def test_the_sweeps_of_the_page_are_listed_with_an_estimate_of_their_time():
    page = (ROOT / "docs/compare.md").read_text()
    commands = re.findall(r"^python (sweep\.py .+)$", page, re.M)
    for command, runs, updates in zip(commands, (5, 18), ("260", "130"), strict=True):
        script, *own = words(command)
        code, out, err = start("python", ROOT / script, "--dry_run", *own)
        assert code == 0, err
        lines = out.splitlines()
        assert len({*lines[:runs]}) == runs and all("-seed" in line for line in lines[:runs])
        assert re.search(r"^dry run: an update of 128 images took ", out, re.M)
        last = rf"{runs} runs: \d\d:\d\d, if each has {updates} updates like the first one, which "
        assert re.match(last, lines[-1]), lines[-1]
    assert not [*Path("runs").glob("*")]
