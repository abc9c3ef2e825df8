"""--max_seconds and --early_stopping end a run on all ranks after the same update."""

import re
from pathlib import Path

import pytest
from helpers.ranks import returned, run_ranks
from helpers.training_runs import (
    records,
    same_tensors,
    slow_train,
    train_run,
    weights,
    words,
    working_in,
)
from helpers.waiting import newest

import train

FLAGS = words("--data digits --model mlp --threads 1 --lr 0.1 --max_train_samples 240")
FLAGS += ["--model_args", "{hidden: 16}"]
FLAGS += words("--max_eval_samples 60 --global_batch_size 24 --microbatches 2")
FLAGS += words("--log_every 1 --save_every 5 --eval_every 3")
STOPPING = [*FLAGS, *words("--max_steps 900 --early_stopping 5 --lr_schedule constant")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a run that is stopped early, `run`, and its output, out.txt."""
    folder = tmp_path_factory.mktemp("ending")
    with working_in(folder):
        (outcome,) = run_ranks(1, train.main, ["--run_name", "run", *STOPPING])
        assert outcome.code == 0, outcome.err
        Path("out.txt").write_text(outcome.out)
    return folder


@pytest.fixture
def in_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)


def numbers(name):
    """What a run logged, without times."""
    times = {"seconds", "images_per_second", "data_wait", "time", "computing", "waiting"}
    return [
        {k: v for k, v in r.items() if k not in times}
        for r in records(name)
        if r["kind"] != "start"
    ]


def test_a_run_ends_after_so_many_evaluations_without_a_new_best(in_folder):
    accuracies = [record["accuracy"] for record in records("run", "eval")]
    since = [n - accuracies.index(max(accuracies[: n + 1])) for n in range(len(accuracies))]
    assert since[-1] == 5 and max(since[:-1]) < 5
    last = 3 * len(accuracies)
    assert last < 900 and newest("run") == last and records("run", "train")[-1]["step"] == last
    (end,) = records("run", "end")
    assert (end["step"], end["reason"]) == (last, "early_stopping")
    assert f"--early_stopping 5 after update {last} of 900" in Path("out.txt").read_text()


@pytest.mark.full
def test_another_topology_ends_at_the_same_update_with_the_same_bits(in_folder):
    train_run(2, "two", *STOPPING)
    assert numbers("two") == numbers("run") and same_tensors(weights("two"), weights("run"))


@pytest.mark.full
def test_a_resumed_run_ends_with_the_same_bits_also_in_a_new_folder(in_folder):
    middle = newest("run") - 6  # three evaluations after the best one
    train_run(1, "first", *STOPPING, "--max_steps", str(middle))
    train_run(1, "second", *STOPPING, "--resume", "runs/first")
    assert records("second", "eval")[0]["step"] > middle and same_tensors(
        weights("second"), weights("run")
    )
    assert numbers("second")[-1] == numbers("run")[-1]
    train_run(1, "second", *STOPPING, "--resume", "auto")
    assert len(records("second", "end")) == 1 and newest("second") == newest("run")
    log = Path("runs/second/log.jsonl")
    lines = log.read_text().splitlines(True)
    # as if killed after the last checkpoint
    log.write_text("".join(line for line in lines if '"end"' not in line))
    assert records("second", "end") == []
    train_run(1, "second", *STOPPING, "--resume", "auto")
    assert [end["step"] for end in records("second", "end")] == [newest("run")]
    more = ["--early_stopping", "6", "--resume", "auto", "--max_steps", str(newest("run") + 3)]
    train_run(1, "second", *STOPPING, *more)
    assert newest("second") == newest("run") + 3


@pytest.mark.full
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_ends_when_its_time_is_up_and_a_resumed_one_with_more_time_goes_on(processes):
    flags = [*FLAGS, *words("--run_name run --eval_every 600 --save_every 600 --resume auto")]
    limits = words("--max_steps 600 --max_seconds 1")
    outcomes = run_ranks(processes, slow_train, [*flags, *limits], 0.05)
    assert [outcome.code for outcome in outcomes] == [0] * processes, outcomes[0].err
    (end,), last = records("run", "end"), records("run", "train")[-1]
    assert end["reason"] == "max_seconds" and end["seconds"] == last["seconds"] >= 1
    assert 0 < end["step"] == last["step"] == newest("run") < 600  # which take at least 30 seconds
    assert [record["step"] for record in records("run", "eval")] == [end["step"]]
    assert f"--max_seconds 1.0 after update {end['step']} of 600" in outcomes[0].out
    # not the time of 600 updates
    assert set(re.findall(r"eta (\S+)", outcomes[0].out)) <= {"00:00", "00:01"}
    for seconds, updates in (("1", 0), ("9999", 2)):
        limits = words(f"--max_seconds {seconds} --max_steps {end['step'] + 2}")
        returned(processes, train.main, [*flags, *limits])
        assert newest("run") == end["step"] + updates
