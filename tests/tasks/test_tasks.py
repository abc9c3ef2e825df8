"""utils/tasks/task.py: a regression trains with the loop, the log, checkpoints and evaluation."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.data_loader import DataLoaderShard
from helpers.ranks import returned, run_ranks
from helpers.training_runs import records, same_tensors, weights, words
from torch.nn import functional as F

import eval
import train
from utils.data.selection import load_data
from utils.errors import UserError
from utils.settings.train import TrainConfig
from utils.tasks.classification import LOSSES, Classification
from utils.tasks.table import TASKS
from utils.tasks.task import Task
from utils.training.meter import Meter

FLAGS = [*words("--model mlp --lr 0.01 --global_batch_size 120 --model_args"), "{hidden: 16}"]
FLAGS += words("--max_steps 12 --eval_every 4 --save_every 4 --log_every 3 --threads 1")


class Value(Task):
    """Regression: the label is a number, and the model has one output.

    The best checkpoint has the lowest error.
    """

    outputs, metric, lowest_is_best = 1, "error", ("loss", "error")
    training, evaluation = ("loss", "bias"), ("loss", "error")
    shown = {"error": "error"}  # noqa: RUF012

    def __init__(self, config, class_names, labels=None):
        self.class_names = class_names

    def loss(self, outputs, targets):
        return self.losses(outputs, targets).sum()

    def losses(self, outputs, targets):
        return (outputs[:, 0] / 10 - targets / 10).square()

    def training_sums(self, loss, outputs, targets):
        return torch.stack([loss.double(), (outputs[:, 0] - targets).double().sum()])

    def evaluate(self, outputs, labels):
        errors = (outputs[:, 0] - labels).abs()
        return torch.stack([self.losses(outputs, labels), errors], 1), outputs

    def metrics(self, predictions, labels):
        # not a float of Python
        return {"worst": np.abs(predictions[:, 0] - labels).max().astype(np.float64)}

    def report(self, record, title, more=()):
        return f"{title}: error {record['error']:.4f}"


def with_value(function, flags):
    TASKS["value"] = Value
    return function(flags)


@pytest.mark.full
def test_a_regression_trains_evaluates_and_resumes_with_the_same_loop():
    logs, flags = [], [*FLAGS, "--task", "value", "--run_name"]
    for processes in (1, 2):
        name = f"run{processes}"
        found = run_ranks(processes, with_value, train.main, [*flags, name, "--metrics"])
        assert [outcome.code for outcome in found] == [0] * processes, found[0].err
        logs.append((records(name, "train"), records(name, "eval")))
    out = found[0].out
    assert re.search(r"\nerror  .*\(best, update \d", out) and "accuracy" not in out
    assert type(found[0].value["worst"]) is float  # `metrics` returns a number of NumPy
    (train_one, eval_one), (train_two, eval_two) = logs
    assert len(train_two) == 4
    for one, two in (
        *zip(eval_one, eval_two, strict=True),
        *zip(train_one, train_two, strict=True),
    ):
        for key in two.keys() & {"loss", "error", "worst", "bias"}:
            assert two[key] == pytest.approx(one[key], rel=1e-4)
    _check_independently(eval_two[-1])
    lowest = min(eval_two, key=lambda record: record["error"])
    assert Path("runs/run2/checkpoints/best").read_text().strip() == f"step-{lowest['step']:08d}"
    best = returned(2, with_value, eval.main, ["--ckpt", "runs/run2"])[0]
    assert best["step"] == lowest["step"]
    assert best["error"] == pytest.approx(lowest["error"], rel=1e-9)
    resumed = [*flags, "again", "--resume", "runs/run2/checkpoints/step-00000008"]
    returned(2, with_value, train.main, resumed)
    assert same_tensors(weights("again"), weights("run2"))


def _check_independently(record):
    """Compare an evaluation with plain PyTorch on the run's last weights."""
    split = load_data(TrainConfig(data="digits")).evaluation
    images = np.stack([np.asarray(split.images[row]) for row in split.image_index])
    pixels = torch.from_numpy(images).flatten(1)
    w, labels = weights("run2"), torch.from_numpy(split.labels)
    hidden = F.relu(F.linear((pixels / 255 - 0.5) / 0.5, w["hidden.weight"], w["hidden.bias"]))
    away = (F.linear(hidden, w["output.weight"], w["output.bias"])[:, 0] - labels).abs()
    assert record["count"] == len(labels)
    found = {"error": away.mean(), "worst": away.max(), "loss": (away / 10).square().mean()}
    for name, value in found.items():
        assert record[name] == pytest.approx(value.item(), rel=1e-5)


def test_a_run_does_not_continue_the_sums_of_another_task():
    sums = {"loss": 3.0, "accuracy": 2.0, "count": 5.0, "wait": 0.1, "skipped": 0.0}
    task = Classification(TrainConfig(), ["a", "b"])
    assert Meter(task, torch.device("cpu"), sums, True).totals == sums
    with pytest.raises(UserError, match="sums loss, accuracy, count, wait, skipped, but this task"):
        Meter(Value(None, None), torch.device("cpu"), sums, False)


def test_the_loss_of_an_evaluation_is_not_smoothed():
    task = Classification(TrainConfig(label_smoothing=0.2), list("abcde"))
    labels = torch.tensor([0, 1, 2, 3, 4, 0, 1])
    logits = 4.5 * F.one_hot(labels, 5).roll(1, 0) + torch.arange(5)
    values, _ = task.evaluate(logits, labels)
    losses, right, _ = values.T
    expected = F.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0)
    assert task.loss(logits, labels).item() != pytest.approx(losses.sum().item(), rel=1e-2)
    assert torch.equal(right, (logits.argmax(1) == labels).float())


@pytest.mark.parametrize("loss", LOSSES)
def test_soft_targets_of_one_class_equal_hard_ones_and_mixed_ones_are_the_mixture(loss):
    task = Classification(TrainConfig(loss=loss, label_smoothing=0.1), list("abcde"))
    logits, labels = torch.randn(7, 5, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 4, 0, 1])
    soft, hard = F.one_hot(labels, 5).double(), task.loss(logits, labels)
    mixture = 0.3 * hard + 0.7 * task.loss(logits, labels.flip(0))
    for targets, expected in ((soft, hard), (0.3 * soft + 0.7 * soft.flip(0), mixture)):
        assert task.loss(logits, targets).item() == pytest.approx(expected.item(), rel=1e-12)
    own, other = (task.training_sums(hard, logits, targets) for targets in (labels, soft))
    assert own == other and own[1] == (logits.argmax(1) == labels).sum()
    assert task.loss(logits[:0], labels[:0]) == 0 == task.loss(logits[:0], soft[:0])


def miscounted(times: int, flags: list[str]) -> None:
    """Train with a loader of Accelerate that repeats the first batch of each evaluation."""
    iterate = DataLoaderShard.__iter__

    def wrong(self):
        first = len(self.dataset) == 180
        for batch in iterate(self):
            yield from [batch] * (times if first else 1)
            first = False

    DataLoaderShard.__iter__ = wrong
    train.main(flags)


@pytest.mark.full
def test_an_evaluation_that_counts_a_sample_twice_or_not_at_all_is_an_error():
    for times in (0, 2):
        flags = [*FLAGS, *words(f"--eval_batch_size 20 --run_name run{times}")]
        outcomes = run_ranks(2, miscounted, times, flags)
        assert [outcome.code for outcome in outcomes] == [1] * 2, outcomes[0].err
        assert "did not count each of the 180 samples once" in outcomes[0].err
