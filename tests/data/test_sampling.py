"""--repeats and --sampler: counts, pairs and class weights, against formulas written anew here."""

import random
from collections import Counter
from contextlib import nullcontext
from operator import attrgetter

import numpy as np
import pytest
import torch
from helpers.make_data import image_folder
from helpers.ranks import returned
from helpers.training_runs import records, words
from torch.nn import functional as F

import train
from utils.data.order import Plan, make_plan, permutation
from utils.data.samplers import UpdateSampler
from utils.models.layers import check_batch_norm
from utils.settings.train import TrainConfig
from utils.tasks.classification import Classification, balanced_weights
from utils.tasks.table import make_task
from utils.training.defaults import Facts, without_effect

in_order = attrgetter("update", "number")


def epoch_of(plan, epoch=0):
    """The microbatches of one epoch, in the order of their numbers."""
    sampler = UpdateSampler(plan, 1, (epoch + 1) * plan.updates_per_epoch)
    return sorted((m for m in sampler if m.epoch == epoch), key=in_order)


def drawn_by(plan, epoch=0):
    found = epoch_of(plan, epoch)
    none = np.zeros(0, np.int64)
    occurrences = [none if m.occurrences is None else m.occurrences for m in found]
    return np.concatenate([m.indices for m in found]), np.concatenate(occurrences)


def count_occurrences(drawn, occurrences):
    """How often each sample is drawn, once the numbers of its draws are checked."""
    seen = Counter()
    for sample, occurrence in zip(drawn.tolist(), occurrences.tolist(), strict=True):
        assert occurrence == seen[sample]
        seen[sample] += 1
    return seen


