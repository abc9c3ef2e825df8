"""--ema_decay: averages of the weights over updates, exact on any topology."""

import json
import os
import shutil
import signal
from itertools import count
from pathlib import Path

import pytest
import torch
from helpers.ranks import returned, run_ranks
from helpers.training_runs import (
    records,
    refused,
    same_tensors,
    train_run,
    weights,
    words,
    working_in,
)

import eval
import train
from utils.errors import UserError
from utils.models.weight_average import WeightAverage
from utils.runs.manifest import checkpoints_of
from utils.training.evaluation import Evaluator

DECAY = 0.3  # the warm-up reaches it at the fourth update
# Batch statistics, and an integer buffer. Four updates an epoch, the last one smaller.
FLAGS = words("--data digits --image_size 16 --model timm/test_resnet --lr 0.02 --threads 1")
FLAGS += words("--max_train_samples 350 --max_eval_samples 70 --global_batch_size 100")
FLAGS += words("--eval_batch_size 16 --max_steps 9 --log_every 2 --eval_every 4 --save_every 3")
FLAGS += ["--keep", "9"]
EMA = [*FLAGS, "--ema_decay", str(DECAY)]
FILE = "ema.safetensors"


def train_and_keep_weights(flags):
    """Train, and save the initial weights of the main process and those after each update."""
    update = train.train_update

    def watched(run, batches):
        if run.ranks.is_main and run.state.step == 0:
            torch.save(run.module.state_dict(), "after-0.pt")
        update(run, batches)
        if run.ranks.is_main:
            torch.save(run.module.state_dict(), f"after-{run.state.step}.pt")

    train.train_update = watched
    return train.main(flags)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with runs of two processes:

    `two`, with its weights after each update, and `without` averages.
    """
    folder = tmp_path_factory.mktemp("averages")
    with working_in(folder):
        returned(2, train_and_keep_weights, ["--run_name", "two", *EMA])
        train_run(2, "without", *FLAGS)
    return folder


@pytest.fixture
def in_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)


def evaluations(name):
    """The evaluations that a run logged, without times."""
    return [{k: v for k, v in record.items() if k != "seconds"} for record in records(name, "eval")]


def test_the_average_is_that_of_a_plain_loop_over_the_weights_of_the_main_process(in_folder):
    after = [torch.load(f"after-{step}.pt") for step in range(10)]
    averages = {name: tensor.double() for name, tensor in after[0].items()}
    for t, own in enumerate(after[1:]):
        decay = min(DECAY, (1 + t) / (10 + t))
        averages = {name: decay * averages[name] + (1 - decay) * own[name].double() for name in own}
    found = weights("two", file=FILE)
    assert found.keys() == averages.keys() and any("running" in name for name in found)
    counts = [name for name, tensor in found.items() if not tensor.is_floating_point()]
    assert counts and all(torch.equal(found[name], after[-1][name]) for name in counts)
    for name in found.keys() - counts:
        torch.testing.assert_close(found[name].double(), averages[name], rtol=1e-5, atol=1e-7)
        assert "running" not in name or not torch.equal(found[name], after[-1][name])


def test_training_itself_does_not_change(in_folder):
    assert same_tensors(weights("two"), weights("without"))
    raw = [record for record in evaluations("two") if record.pop("weights") == "raw"]
    assert raw == evaluations("without")


def test_both_kinds_of_weights_are_evaluated_and_the_average_decides_the_best(in_folder):
    found = records("two", "eval")
    expected = [(step, kind) for step in (4, 8, 9) for kind in ("raw", "ema")]
    assert [(r["step"], r["weights"]) for r in found] == expected
    averaged = {r["step"]: r for r in found if r["weights"] == "ema"}
    checkpoint = checkpoints_of(Path("runs/two/checkpoints"))[-1]
    state = json.loads((checkpoint / "state.json").read_text())["state"]
    assert state["best_step"] == max(averaged, key=lambda step: (averaged[step]["accuracy"], -step))
    assert state["evaluation"]["loss"] == averaged[9]["loss"]
    last = {r["weights"]: r["loss"] for r in found if r["step"] == 9}
    assert last["raw"] != last["ema"]
    for more, kind in ([], "ema"), (["--weights", "raw"], "raw"):
        flags = ["--ckpt", str(checkpoint), "--max_eval_samples", "70", *more]
        (result,) = returned(1, eval.main, flags)
        assert (result["weights"], result["loss"]) == (kind, pytest.approx(last[kind], rel=1e-6))


@pytest.mark.full
def test_one_two_and_three_processes_have_the_same_average_with_microbatches():
    flags = [*EMA, "--microbatches", "4"]
    ends = []
    for processes in (1, 2, 3):
        train_run(processes, f"on-{processes}", *flags)
        ends.append((weights(f"on-{processes}", file=FILE), evaluations(f"on-{processes}")))
    for averages, evaluated in ends[1:]:
        assert same_tensors(averages, ends[0][0]) and evaluated == ends[0][1]


def stop_in_the_second_evaluation(flags):
    """The last rank gets a signal in the average's first evaluation."""
    rows, calls = Evaluator.rows, count(1)

    def stopped(*arguments, **more):
        if next(calls) == 2 and os.environ.get("RANK") == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        return rows(*arguments, **more)

    Evaluator.rows = stopped
    train.main(["--run_name", "stopped", *flags])


@pytest.mark.full
def test_a_stop_between_the_two_evaluations_repeats_both(in_folder):
    outcomes = run_ranks(2, stop_in_the_second_evaluation, [*EMA, "--resume", "auto"])
    assert [outcome.code for outcome in outcomes] == [75, 75], outcomes[0].err
    (record,) = records("stopped", "eval")
    assert (record["step"], record["weights"]) == (4, "raw")
    train_run(2, "stopped", *EMA, "--resume", "auto")
    assert evaluations("stopped") == evaluations("two")
    assert same_tensors(weights("stopped", file=FILE), weights("two", file=FILE))


@pytest.mark.full
def test_an_average_that_starts_late_starts_from_the_weights(in_folder):
    shutil.copytree("runs/without", "runs/late")
    before = weights("late")
    (outcome,) = run_ranks(
        1, train.main, ["--run_name", "late", *EMA, *words("--resume auto --max_steps 10")]
    )
    assert "ema_decay was None in the checkpoint, now " in outcome.out
    last = weights("late")
    for name, tensor in weights("late", file=FILE).items():
        if tensor.is_floating_point():
            torch.testing.assert_close(
                tensor, DECAY * before[name] + (1 - DECAY) * last[name], rtol=1e-5, atol=1e-7
            )
    train_run(1, "late", *FLAGS, "--ema_decay", "null", "--resume", "auto", "--max_steps", "11")
    assert not Path("runs/late/checkpoints/step-00000011", FILE).exists()


def test_weights_that_move_in_memory_are_an_error_and_not_an_average_of_old_ones():
    module = torch.nn.Linear(2, 2)
    average = WeightAverage(module, DECAY)
    module.bias.data = module.bias.data.clone()
    with pytest.raises(UserError, match="--ema_decay: the weights have other memory"):
        average.update(0)


def test_what_a_run_does_not_have_is_refused_in_one_line(in_folder):
    line = refused(eval.main, *words("--ckpt runs/without --weights ema"))
    assert ": has no average of the weights; use --weights raw" in line
    assert "weights" not in returned(1, eval.main, words("--ckpt runs/without --weights raw"))[0]
