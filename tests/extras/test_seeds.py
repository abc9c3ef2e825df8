"""--seeds trains several runs in one launch; each is the run that would be trained alone."""

import gc
import random
import re
import signal
import statistics
from pathlib import Path

import psutil
import pytest
import torch
from helpers.launched_runs import FLAGS, begin, end_launched
from helpers.make_data import image_folder
from helpers.ranks import returned, run_ranks
from helpers.training_runs import (
    MLP,
    codes,
    full,
    kill_myself,
    records,
    refused,
    steps,
    train_run,
    words,
)
from helpers.waiting import newest, records_so_far, until

import train
from utils.runs.manifest import sha256_of
from utils.training.run import Run

TIMES = {"seconds", "images_per_second", "data_wait", "computing", "waiting"}
# with times, or with the day
OTHERS = "state.json", "manifest.json", "samples.parquet"
PHOTOS = words("--data photos --model timm/test_resnet --image_size 104 --num_workers 1 --flip")
PHOTOS += words("--threads 1 --report false --global_batch_size 16 --max_steps 5 --lr 0.05")
PHOTOS += words("--eval_fraction 0.2 --ema_decay 0.5 --log_every 1 --eval_every 3 --save_every 3")
PHOTOS += words("--channels_last false")
PHOTOS += ["--model_args", "{drop_rate: 0.5}"]
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
COMPILED = {"ACCELERATE_DYNAMO_BACKEND": "aot_eager"}


def check_alone(processes: int, seed: str, *flags: str) -> None:
    """The run of a seed in the launch `run` is the run that these processes train alone."""
    train_run(processes, seed, *flags, "--run_name", seed, "--seed", seed)
    found = []
    for name in (seed, f"run-seed{seed}"):
        checkpoint = Path(f"runs/{name}/checkpoints/step-{newest(name):08}")
        files = {path.name: sha256_of(path) for path in checkpoint.iterdir()}
        log = [{k: v for k, v in each.items() if k not in TIMES} for each in records(name)]
        log = [record for record in log if record["kind"] != "start"]
        found.append((log, {file: files[file] for file in files.keys() - {*OTHERS}}))
    assert found[0] == found[1]


def _train_with_nothing_left(flags: list[str]) -> int:
    """Train, and check that nothing of a run is left when the next one is built; returns the graphs
    that the last one has compiled.
    """
    build, counters = train.build, torch._dynamo.utils.counters

    def watched(*arguments):
        assert not psutil.Process().children(), "loader processes"
        assert Run not in map(type, gc.get_objects())
        counters.clear()
        return build(*arguments)

    train.build = watched
    train.main(flags)
    return counters["stats"]["unique_graphs"]


@pytest.mark.full
@pytest.mark.parametrize(
    "environment, processes", [({}, 1), full({}, 2), full(FSDP, 2), full(COMPILED, 1)]
)
def test_a_later_run_is_bit_identical_to_one_trained_alone(environment, processes, monkeypatch):
    image_folder("photos", {"a": 30, "b": 30}, (130, 120), "jpeg")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    flags = [*PHOTOS, *words("--run_name run --seeds 7,3")]
    graphs = returned(processes, _train_with_nothing_left, flags)
    assert all(graphs) == (environment == COMPILED)
    check_alone(processes, "3", *PHOTOS)


def _signal_rank_1(name: str, flags: list[str]) -> None:
    """Train, and send rank 1 a signal at the end of seed 0's run, or in each update of seed 1's."""
    function, seed = getattr(train, name), name == "train_update"

    def signalled(run, *more):
        if (run.ranks.topology.rank, run.config.seed) == (1, seed):
            kill_myself(signal.SIGTERM)
        return function(run, *more)

    setattr(train, name, signalled)
    train.main(flags)


@pytest.mark.full
@pytest.mark.parametrize("place, name", [("train_update", "run"), full("log_end", "NAME")])
def test_a_stopped_launch_goes_on_with_the_run_that_was_cut_and_leaves_others_alone(place, name):
    flags = [*MLP, *words("--lr 1e-9 --max_steps 30 --eval_every 4 --early_stopping 1")]
    flags += words("--run_name run --seeds 3")
    outcomes = run_ranks(2, _signal_rank_1, place, flags)
    assert codes(outcomes) == [75, 75], outcomes[0].err
    last = (outcomes[0].out + outcomes[0].err).splitlines()[-1]
    assert last.endswith(f"--run_name {name} --resume auto")
    assert not Path("runs/run-seed2").exists()
    finished = Path("runs/run-seed0/log.jsonl").read_bytes()
    out = run_ranks(2, train.main, [*flags, "--resume", "auto"])[0].out
    assert Path("runs/run-seed0/log.jsonl").read_bytes() == finished
    assert len(steps("run-seed1", "start")) == 1 + (name == "run")
    best = [max(r["accuracy"] for r in records(f"run-seed{n}", "eval")) for n in range(3)]
    rows = {"seed 2": best[2], "mean": statistics.mean(best)}
    for name, number in (rows | {"standard deviation": statistics.stdev(best)}).items():
        assert re.search(rf"accuracy of 3 seeds\n(.*\n)*{name} +best {number:.4f}, last ", out)
    Path("runs/run-seed0/log.jsonl").unlink()
    out = run_ranks(2, train.main, [*flags, "--resume", "auto"])[0].out
    assert re.search(rf"\nseed 0 +best nan, last nan\n(.*\n)*seed 2 +best {best[2]:.4f}, ", out)
    Path("runs/run-seed1").rename("runs/run-seed7")
    other = refused(train.main, *flags, "--seeds", "7,0", "--resume", "auto")
    assert "with --seed 1, not 7; use" in other


@pytest.mark.full
def test_launches_killed_at_random_moments_end_with_the_runs_of_whole_ones():
    flags = [*FLAGS, *words("--max_steps 300 --threads 1 --microbatches 2")]
    again = [*flags, *words("--seeds 3 --resume auto")]

    def trained() -> int:
        logs = (records_so_far(log) for log in Path("runs").glob("run-*/log.jsonl"))
        return sum(record["kind"] == "train" for log in logs for record in log)

    targets = sorted(random.Random(52).sample(range(10, 800), 4))
    for launcher, target in zip(("torchrun, 2 processes", "python") * 2, targets, strict=True):
        begin(launcher, *again)
        until(lambda target=target: trained() >= target)
        end_launched()
    returned(2, train.main, again)
    assert sum(len(steps(f"run-seed{seed}", "start")) for seed in range(3)) > 5
    for seed in ("0", "1", "2"):
        check_alone(1, seed, *flags)


@pytest.mark.parametrize(
    "flags, problem",
    {
        "0": "--seeds must be at least 2",
        "3,3": "--seeds must be several seeds, each once",
        "3,-1": "--seeds must be at least 0",
        "3 --seed 4": "--seeds and --seed cannot be used together",
        "3 --resume a": "--seeds and --resume a cannot be used together",
        "3 --run_name null": "--seeds needs --run_name",
    }.items(),
)
def test_seeds_that_make_no_sense_are_one_line(flags, problem):
    assert problem in refused(train.main, *words(f"--run_name run --seeds {flags}"))