@pytest.mark.parametrize("samples, batch, repeats", [(103, 24, 3), (7, 12, 4), (25, 6, 6)])
def test_an_update_has_every_one_of_its_samples_so_many_times(samples, batch, repeats):
    drawn, occurrences = drawn_by(Plan(samples, batch, 2, seed=4, repeats=repeats), epoch=1)
    order, expected = permutation(samples, 4, 1).tolist(), []
    for start in range(0, samples, batch):
        size = min(batch, samples - start)
        distinct, order = order[: -(-size // repeats)], order[-(-size // repeats) :]
        expected += (distinct * repeats)[:size]
    assert drawn.tolist() == expected and len(drawn) == samples
    assert max(count_occurrences(drawn, occurrences).values()) <= repeats


@pytest.mark.parametrize("repeats", [1, 2])
def test_draws_with_replacement_follow_the_weights_and_count_their_occurrences(repeats):
    given = np.array([0.0, 1, 2, 3, 0, 4] * 500)
    counts, seen = np.zeros(3000), set()
    for epoch in range(20):
        drawn, occurrences = drawn_by(Plan(3000, 100, 4, 7, repeats=repeats, weights=given), epoch)
        assert len(drawn) == 3000
        count_occurrences(drawn, occurrences)
        counts += np.bincount(drawn, minlength=3000)
        seen.add(tuple(drawn))
    assert len(seen) == 20 and not counts[given == 0].any()
    of_weight = np.array([counts[given == weight].sum() for weight in (1, 2, 3, 4)]) / 60000
    assert of_weight == pytest.approx(np.array([0.1, 0.2, 0.3, 0.4]), abs=0.01 * repeats)


def test_a_random_number_just_below_one_draws_a_sample_with_a_weight(monkeypatch):
    class Highest:
        def random_raw(self, count):
            return np.full(count, 2**64 - 1, np.uint64)

    monkeypatch.setattr(np.random, "Philox", lambda key: Highest())
    drawn, _ = Plan(5, 5, 1, 0, weights=np.array([0.1, 0.2, 0.3, 0.0, 0.0])).draws(0)
    assert drawn.tolist() == [2] * 5


def test_balanced_draws_every_class_equally_often():
    labels = np.repeat([0, 1, 2], [900, 90, 10])
    plan = make_plan(TrainConfig(sampler="balanced"), labels, 100, 4)
    counts = sum(np.bincount(labels[drawn_by(plan, epoch)[0]], minlength=3) for epoch in range(30))
    # chi-square with 2 degrees of freedom, p = 0.001
    assert ((counts - 10000) ** 2 / 10000).sum() < 13.8
    # within a class, each sample
    rare = sum(np.bincount(drawn_by(plan, epoch)[0], minlength=1000)[990:] for epoch in range(30))
    assert ((rare - 1000) ** 2 / 1000).sum() < 30


@pytest.mark.parametrize("settings", [{"repeats": 2}, {"sampler": "balanced", "repeats": 3}])
def test_every_topology_and_every_start_draws_the_same(settings):
    labels = np.arange(103) % 5
    config = TrainConfig(**settings, mixup=0.2, seed=3)
    alone = list(UpdateSampler(make_plan(config, labels, 24, 1), 1, 10))
    for processes, accum in ((2, 1), (1, 3), (3, 2), (2, 6)):
        plan = make_plan(config, labels, 24, processes * accum)
        for first in (0, 2, 4, 7):
            emitted = sorted(UpdateSampler(plan, processes, 10 - first, first), key=in_order)
            for whole in alone[first:]:
                parts = [m for m in emitted if m.update == whole.update]
                for name in ("indices", "occurrences"):
                    joined = np.concatenate([getattr(m, name) for m in parts])
                    assert joined.tolist() == getattr(whole, name).tolist()


@pytest.mark.parametrize("microbatches", range(1, 9))
def test_pairs_are_dealt_whole_and_an_odd_last_sample_goes_to_the_last_microbatch(microbatches):
    for samples in range(1, 40):
        plan = Plan(samples, 20, microbatches, seed=0, in_pairs=True)
        for position in range(0, samples, 20):
            size = min(20, samples - position)
            sizes, dealt = plan.microbatch_sizes(position), [0] * microbatches
            for pair in range(size // 2):
                dealt[pair % microbatches] += 2
            dealt[-1] += size % 2
            assert sizes == dealt
        assert drawn_by(plan)[0].tolist() == plan.draws(0)[0].tolist()
        assert UpdateSampler(plan, 1, 1).largest >= max(len(m.indices) for m in epoch_of(plan))


def test_batch_statistics_of_one_sample_are_refused_with_the_sizes_of_pairs():
    for samples in range(9, 17):
        plan = Plan(samples, 8, 4, seed=0, in_pairs=True)
        # the odd last sample, alone in the last microbatch
        assert (1 in {len(m.indices) for m in epoch_of(plan)}) == samples % 2
        line = pytest.raises(ValueError, match="more than one sample")
        with line if samples % 2 else nullcontext():
            check_batch_norm(plan, 2)


def test_settings_that_do_not_fit_are_one_line():
    labels = np.arange(50) % 5
    for settings, batch, line in (
        ({"repeats": 3}, 32, "--repeats 3 does not divide the global batch of 32"),
        ({"cutmix": 1.0}, 6, "a global batch of 6 has fewer pairs than its 4 microbatches"),
    ):
        with pytest.raises(ValueError, match=f"^{line}; "):
            make_plan(TrainConfig(**settings), labels, batch, 4)
    make_plan(TrainConfig(cutmix=1.0), labels, 8, 4)


def test_class_weights_have_the_mean_one_over_the_training_samples():
    labels = np.repeat(np.arange(3), [6, 3, 1])
    found = balanced_weights(labels, 3)
    # as compute_class_weight of scikit-learn
    assert found.tolist() == pytest.approx([10 / 18, 10 / 9, 10 / 3])
    assert found[labels].mean().item() == pytest.approx(1)
    assert balanced_weights(labels[labels != 1], 3).tolist()[1] == 1
    config = TrainConfig(class_weights="balanced")
    assert make_task(config, ["a", "b", "c"], labels)[1].weight.tolist() == found.tolist()
    assert make_task(config, ["a", "b", "c"])[1].weight is None  # in an evaluation
    with pytest.raises(ValueError, match="works only with --task classification"):
        make_task(config, ["a", "b"], np.ones((4, 2)))


def weighted(**settings):
    """A task with weighted classes, the same without weights, and the weights."""
    task, plain = (Classification(TrainConfig(**settings), ["a", "b", "c"]) for _ in range(2))
    task.weight = torch.tensor([0.5, 1.25, 3.0])
    return task, plain, task.weight


def test_the_weighted_loss_is_pytorchs_and_evaluation_stays_unweighted():
    generator = torch.Generator().manual_seed(0)
    logits, hard = torch.randn(20, 3, generator=generator), torch.arange(20) % 3
    soft = torch.rand(20, 3, generator=generator).softmax(1)
    task, plain, weight = weighted(label_smoothing=0.1)
    for targets in (hard, soft, F.one_hot(hard, 3).float()):
        losses = F.cross_entropy(logits, targets, weight, label_smoothing=0.1, reduction="none")
        assert task.loss(logits, targets).item() == pytest.approx(losses.sum().item(), rel=1e-6)
    assert torch.equal(task.evaluate(logits, hard)[0], plain.evaluate(logits, hard)[0])


def test_one_against_the_rest_weights_each_sample_by_its_class():
    logits = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
    hard = torch.tensor([0, 1, 2, 2, 1, 0])
    task, plain, weight = weighted(loss="binary_cross_entropy", label_smoothing=0.1)
    one_by_one = [weight[hard[i]] * plain.loss(logits[[i]], hard[[i]]) for i in range(6)]
    assert task.loss(logits, hard).item() == pytest.approx(sum(one_by_one).item(), rel=1e-5)


def random_balance(rng: random.Random) -> tuple[TrainConfig, np.ndarray]:
    """Settings of sampler, weights and loss, and labels of classes of random sizes."""
    binary = rng.random() < 0.5
    classes = 2 if binary else rng.randint(2, 6)
    # a class of classification may have no training image
    counts = [rng.choice([1 if binary else 0, 1, 4, 30, 400]) for _ in range(classes - 1)]
    labels = np.repeat(np.arange(classes), [*counts, rng.randint(1, 9)])
    weighing = "pos_weight" if binary else "class_weights"
    balances = {
        "sampler": rng.choice(["shuffle", "balanced"]),
        weighing: rng.choice([None, "balanced", *[3.0] * binary]),
    }
    loss = rng.choice(["cross_entropy", "binary_cross_entropy", "focal"])
    smoothing = rng.choice([0.0, 0.1])
    task = "binary" if binary else "classification"
    return TrainConfig(task=task, loss=loss, label_smoothing=smoothing, **balances), labels


def first_loss(config: TrainConfig, counts: np.ndarray) -> tuple[float, float]:
    """The mean loss of equal scores over the samples that are drawn, and their mean weight."""
    present = counts > 0
    drawn = counts / counts.sum() if config.sampler == "shuffle" else present / present.sum()
    smooth = config.label_smoothing
    if config.task == "binary":
        positive = drawn[1]
        weight = config.pos_weight or 1.0
        if weight == "balanced":
            weight = (1 - positive) / positive
        target = positive * (1 - smooth) + smooth / 2
        mean = target * weight + (1 - target)
        return mean * np.log(2) * (0.25 if config.loss == "focal" else 1.0), np.nan
    classes = len(counts)
    weights = np.ones(classes)
    if config.class_weights:
        weights[present] = 1 / drawn[present] / present.sum()
    mean = (drawn * weights).sum()
    if config.loss == "binary_cross_entropy":
        return mean * np.log(2), mean
    smoothed = (1 - smooth) * mean + smooth * weights.mean()
    factor = (1 - 1 / classes) ** 2 if config.loss == "focal" else 1.0
    return smoothed * factor * np.log(classes), mean


def test_the_first_loss_is_that_of_the_drawn_samples_however_classes_balance():
    rng = random.Random(60)
    for _ in range(300):
        config, labels = random_balance(rng)
        counts = np.bincount(labels)
        expected, mean_weight = first_loss(config, counts)
        chances = make_plan(config, labels, 8, 1).weights
        chances = np.ones(len(labels)) if chances is None else chances
        _, task = make_task(
            config, [f"class{n}" for n in range(len(counts))], labels, config.sampler == "balanced"
        )
        scores = torch.zeros(1, task.outputs)
        losses = [task.loss(scores, torch.tensor([n])).item() for n in range(len(counts))]
        found = np.average(np.array(losses)[labels], weights=chances)
        assert found == pytest.approx(expected, rel=1e-5), config
        if config.class_weights:
            weights = task.weight.numpy()[labels]
            assert np.average(weights, weights=chances) == pytest.approx(mean_weight, rel=1e-5)
            assert mean_weight == pytest.approx(1)
        # a setting without effect is named
        facts = Facts(
            processes=1, small=True, small_evaluation=True, by_loader=False, has_columns=False
        )
        said = without_effect(config, facts)
        twice = config.sampler == "balanced"
        expected_lines = [
            f"--{name} has no effect: --sampler balanced draws all classes equally often"
            for name in ("class_weights", "pos_weight")
            if twice and getattr(config, name) == "balanced"
        ]
        assert said == expected_lines, config


@pytest.mark.parametrize(
    "flags", ["--class_weights balanced", "--task binary --pos_weight balanced"]
)
def test_a_run_evens_the_classes_out_once(flags):
    image_folder("photos", {"a": 100, "b": 4}, (8, 8))
    more = f"--data photos --model mlp --sampler balanced --global_batch_size 100 {flags}"
    more += " --run_name run --max_steps 1 --log_every 1 --lr 1e-6 --report false --threads 1"
    returned(1, train.main, words(more))
    # 100 draws of two classes with a loss near log 2 each; twice balanced, it was above 5
    assert records("run", "train")[0]["loss"] == pytest.approx(np.log(2), abs=0.2)
