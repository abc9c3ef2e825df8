"""What ends a run early, --max_seconds and --early_stopping, and --lr_schedule plateau, which counts evaluations."""

import json
import random
import re
from pathlib import Path

import pytest
import torch
from helpers.ranks import returned, run_ranks
from helpers.training_runs import records, refused, same_tensors, slow_train, train_run, weights, working_in
from helpers.waiting import newest

import replay
import train
from utils.config.settings import TrainConfig
from utils.runs.state import TrainState
from utils.training.schedule import learning_rate, reduce_on_plateau

FLAGS = ["--data", "digits", "--model", "mlp", "--model_args", "{hidden: 16}", "--threads", "1", "--lr", "0.1"]
FLAGS += ["--max_train_samples", "240", "--max_eval_samples", "60", "--global_batch_size", "24", "--microbatches", "2"]
FLAGS += ["--log_every", "1", "--save_every", "5", "--eval_every", "3"]
PLATEAU = [*FLAGS, "--max_steps", "900", "--early_stopping", "5", "--lr_schedule", "plateau", "--warmup_steps", "4"]
PLATEAU += ["--lr_schedule_args", "{factor: 0.5, patience: 1}"]


def train_and_note_rates(flags):
    """Train, and write the learning rate that the optimizer had in each update to rates.json."""
    update, rates = train.train_update, []

    def noted(run, batches):
        update(run, batches)
        rates.append(run.optimizer.param_groups[0]["lr"])

    train.train_update = noted
    train.main(flags)
    Path("rates.json").write_text(json.dumps(rates))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a run that is stopped early, `run`, and its output, out.txt."""
    folder = tmp_path_factory.mktemp("ending")
    with working_in(folder):
        (outcome,) = run_ranks(1, train_and_note_rates, ["--run_name", "run", *PLATEAU])
        assert outcome.code == 0, outcome.err
        Path("out.txt").write_text(outcome.out)
    return folder


@pytest.fixture
def in_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)


def numbers(name):
    """What a run logged, without times."""
    times = {"seconds", "images_per_second", "data_wait", "time"}
    return [{k: v for k, v in r.items() if k not in times} for r in records(name) if r["kind"] != "start"]


def test_a_run_ends_after_so_many_evaluations_without_a_new_best(in_folder):
    accuracies = [record["accuracy"] for record in records("run", "eval")]
    since = [n - accuracies.index(max(accuracies[: n + 1])) for n in range(len(accuracies))]
    assert since[-1] == 5 and max(since[:-1]) < 5
    last = 3 * len(accuracies)
    assert last < 900 and newest("run") == last and records("run", "train")[-1]["step"] == last
    (end,) = records("run", "end")
    assert (end["step"], end["reason"]) == (last, "early_stopping")
    assert f"--early_stopping 5 after update {last} of 900; raise it to continue" in Path("out.txt").read_text()


def test_the_learning_rate_on_a_plateau_is_that_of_torch(in_folder):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", factor=0.5, patience=1, threshold=0, eps=0)
    accuracy = {record["step"]: record["accuracy"] for record in records("run", "eval")}
    rates = []
    for step in range(1, newest("run") + 1):
        rates.append(optimizer.param_groups[0]["lr"] * min(1, step / 4))
        if step in accuracy:
            schedule.step(accuracy[step])
    found = json.loads(Path("rates.json").read_text())
    assert found == [record["lr"] for record in records("run", "train")] == pytest.approx(rates)
    reductions = [(str(n), f"{found[n]:.2e}") for n in range(5, len(found)) if found[n] < found[n - 1]]
    pattern = r"^update (\d+)  plateau: \d+ evaluations without a new best; lr is now (\S+)$"
    assert reductions and re.findall(pattern, Path("out.txt").read_text(), re.M) == reductions


@pytest.mark.full
def test_another_topology_ends_at_the_same_update_with_the_same_bits(in_folder):
    train_run(2, "two", *PLATEAU)
    assert numbers("two") == numbers("run") and same_tensors(weights("two"), weights("run"))


def test_a_resumed_run_ends_at_the_same_update_with_the_same_bits_also_in_a_new_folder(in_folder):
    rates = {record["step"]: record["lr"] for record in records("run", "train")}
    middle = next(step for step in rates if step > 4 and rates[step] < 0.1) + 2  # an evaluation after a reduction
    train_run(1, "first", *PLATEAU, "--max_steps", str(middle))
    train_run(1, "second", *PLATEAU, "--resume", "runs/first")
    assert records("second", "eval")[0]["step"] > middle and same_tensors(weights("second"), weights("run"))
    assert numbers("second")[-1] == numbers("run")[-1]
    train_run(1, "second", *PLATEAU, "--resume", "auto")
    assert len(records("second", "end")) == 1 and newest("second") == newest("run")
    more = ["--early_stopping", "6", "--resume", "auto", "--max_steps", str(newest("run") + 3)]
    train_run(1, "second", *PLATEAU, *more)
    assert newest("second") == newest("run") + 3


def test_a_replay_has_the_reduced_learning_rate_without_evaluating(in_folder):
    rates = {record["step"]: record["lr"] for record in records("run", "train")}
    best = max(records("run", "eval"), key=lambda record: (record["accuracy"], -record["step"]))["step"]
    assert best > 4 and rates[best + 7] < rates[best + 6]  # the first reduction after its checkpoint
    (outcome,) = run_ranks(1, replay.main, ["--run", "runs/run", "--cpu", "--update", str(best + 10)])
    assert outcome.code == 0 and "logged losses computed again: 9, all with the same bits" in outcome.out, outcome.out


@pytest.mark.parametrize("mode", ["max", "min"])
def test_reductions_are_those_of_torch_on_random_evaluations(mode):
    for seed in range(6):
        chance = random.Random(seed)
        patience, end = chance.randrange(4), chance.choice([0.0, 0.02])
        arguments = {"factor": 0.3, "patience": patience, "end": end}
        config = TrainConfig(lr=2.0, lr_schedule="plateau", lr_schedule_args=arguments)
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
        options = {"factor": 0.3, "patience": patience, "threshold": 0, "min_lr": 2 * end, "eps": 0}
        schedule, state = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode, **options), TrainState()
        for state.step in range(1, 1200 if seed == 0 else 200):  # the first has more than the history holds
            value = chance.choice([chance.randrange(9) / 8 + state.step / 300, float("nan")])
            value = value if mode == "max" else -value
            state.add_evaluation({"m": value}, "m", mode == "max")
            before, said = state.lr_factor, list[str]()
            reduce_on_plateau(config, state, 9999, said.append)
            assert len(said) == (state.lr_factor < before)  # silent at the lowest rate
            schedule.step(value)
            lr = learning_rate(config, state.step, 9999, state.lr_factor)
            assert lr == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
        assert lr < 2, seed


def test_wrong_arguments_of_plateau_are_refused():
    flags = ["--lr_schedule", "plateau", "--lr_schedule_args", "{factor: 2.0}"]
    assert "factor must be between 0 and 1" in refused(train.main, *flags)


@pytest.mark.full
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_ends_when_its_time_is_up_and_a_resumed_one_with_more_time_goes_on(processes):
    flags = ["--run_name", "run", *FLAGS, "--eval_every", "600", "--save_every", "600", "--resume", "auto"]
    outcomes = run_ranks(processes, slow_train, [*flags, "--max_steps", "600", "--max_seconds", "1"], 0.05)
    assert [outcome.code for outcome in outcomes] == [0] * processes, outcomes[0].err
    (end,), last = records("run", "end"), records("run", "train")[-1]
    assert end["reason"] == "max_seconds" and end["seconds"] == last["seconds"] >= 1
    assert 0 < end["step"] == last["step"] == newest("run") < 600  # which take at least 30 seconds
    assert [record["step"] for record in records("run", "eval")] == [end["step"]]
    assert f"--max_seconds 1.0 after update {end['step']} of 600; raise it to continue" in outcomes[0].out
    assert set(re.findall(r"eta (\S+)", outcomes[0].out)) <= {"0:00", "0:01"}  # not the time of 600 updates
    for seconds, updates in (("1", 0), ("9999", 2)):
        returned(processes, train.main, [*flags, "--max_seconds", seconds, "--max_steps", str(end["step"] + 2)])
        assert newest("run") == end["step"] + updates
