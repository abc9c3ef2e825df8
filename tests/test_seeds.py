"""--seeds trains several runs in one launch; each is the run that would be trained alone."""

import gc
import random
import re
import signal
import statistics
import time
from pathlib import Path

import psutil
import pytest
import torch
from helpers.launched_runs import FLAGS, begin, ranks_of
from helpers.make_data import image_folder
from helpers.ranks import returned, run_ranks, start_ranks
from helpers.training_runs import (
    MLP,
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
from helpers.waiting import PATIENCE, has_logged, records_so_far, until

import train
from utils.config.cli import parse_args
from utils.config.settings import TrainConfig
from utils.files import LOCK
from utils.training.run import Run

TIMES = {"seconds", "images_per_second", "data_wait", "time", "computing", "waiting"}
PHOTOS = words("--data photos --model timm/test_resnet --image_size 48 --num_workers 1 --flip")
PHOTOS += words("--threads 1 --global_batch_size 16 --max_steps 8 --eval_fraction 0.2 --lr 0.05")
PHOTOS += words("--ema_decay 0.5 --log_every 1 --eval_every 4 --save_every 3 --channels_last false")
PHOTOS += ["--model_args", "{drop_rate: 0.5}"]
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


def check_same(one: str, other: str, *more: str) -> None:
    """Two runs have the same settings, log, weights, optimizer state and further files."""
    for file in ("model.safetensors", "optimizer.bin", *more):
        assert same_tensors(weights(one, file=file), weights(other, file=file)), file
    logs, settings = (
        [
            [{k: v for k, v in record.items() if k not in TIMES} for record in records(name)]
            for name in (one, other)
        ],
        [Path(f"runs/{name}/config.yaml").read_text() for name in (one, other)],
    )
    assert settings[0] == settings[1]
    logs = [[record for record in log if record["kind"] != "start"] for log in logs]
    assert logs[0] == logs[1]


def _train_with_nothing_left(flags: list[str]) -> list[int]:
    """Train, and check that nothing of a run is left when the next one is built; returns the graphs
    that each run has compiled.
    """
    build, counters, graphs = train.build, torch._dynamo.utils.counters, list[int]()

    def watched(*arguments):
        assert not psutil.Process().children(), "loader processes"
        assert not [each for each in gc.get_objects() if type(each) is Run]
        graphs.append(counters["stats"]["unique_graphs"])
        counters.clear()
        return build(*arguments)

    train.build = watched
    train.main(flags)
    return [*graphs[1:], counters["stats"]["unique_graphs"]]


@pytest.mark.parametrize("environment, processes", [({}, 2), full({}, 1), full(FSDP, 2)])
def test_each_run_is_bit_identical_to_one_trained_alone(environment, processes, monkeypatch):
    image_folder("photos", {"a": 30, "b": 30}, (120, 100), "jpeg")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    flags = [*PHOTOS, "--run_name", "all", "--seeds", "7,3"]
    returned(processes, _train_with_nothing_left, flags)
    for seed in ("7", "3"):
        train_run(processes, seed, *PHOTOS, "--seed", seed)
        check_same(f"all-seed{seed}", seed, "ema.safetensors")


@pytest.mark.full
def test_each_run_is_compiled(monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "aot_eager")
    flags = [*MLP, *words("--max_steps 4 --run_name all --seeds 10")]
    (graphs,) = returned(1, _train_with_nothing_left, flags)
    assert len(graphs) == 10 and set(graphs) == {graphs[0]} and graphs[0] > 0


def _train_until_a_signal(when: str, flags: list[str]) -> None:
    """Train, and send a signal to rank 1: in update 7 of seed 1, or after the run of seed 0."""
    end = train.log_end

    def signal_rank_1(run):
        if run.ranks.topology.rank == 1:
            kill_myself(signal.SIGTERM)

    def watch(run):
        if (when, run.config.seed, run.state.step) == ("update", 1, 7):
            signal_rank_1(run)

    def ended(run, *more):
        stopped = end(run, *more)
        if when == "end":
            signal_rank_1(run)
        return stopped

    train.log_end = ended
    train_watched(flags, after=watch)


def contents(folder: str) -> dict[Path, bytes]:
    files = [path for path in Path(folder).rglob("*") if path.is_file() and path.name != LOCK]
    return {path: path.read_bytes() for path in files}


@pytest.mark.parametrize("when", ["update", full("end")])
def test_a_stopped_launch_goes_on_with_the_run_that_was_cut_and_leaves_others_alone(when):
    flags = [*MLP, *words("--lr 1e-9 --max_steps 40 --eval_every 9 --early_stopping 1 --seeds 3")]
    outcomes = run_ranks(2, _train_until_a_signal, when, flags)
    assert codes(outcomes) == [75, 75], outcomes[0].err
    said = outcomes[0].out.splitlines()[-1] if when == "update" else outcomes[0].err
    assert "--run_name run --resume auto" in said or "--run_name NAME --resume auto" in said
    assert not Path("runs/run-seed2").exists()
    finished = contents("runs/run-seed0")
    assert b'"end"' in finished[Path("runs/run-seed0/log.jsonl")]
    out = run_ranks(2, train.main, ["--run_name", "run", *flags, "--resume", "auto"])[0].out
    assert contents("runs/run-seed0") == finished
    assert len(steps("run-seed1", "start")) == (2 if when == "update" else 1)
    best = [max(r["accuracy"] for r in records(f"run-seed{n}", "eval")) for n in range(3)]
    assert "accuracy of 3 seeds\n" in out
    rows = {"seed 2": best[2], "mean": statistics.mean(best)}
    for name, number in (rows | {"standard deviation": statistics.stdev(best)}).items():
        assert re.search(rf"^{name} +best {number:.4f}, last ", out, re.M)


@pytest.mark.full
def test_launches_killed_at_random_moments_end_with_the_runs_of_whole_ones():
    flags = [*MLP, *words("--max_steps 30 --save_every 4 --log_every 1 --microbatches 2")]
    flags += words("--model mnist_cnn --eval_every 10 --ema_decay 0.9")
    several = [*flags, *words("--seeds 3 --resume auto")]
    logs = [Path(f"runs/run-seed{seed}/log.jsonl") for seed in range(3)]
    chance = random.Random(52)

    def trained() -> int:
        return sum(r["kind"] == "train" for log in logs for r in records_so_far(log))

    for number, processes in enumerate((2, 1, 2, 1, 2)):
        launch = start_ranks(processes, slow_train, several, 0.02)
        target = 18 * number + chance.randrange(14)
        until(lambda target=target: trained() >= target)
        time.sleep(chance.uniform(0, 0.2))
        launch.kill()
        assert -signal.SIGKILL in codes(launch.finish())
    returned(2, train.main, ["--run_name", "run", *several])
    for seed in range(3):
        train_run(1, f"{seed}", *flags, "--seed", f"{seed}")
        check_same(f"run-seed{seed}", f"{seed}", "ema.safetensors")


@pytest.mark.full
def test_with_max_restarts_a_launch_goes_on_in_the_folder_of_each_run():
    flags = words("--max_steps 200 --threads 1 --seeds 3")
    process = begin("torchrun, 2 processes", *flags, restarts=1)
    until(has_logged(50, "run-seed1"))
    ranks_of(process)[1].kill()
    assert process.wait(timeout=PATIENCE) == 0, Path("out.txt").read_text()[-3000:]
    assert [len(steps(f"run-seed{seed}", "start")) for seed in range(3)] == [1, 2, 1]
    for seed in range(3):
        assert steps(f"run-seed{seed}", "train") == list(range(1, 201))
    train_run(2, "1", *FLAGS, *flags[:-2], "--seed", "1", "--run_name", "1")
    check_same("run-seed1", "1")


@pytest.mark.parametrize(
    "flags, problem",
    [
        ("0", "--seeds must be at least 2"),
        ("-3", "--seeds must be at least 2"),
        ("2026", "--seeds must be at most 1000"),
        ("3,3", "--seeds must be several seeds, each once"),
        ("3,-1", "--seeds must be at least 0"),
        ("3 --seed 4", "--seeds and --seed cannot be used together"),
        ("3 --resume runs/a", "--seeds and --resume runs/a cannot be used together"),
    ],
)
def test_seeds_that_make_no_sense_are_one_line(flags, problem, capsys):
    for name in (["--run_name", "run"], [])[: 1 + (flags == "0")]:
        with pytest.raises(SystemExit):
            parse_args(TrainConfig, "train.py", [*name, "--seeds", *words(flags)])
        assert problem in capsys.readouterr().err
