"""Evaluation counts each sample once on any topology, with the numbers of plain PyTorch."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from helpers.make_data import image_folder
from helpers.ranks import returned, run_ranks
from helpers.training_runs import records, train_run, weights, words
from sklearn.metrics import precision_recall_fscore_support
from torch.nn import functional as F

import eval
import train
from utils.config.cli import parse_args
from utils.data.batches import DeviceLoader
from utils.data.datasets import Batch
from utils.data.decoded import decode_all
from utils.data.selection import load_data
from utils.runs.writing import _remove
from utils.settings.train import TrainConfig
from utils.tasks.classification import Classification
from utils.tasks.metrics import label_metrics
from utils.training import evaluation

FULL = pytest.mark.full
FLAGS = words("--model mlp --max_steps 12 --lr 0.05 --eval_every 12")


def plain_numbers(name, *flags):
    """Loss, accuracy, top-5, and predicted and true classes of a run's latest checkpoint on its
    evaluation split.
    """
    config = parse_args(TrainConfig, "train.py", [*FLAGS, *flags])
    split = load_data(config).evaluation
    pixels = torch.from_numpy(np.array(decode_all(split, 8, 8, 1, "plain", lambda items: items)))
    labels = torch.from_numpy(split.labels)
    w = weights(name)
    x = ((pixels.float() / 255 - 0.5) / 0.5).flatten(1)
    hidden = F.linear(x, w["hidden.weight"], w["hidden.bias"]).relu()
    logits = F.linear(hidden, w["output.weight"], w["output.bias"])
    order = logits.argsort(dim=1, descending=True)
    hits = order == labels[:, None]
    return {
        "loss": F.cross_entropy(logits, labels).item(),
        "accuracy": hits[:, 0].sum().item() / len(labels),
        "top5": hits[:, :5].sum().item() / len(labels),
        "count": len(labels),
    }, (order[:, 0].numpy(), labels.numpy())


# No multiple of any block; 7 leaves ranks without a sample.
@pytest.mark.parametrize("samples", [pytest.param(257, marks=FULL), 7])
def test_one_to_four_processes_give_the_numbers_of_plain_pytorch(samples):
    few = ["--max_eval_samples", str(samples)]
    flags = [*words("--eval_fraction 0.4 --eval_batch_size 16"), *few]
    train_run(2, "run", *FLAGS, *flags)
    expected, (predicted, true) = plain_numbers("run", *flags)
    trained = records("run", "eval")[-1]
    assert returned(1, eval.main, words("--ckpt runs/run --split train"))[0]["split"] == "train"
    for processes in (1, 2, 3, 4):
        arguments = [*words("--ckpt runs/run --json found.json"), *few]
        found = returned(processes, eval.main, arguments)[0]
        assert json.loads(Path("found.json").read_text()) == found
        assert all(found[key] == expected[key] for key in ("count", "accuracy", "top5"))
        assert found["loss"] == pytest.approx(expected["loss"], abs=1e-6)
        assert found["loss"] == pytest.approx(trained["loss"], abs=1e-9)
        assert found["accuracy"] == trained["accuracy"]
        for label, accuracy in enumerate(found["per_class_accuracy"]):
            hits = predicted[true == label] == label
            assert accuracy == (pytest.approx(hits.mean()) if len(hits) else None)


def _evaluate_and_count(samples: str, *flags: str) -> tuple[dict, list[tuple[int, int, int]]]:
    """The result, and for each gather the samples, rows and tensors of this rank."""
    counts = _count_gathers()
    return eval.main(["--ckpt", "runs/run", "--max_eval_samples", samples, *flags]), counts


def _count_gathers() -> list[tuple[int, int, int]]:
    """A list that gets the samples, rows and tensors of this rank in each gather from now on."""
    gather, counts = Accelerator.gather, []

    def counted(accelerator, own):
        indices = own["indices"]
        counts.append((int((indices >= 0).sum()), len(indices), len(own)))
        assert {len(tensor) for tensor in own.values()} == {len(indices)}
        return gather(accelerator, own)

    Accelerator.gather = counted
    return counts


@pytest.mark.full
@pytest.mark.parametrize("samples", [2, 49])
def test_ranks_without_samples_or_with_fewer_gather_rows_that_do_not_count(samples):
    train_run(1, "run", *FLAGS, "--max_steps", "1")
    flags = [str(samples), "--predictions", "found.csv"]
    ((alone, _),) = returned(1, _evaluate_and_count, *flags)
    expected = Path("found.csv").read_bytes()
    ranks = returned(3, _evaluate_and_count, *flags)
    own = [16 + 1, 16, 16] if samples == 49 else [samples, 0, 0]  # in blocks of at most 16
    assert [counts for _, counts in ranks] == [[(count, own[0], 5)] for count in own]
    assert Path("found.csv").read_bytes() == expected
    for result, _ in ranks:
        assert {**result, "seconds": 0} == {**alone, "seconds": 0}


@pytest.mark.parametrize("wrong", ["another sample", "too many"])
def test_a_sample_that_is_missing_or_counted_twice_is_found_on_all_ranks(wrong):
    train_run(1, "run", *FLAGS, "--max_steps", "1")
    outcomes = run_ranks(2, _evaluate_wrongly, wrong)
    assert all(outcome.code for outcome in outcomes)
    for outcome in outcomes:
        assert "did not count each of the 32 samples once" in outcome.err


def _evaluate_wrongly(wrong: str) -> None:
    """Evaluate 32 samples; rank 1, which has the second of two blocks, evaluates wrong ones."""
    indices, blocks = Batch.indices.fget, DeviceLoader.__iter__
    if os.environ["RANK"] == "1" and wrong == "too many":
        DeviceLoader.__iter__ = lambda self: (batch for batch in blocks(self) for _ in range(2))
    elif os.environ["RANK"] == "1":
        Batch.indices = property(lambda self: indices(self).clamp(max=30))
    eval.main(words("--ckpt runs/run --max_eval_samples 32"))


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "tensors"),
    [
        # Indices; with --metrics, also predictions; for the page, also classes, probabilities and
        # values.
        (["--report", "false"], [1, 1]),
        (["--report", "false", "--metrics"], [2, 2]),
        ([], [4, 4]),
        (["--ema_decay", "0.5"], [1, 4, 1, 4]),  # the page shows the average
    ],
)
def test_only_what_is_needed_is_gathered(flags, tensors):
    flags = [*FLAGS, *words("--max_steps 4 --eval_every 2"), *flags]
    counts, *_ = returned(2, _train_and_count, flags)
    assert [count for _, _, count in counts] == tensors


def _train_and_count(flags: list[str]) -> list[tuple[int, int, int]]:
    counts = _count_gathers()
    train.main(flags)
    return counts


@pytest.mark.full
def test_batch_norm_is_evaluated_with_the_statistics_that_are_saved():
    flags = words("--data synthetic/3x32x96 --model shufflenet_v2_x0_5 --stem standard")
    flags += words("--global_batch_size 12 --max_steps 2")
    log = train_run(2, "run", *flags, *words("--max_eval_samples 9 --eval_batch_size 4"))
    for processes in (1, 2):
        found = returned(processes, eval.main, words("--ckpt runs/run --max_eval_samples 9"))[0]
        assert found["loss"] == pytest.approx(log[-1]["loss"], rel=1e-6)


def test_metrics_equal_their_definitions():
    random = np.random.default_rng(0)
    true, predicted = random.integers(0, 5, (2, 300))
    true[true == 3] = 2  # class 3 never occurs
    found = label_metrics(predicted, true, classes=6)  # class 5 neither occurs nor is predicted
    # scikit-learn leaves out classes that neither occur nor are predicted
    scores = precision_recall_fscore_support(true, predicted, average="macro", zero_division=0)[:3]
    names = "macro_precision", "macro_recall", "macro_f1"
    assert [found[name] for name in names] == pytest.approx(list(scores))
    recall = [(predicted[true == c] == c).mean() for c in range(3)]
    assert found["classes_evaluated"] == 4
    assert found["per_class_accuracy"][5] is None and found["per_class_accuracy"][3] is None
    assert found["per_class_accuracy"][:3] == pytest.approx(recall)


@pytest.mark.full
def test_the_training_log_has_macro_scores_when_asked():
    log = train_run(2, "run", *FLAGS, "--metrics")
    found = returned(1, eval.main, ["--ckpt", "runs/run"])[0]
    assert log[-1]["macro_f1"] == found["macro_f1"] > 0
    assert len(log[-1]["per_class_accuracy"]) == 10


@pytest.mark.full
def test_eval_takes_the_best_checkpoint_of_a_run_or_the_one_that_is_named():
    train_run(1, "run", *FLAGS, *words("--eval_every 2 --keep 9 --save_every 2"))
    evals = {record["step"]: record["accuracy"] for record in records("run", "eval")}
    best = max(evals, key=lambda step: (evals[step], -step))
    assert returned(1, eval.main, ["--ckpt", "runs/run"])[0]["step"] == best
    named = returned(1, eval.main, ["--ckpt", "runs/run/checkpoints/step-00000004"])[0]
    assert (named["step"], named["accuracy"]) == (4, evals[4])


@pytest.mark.full
@pytest.mark.parametrize(
    ("processes", "moment"),
    [(1, "config.yaml"), (2, "model.safetensors"), pytest.param(2, "load_eval_split", marks=FULL)],
)
def test_an_evaluation_beside_a_run_that_deletes_its_checkpoint_takes_the_next_one(
    processes, moment
):
    train_run(1, "run", *FLAGS, *words("--max_steps 4 --eval_every 2 --keep 9 --save_every 2"))
    folder = Path("runs/run/checkpoints")
    (folder / "best").write_text("step-00000002\n")
    outcomes = run_ranks(processes, _evaluate_and_delete, moment)
    assert [outcome.code for outcome in outcomes] == [0] * processes, outcomes[0].err
    assert not (folder / "step-00000002").exists()
    # once all of it is read, the checkpoint is not needed any more
    expected = 2 if moment == "load_eval_split" else 4
    assert [outcome.value["step"] for outcome in outcomes] == [expected] * processes
    accuracy = {record["step"]: record["accuracy"] for record in records("run", "eval")}
    assert outcomes[0].value["accuracy"] == accuracy[expected]


def _evaluate_and_delete(moment):
    """Evaluate; at this moment `best` is moved to step 4, and step 2 is deleted."""
    folder, load_eval_split = Path("runs/run/checkpoints"), eval.load_eval_split

    def delete():
        (folder / "best").write_text("step-00000004\n")
        _remove(folder / "step-00000002")

    def before_opening(event, arguments):
        if event == "open" and str(arguments[0]).endswith(f"step-00000002/{moment}"):
            delete()

    def before_data(*arguments):
        delete()
        return load_eval_split(*arguments)

    sys.addaudithook(before_opening)
    eval.load_eval_split = before_data if moment == "load_eval_split" else load_eval_split
    return eval.main(["--ckpt", "runs/run"])


@FULL
def test_other_data_is_evaluated_whole_or_on_its_own_test_split():
    train_run(1, "run", *words("--data synthetic/3x32x90 --model mlp --max_steps 2"))
    for folder, count in (("whole", 11), ("split/train", 12), ("split/test", 7)):
        # the classes that the checkpoint knows
        image_folder(folder, dict.fromkeys("012", count), size=(32, 32))
    for flags, split, count in (
        (("--data", "whole"), "all images", 33),
        (("--data", "split"), "test", 21),
        (words("--data split --split train"), "train", 36),
    ):
        found = returned(2, eval.main, ["--ckpt", "runs/run", *flags])[0]
        assert (found["split"], found["count"]) == (split, count)


@pytest.mark.full
@pytest.mark.parametrize("processes", [pytest.param(1, marks=FULL), 2])
def test_an_evaluation_that_cannot_read_an_image_ends_when_the_ranks_next_meet(processes):
    image_folder("photos/train", {"a": 8, "b": 8}, size=(112, 112))
    paths = image_folder("photos/val", {"a": 40, "b": 40}, size=(112, 112))
    flags = words("--data photos --image_size 112 --model mlp --num_workers 0 --eval_batch_size 2")
    train_run(1, "run", *flags, "--model_args", "{hidden: 2}", "--max_steps", "1")
    # which no look at the file's ends shows; the check decodes the first 31 files with new times
    data = bytearray(paths[32].read_bytes())
    data[len(data) // 2 : len(data) // 2 + 400] = bytes(400)
    paths[32].write_bytes(data)
    for path in paths:
        os.utime(path)
    outcomes = run_ranks(processes, _evaluate_and_meet_in_each_block, ["--ckpt", "runs/run"])
    assert [outcome.code for outcome in outcomes] == [2] * processes
    assert "photos/val/a/032.png: not a readable image" in outcomes[0].err
    assert outcomes[0].err.count("\n") == 1
    assert all(int(count.read_text()) < 24 / processes for count in Path().glob("blocks-*"))
    assert len(list(Path().glob("blocks-*"))) == processes


def _evaluate_and_meet_in_each_block(flags):
    blocks, add = [], Classification.evaluate

    def counted(*arguments):
        blocks.append(1)
        Path(f"blocks-{os.getpid()}").write_text(str(len(blocks)))
        return add(*arguments)

    Classification.evaluate, evaluation.SyncInterval.due = counted, lambda self, step: True
    eval.main(flags)


@pytest.mark.full
def test_flags_of_eval_py_without_effect_are_reported():
    train_run(1, "run", *words("--data synthetic/3x8x24 --model mlp --max_steps 1 --threads 1"))
    (outcome,) = run_ranks(1, eval.main, words("--ckpt runs/run --eval_crop 0.5 --threshold 0.9"))
    assert "--eval_crop has no effect: small images are evaluated whole\n" in outcome.out
    assert "--threshold has no effect: only multilabel and binary use it\n" in outcome.out
    (outcome,) = run_ranks(1, eval.main, ["--ckpt", "runs/run"])
    assert outcome.code == 0 and "has no effect" not in outcome.out
