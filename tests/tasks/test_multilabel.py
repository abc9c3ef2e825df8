"""--task multilabel and binary, focal loss, --best_metric, against PyTorch and scikit-learn."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import ClassLabel, List, Value
from helpers.make_data import parquet, pictures, table
from helpers.ranks import returned, run_ranks
from helpers.training_runs import (
    kept_in,
    records,
    refused,
    restore,
    same_tensors,
    train_run,
    weights,
    words,
)
from PIL import Image
from sklearn.metrics import accuracy_score, average_precision_score, f1_score, roc_auc_score
from torch.nn import functional as F

import eval
import train
from utils.config.cli import parse_args
from utils.data.hold_out import hold_out
from utils.data.selection import load_data
from utils.data.splits import whole_split
from utils.runs.state import TrainState
from utils.settings.train import TrainConfig
from utils.tasks.classification import LOSSES, Classification
from utils.tasks.metrics import area_under_curve, class_metrics
from utils.tasks.multilabel import SIGMOID_LOSSES, Binary, MultiLabel
from utils.tasks.table import TASKS, make_task

CLASSES = ["bird", "cat", "dog", "emu"]
FLAGS = [*words("--model mlp --threads 1 --lr 0.05 --log_every 1 --model_args"), "{hidden: 8}"]
FLAGS += words("--global_batch_size 12 --max_steps 8 --eval_every 4 --save_every 4 --keep 9")
FLAGS += words("--eval_batch_size 5 --pos_weight balanced --label_smoothing 0.1 --threshold 0.4")


def label_sets(count: int) -> list[list[str]]:
    """Of classes that images show; the last class only in the first images, and some images without
    any.
    """
    shows = lambda n, k: (n * (k + 2) + k) % (k + 3) < 2 and (k < 3 or n < 9)  # noqa: E731
    return [[name for k, name in enumerate(CLASSES) if shows(n, k)] for n in range(count)]


def write_data() -> None:
    """The same 50 training and 21 test images as list.csv and, with two classes, as pairs.csv."""
    pixels, labels = pictures(71), label_sets(71)
    for number, names in enumerate(labels):
        for name in names:
            row = CLASSES.index(name) * 2
            pixels[number, row : row + 2] //= 4  # can be learnt
    Path("images").mkdir()
    lists, pairs = ["path,label,split"], ["path,label,split"]
    for number, (image, names) in enumerate(zip(pixels, labels, strict=True)):
        Image.fromarray(image).save(f"images/{number}.png")
        split = "train" if number < 50 else "test"
        lists.append(f"images/{number}.png,{'| '.join(names)},{split}")
        pairs.append(f"images/{number}.png,{'yes' if 'cat' in names else 'no'},{split}")
    Path("list.csv").write_text("\n".join(lists))
    Path("pairs.csv").write_text("\n".join(pairs))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Runs of both tasks, and their evaluations on one and on two processes."""
    folder = tmp_path_factory.mktemp("targets") / "work"
    with kept_in(folder):
        write_data()
        for processes, name, flags in (
            (1, "list", "--data list.csv"),
            (2, "two", "--data list.csv"),
            (2, "binary", "--data pairs.csv --task binary --best_metric auc"),
        ):
            train_run(processes, name, *words(flags), *FLAGS)
        for run in ("two", "binary"):
            for processes in (1, 2):
                flags = f"--ckpt runs/{run}/checkpoints/step-00000008 --json {run}{processes}.json"
                returned(processes, eval.main, words(flags))
    return folder


@pytest.fixture
def runs(made, monkeypatch):
    monkeypatch.chdir(restore(made))


def logits_of(run: str, indices: range) -> torch.Tensor:
    """The outputs of a run's last network for images of list.csv, in plain operations."""
    w = weights(run)
    pixels = np.stack([np.asarray(Image.open(f"images/{number}.png")) for number in indices])
    x = ((torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5).flatten(1)
    hidden = F.linear(x, w["hidden.weight"], w["hidden.bias"]).relu()
    return F.linear(hidden, w["output.weight"], w["output.bias"])


def multi_hot_rows(indices: range) -> np.ndarray:
    sets = label_sets(71)
    return np.array([[name in sets[number] for name in CLASSES] for number in indices], np.uint8)


def found(run: str, processes: int) -> dict:
    return json.loads(Path(f"{run}{processes}.json").read_text())


# -- runs


def test_training_on_two_processes_has_the_losses_and_metrics_of_one(runs):
    for one, two in zip(records("list", "train"), records("two", "train"), strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert (two["micro_f1"], two["exact_match"]) == (one["micro_f1"], one["exact_match"])
    for one, two in zip(records("list", "eval"), records("two", "eval"), strict=True):
        for name in ("mAP", "macro_f1", "micro_f1", "loss"):
            assert two[name] == pytest.approx(one[name], rel=1e-5)
        assert "per_class_ap" not in one  # only numbers without --metrics


@pytest.mark.full
def test_the_first_update_has_the_loss_of_the_formula():
    write_data()
    more = words("--max_steps 1 --global_batch_size 50 --lr 1e-30 --run_name run --data list.csv")
    (outcome,) = run_ranks(1, train.main, [*FLAGS, *more])
    assert "multilabel, pos_weight " in outcome.out
    assert re.search(r"^update 1 .*  mAP 0\.\d+  micro-F1 ", outcome.out, re.M), outcome.out
    (record,) = records("run", "train")
    logits = logits_of("run", range(50)).double().numpy()
    labels = multi_hot_rows(range(50)).astype(float)
    p, positives = 1 / (1 + np.exp(-logits)), labels.sum(0)
    soft = 0.9 * labels + 0.05
    terms = -((50 - positives) / positives) * soft * np.log(p) - (1 - soft) * np.log(1 - p)
    assert record["loss"] == pytest.approx(terms.mean(1).mean(), rel=1e-5)
    assert record["micro_f1"] == pytest.approx(f1_score(labels, p > 0.4, average="micro"))
    assert record["exact_match"] == pytest.approx(accuracy_score(labels, p > 0.4))


def test_an_evaluation_has_the_metrics_of_scikit_learn_on_one_and_on_two_processes(runs):
    one, two = found("two", 1), found("two", 2)
    logits, true = logits_of("two", range(50, 71)), multi_hot_rows(range(50, 71))
    predicted = (logits.sigmoid() > 0.4).numpy()
    assert true.any(0).tolist() == [True, True, True, False]  # no test image has the last class
    precisions = [average_precision_score(true[:, k], logits[:, k]) for k in range(3)]
    seen = [k for k in range(4) if true[:, k].any() or predicted[:, k].any()]
    loss = F.binary_cross_entropy_with_logits(logits, torch.from_numpy(true).float())
    expected = {
        "count": 21,
        "classes_evaluated": 3,
        "mAP": np.mean(precisions),
        "micro_f1": f1_score(true, predicted, average="micro"),
        "macro_f1": f1_score(true[:, seen], predicted[:, seen], average="macro"),
        "exact_match": accuracy_score(true, predicted),
        "loss": loss.item(),
    }
    assert {name: one[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert one["per_class_ap"] == [*(pytest.approx(value) for value in precisions), None]
    assert one["per_class_count"] == true.sum(0).tolist()
    same = [name for name in one if name not in ("seconds", "loss")]
    assert [one[name] for name in same] == [two[name] for name in same]
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
    assert one["mAP"] == pytest.approx(records("two", "eval")[-1]["mAP"])
    (outcome,) = run_ranks(1, eval.main, ["--ckpt", "runs/two", "--threshold", "0.999"])
    assert "Average precision of the classes, worst first" in outcome.out
    assert "\nmicro_f1     0.0000" in outcome.out


def test_a_binary_run_has_one_logit_and_the_metrics_of_scikit_learn(runs):
    logits = logits_of("binary", range(50, 71))
    true = np.array(["cat" in names for names in label_sets(71)[50:]], int)  # classes are no, yes
    assert logits.shape == (21, 1)
    predicted, both = (logits[:, 0].sigmoid() > 0.4).numpy(), F.pad(logits, (1, 0))
    expected = {
        "auc": roc_auc_score(true, logits[:, 0]),
        "accuracy": accuracy_score(true, predicted),
        "f1": f1_score(true, predicted),
        "loss": F.cross_entropy(both, torch.from_numpy(true)).item(),  # of the softmax
    }
    for record in (found("binary", 1), found("binary", 2)):
        assert {name: record[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    highest = max(records("binary", "eval"), key=lambda record: record["auc"])
    assert Path("runs/binary/checkpoints/best").read_text().strip() == f"step-{highest['step']:08d}"


@pytest.mark.full
def test_a_resumed_run_has_the_same_bits_keeps_its_best_metric_and_refuses_another(runs):
    path = "runs/two/checkpoints/step-00000004"
    train_run(2, "again", "--resume", path, "--data", "list.csv", *FLAGS)
    assert same_tensors(weights("again"), weights("two"))
    assert records("again", "eval")[-1]["mAP"] == records("two", "eval")[-1]["mAP"]
    more = [*FLAGS, *words("--run_name binary --resume auto --data pairs.csv --max_steps 9")]
    error = refused(train.main, *more, "--best_metric", "loss")
    assert "its --best_metric is auc, not loss" in error
    error = refused(train.main, *more, "--task", "classification")
    assert "trained with --task binary, not classification" in error
    returned(1, train.main, more)
    assert "auc" in records("binary")[-1]
    assert "best_metric: auc" in Path("runs/binary/config.yaml").read_text()


# -- losses


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_focal_losses_are_those_of_their_formula(gamma):
    logits, soft = torch.randn(7, 5, dtype=torch.float64) * 3, torch.rand(7, 5, dtype=torch.float64)
    weight, p = torch.rand(5, dtype=torch.float64), logits.softmax(1).numpy()
    value = LOSSES["focal"](logits, soft, 0.1, weight, gamma=gamma).tolist()
    t = 0.9 * soft.numpy() + 0.1 / 5
    expected = -(weight.numpy() * t * (1 - p) ** gamma * np.log(p)).sum(1)
    assert value == pytest.approx(expected, rel=1e-12)
    q, t = logits.sigmoid().numpy(), soft.numpy()
    terms = -3 * t * (1 - q) ** gamma * np.log(q) - (1 - t) * q**gamma * np.log(1 - q)
    value = SIGMOID_LOSSES["focal"](logits, soft, torch.tensor(3.0), gamma=gamma).tolist()
    assert value == pytest.approx(terms.mean(1), rel=1e-12)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_the_gradients_of_focal_losses_are_finite_for_certain_predictions(gamma):
    labels = torch.tensor([0, 0, 1])
    for loss in (
        lambda logits: LOSSES["focal"](logits, labels, 0.0, None, gamma=gamma),
        lambda logits: SIGMOID_LOSSES["focal"](logits, torch.eye(2)[labels], None, gamma=gamma),
    ):
        logits = torch.tensor([[80.0, -80.0], [-200.0, 200.0], [0.0, 0.0]], requires_grad=True)
        loss(logits).sum().backward()
        assert logits.grad.isfinite().all() and logits.grad[1, 0] < 0


@pytest.mark.parametrize("loss", SIGMOID_LOSSES)
@pytest.mark.parametrize("kind", [MultiLabel, Binary])
def test_sigmoid_losses_take_mixtures_smoothing_and_weights(loss, kind):
    config = TrainConfig(loss=loss, label_smoothing=0.2, pos_weight=2.5)
    several = kind is MultiLabel
    rows = torch.eye(4).byte()[[0, 3, 1, 1, 2, 0]] if several else torch.tensor([0, 1, 1, 0])
    one_hot = rows.double() if several else F.one_hot(rows).double()
    task = kind(config, CLASSES[: one_hot.shape[1]], rows.numpy())
    logits = torch.randn(len(rows), task.outputs, dtype=torch.float64)
    mixed = task.loss(logits, 0.3 * one_hot + 0.7 * one_hot.flip(0))
    parts = 0.3 * task.loss(logits, one_hot) + 0.7 * task.loss(logits, one_hot.flip(0))
    assert mixed.item() == pytest.approx(parts.item(), rel=1e-12)
    hard = task.loss(logits, rows).item()
    assert hard == pytest.approx(task.loss(logits, one_hot).item(), rel=1e-12)
    if loss != "focal":
        t = 0.8 * one_hot[:, -task.outputs :] + 0.1
        terms = -2.5 * t * logits.sigmoid().log() - (1 - t) * (-logits).sigmoid().log()
        assert hard == pytest.approx(terms.mean(1).sum().item(), rel=1e-9)
    assert task.loss(logits[:0], rows[:0]) == 0


def test_balanced_weights_are_negatives_per_positive_of_the_training_split():
    labels = multi_hot_rows(range(50))
    labels[:, 3] = 0
    labels[:, 2] = 1
    task = MultiLabel(TrainConfig(pos_weight="balanced"), CLASSES, labels)
    positives = labels.sum(0).astype(float)
    expected = [*((50 - positives[:2]) / positives[:2]), 1 / 50, 50]
    assert task.pos_weight.tolist() == pytest.approx(expected)
    binary = Binary(TrainConfig(pos_weight="balanced"), ["no", "yes"], np.array([0, 1, 0, 0]))
    assert binary.pos_weight.tolist() == [3]
    assert binary.uniform_loss == pytest.approx(3 * math.log(2))


# -- metrics, --best_metric and labels


def test_scores_with_ties_have_the_metrics_of_scikit_learn_and_nan_has_none():
    random = np.random.default_rng(0)
    scores = random.integers(-3, 4, (90, 6)).astype(np.float32)
    labels = random.integers(0, 2, (90, 6), np.uint8)
    values = class_metrics(scores, labels, cut=0.0)
    assert values["mAP"] == pytest.approx(average_precision_score(labels, scores, average="macro"))
    scores[3, 2] = np.nan
    assert class_metrics(scores, labels, 0.0) == {} == area_under_curve(scores[:, 0], np.zeros(90))


def test_any_metric_can_decide_the_best_checkpoint_in_its_own_direction():
    expected = {"loss": False, "accuracy": True, "top5": True, "macro_f1": True}
    for name, higher in expected.items():
        _, task = make_task(TrainConfig(best_metric=name), list("abcdefg"), np.arange(7))
        assert (task.metric, task.higher_is_better) == (name, higher)
        state = TrainState()
        for step, value in enumerate((0.5, 0.4, 0.6, 0.6, 0.4), 1):
            state.step = step
            state.add_evaluation({name: value}, task.metric, task.higher_is_better)
        # the earliest of equal ones
        assert (state.best, state.best_step) == ((0.6, 3) if higher else (0.4, 2))
    assert make_task(TrainConfig(), ["a", "b"], multi_hot_rows(range(3)))[0] == "multilabel"


def test_settings_that_a_task_cannot_have_are_refused(monkeypatch):
    class Own(Classification):
        evaluation = (*Classification.evaluation, "mae")

    monkeypatch.setitem(TASKS, "own", Own)
    several = multi_hot_rows(range(9))
    for settings, labels, text in (
        (
            {"best_metric": "f1"},
            np.arange(4),
            "^--best_metric f1: no such metric; use one of loss,",
        ),
        ({"task": "own", "best_metric": "mae"}, np.arange(4), "add it to lowest_is_best of Own"),
        ({"pos_weight": [1.0, 2.0, 3.0]}, several, "--pos_weight has 3 values, but the model 4"),
        ({"loss": "focal", "loss_args": {"gamma": -1.0}}, several, "gamma must be at least 0"),
    ):
        with pytest.raises(ValueError, match=text):
            make_task(TrainConfig(**settings), CLASSES, labels)
    Own.lowest_is_best = ("loss", "mae")
    _, task = make_task(TrainConfig(task="own", best_metric="mae"), CLASSES, np.arange(4))
    assert not task.higher_is_better


def test_a_loss_with_an_argument_for_each_class_is_tried_with_the_data(monkeypatch):
    def weighted(logits, targets, smoothing, weight, alpha=(1.0,)):
        return F.cross_entropy(logits, targets, torch.tensor(alpha), reduction="none")

    monkeypatch.setitem(LOSSES, "weighted", weighted)
    flags = [*words("--task classification --loss weighted --loss_args"), "{alpha: [1, 2, 4.0]}"]
    config = parse_args(TrainConfig, "train.py", flags, [LOSSES])
    _, task = make_task(config, list("abc"), np.arange(3))
    assert task.loss(torch.zeros(3, 3), torch.arange(3)).item() == pytest.approx(7 * math.log(3))
    with pytest.raises(ValueError, match="--loss_args for weighted: "):
        make_task(config, list("abcd"), np.arange(4))


def test_a_hold_out_of_sets_of_labels_is_random_and_has_its_share_of_each():
    kinds = np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 0, 1]], np.uint8)
    labels = kinds.repeat([40, 60, 20, 80], axis=0)
    split = whole_split("train", np.zeros((200, 2, 2), np.uint8), labels, "")
    rest, held = hold_out(split, 0.1, seed=3)
    assert sorted([*rest.image_index, *held.image_index]) == list(range(200))
    counts = [(held.labels == kind).all(1).sum() for kind in kinds]
    assert counts == pytest.approx([4, 6, 2, 8], abs=1)
    assert not np.array_equal(hold_out(split, 0.1, seed=4)[1].image_index, held.image_index)


@pytest.mark.parametrize(
    ("kind", "lists", "names"),
    [
        ("string", [["b", "a"], [], ["c"]], ["a", "b", "c"]),
        ("int32", [[10], [20000, 10], [5]], ["5", "10", "20000"]),
    ],
)
def test_lists_of_strings_and_of_integers_are_labels_too(kind, lists, names):
    both = {name: table(lists, List(Value(kind))) for name in ("train", "test")}
    data = load_data(TrainConfig(data=str(parquet("data", **both)), cache_dir="cache"))
    assert data.class_names == names
    expected = [[int(name in map(str, own)) for name in names] for own in lists]
    assert data.train.labels.tolist() == expected


def test_labels_that_do_not_suit_the_task_are_refused():
    one = ClassLabel(names=CLASSES)
    several = List(one)
    for lists, feature, task, error in (
        ([[]] * 30, several, "auto", "no image of split 'train' has a label"),
        ([[0, 1], [], [2, None]] * 9, several, "auto", "split 'train' has null labels"),
        ([[0], [1], [2, -1]] * 9, several, "auto", "no class -1"),
        ([[0], [1, 2]] * 15, several, "classification", "train with --task multilabel"),
        ([0, 1] * 15, one, "multilabel", "train with --task classification"),
    ):
        data = str(parquet("wrong", train=table(lists, feature)))
        with pytest.raises(ValueError, match=error):
            load_data(TrainConfig(data=data, cache_dir="cache", task=task))


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ("--task binary", "--task binary: --data digits has 10 classes"),
        ("--pos_weight 1 0 2", "--pos_weight must be above 0"),
        ("--threshold 1", "--threshold must be below 1"),
    ],
)
def test_wrong_settings_are_refused_on_one_line(flags, error):
    assert error in refused(train.main, "--model", "mlp", *words(flags))
