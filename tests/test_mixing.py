"""Mixup and CutMix: images and targets against formulas written anew in numpy, boxes against
torchvision's.
"""

import numpy as np
import pytest
import torch
from helpers.draws import plain_uniform
from helpers.make_data import CPU, pictures
from scipy import stats
from torchvision.transforms import v2

from utils.config.defaults import advice
from utils.config.settings import TrainConfig
from utils.data.batches import DeviceLoader, Mixing
from utils.data.datasets import CachedDataset, DeviceDataset
from utils.data.order import Microbatch, Plan, UpdateSampler, fold_in
from utils.data.spec import InputSpec
from utils.data.workers import make_loaders
from utils.tasks.classification import Classification

SPEC = InputSpec(10, 12, 3, [0.1, 0.2, 0.3], [0.5, 0.6, 0.7])
BOTH = {"mixup": 0.4, "cutmix": 0.8}
LABELS = np.arange(40) % 7


def microbatch(indices, occurrences=None, epoch=2):
    indices = np.asarray(indices, np.int64)
    return Microbatch(
        0, epoch, 0, indices, None if occurrences is None else np.asarray(occurrences)
    )


class Yielded(list):
    """Microbatches, as a sampler yields them."""

    largest = 40


def read(dataset, microbatches, spec=SPEC, **settings):
    config, microbatches = TrainConfig(seed=5, num_workers=0, **settings), Yielded(microbatches)
    batches = DeviceLoader(
        make_loaders([(dataset, microbatches)], config, 1, CPU.device)[0],
        spec,
        config,
        CPU.device,
        True,
        7,
    )
    return list(batches)


@pytest.fixture
def images():
    return CachedDataset(pictures(40, (10, 12)), LABELS)


def uniforms(first: int, occurrence: int, epoch: int = 2, seed: int = 5) -> dict[str, float]:
    """The random numbers of a pair, by the definition of their streams."""
    names = ("mix", "mix_which", "mix_share", "mix_row", "mix_column")
    return {
        name: plain_uniform(seed, epoch, first, fold_in("stream", name), occurrence)
        for name in names
    }


def mixed_by_hand(pixels, labels, first, second, occurrence, mixup, cutmix, probability=1.0):
    """Both images [C, H, W] and both targets of a pair, in numpy."""
    random = uniforms(first, occurrence)
    mean, std = (np.array(values, np.float64)[:, None, None] for values in (SPEC.mean, SPEC.std))
    one, other = ((pixels[i].transpose(2, 0, 1) / 255 - mean) / std for i in (first, second))
    eye = np.eye(7)
    a, b = eye[labels[first]], eye[labels[second]]
    if random["mix"] >= probability:
        return one, other, a, b
    cuts = random["mix_which"] < 0.5 if mixup and cutmix else bool(cutmix)
    share = stats.beta(*[cutmix if cuts else mixup] * 2).ppf(random["mix_share"])
    if not cuts:
        mixed = share * one + (1 - share) * other, share * other + (1 - share) * one
    else:
        height, width = one.shape[1:]
        y, x = int(random["mix_row"] * height), int(random["mix_column"] * width)
        rows, columns = (int(size * np.sqrt(1 - share)) // 2 for size in (height, width))
        box = (
            slice(max(y - rows, 0), min(y + rows, height)),
            slice(max(x - columns, 0), min(x + columns, width)),
        )
        mixed = one.copy(), other.copy()
        mixed[0][:, *box], mixed[1][:, *box] = other[:, *box], one[:, *box]
        share = 1 - (box[0].stop - box[0].start) * (box[1].stop - box[1].start) / (height * width)
    return *mixed, share * a + (1 - share) * b, share * b + (1 - share) * a


@pytest.mark.parametrize("kind", [{"mixup": 0.4}, {"cutmix": 0.8}, BOTH, {**BOTH, "mix_prob": 0.5}])
@pytest.mark.parametrize("resident", [False, True])
def test_images_and_targets_are_those_of_the_formulas(images, kind, resident):
    order = np.random.default_rng(3).permutation(40)[:23]
    order[8:10] = order[0:2]  # drawn again
    occurrences = np.zeros(23, np.int64)
    occurrences[8:10] = 1
    dataset = DeviceDataset(images, CPU.device) if resident else images
    (batch,) = read(dataset, [microbatch(order, occurrences)], **kind)
    assert batch.labels.dtype == batch.images.dtype == torch.float32 and batch.labels.shape == (
        23,
        7,
    )
    mixed = 0
    for place in range(0, 22, 2):
        first, second = order[place : place + 2].tolist()
        settings = {"mixup": 0, "cutmix": 0, "probability": kind.get("mix_prob", 1.0)}
        settings |= {name: kind[name] for name in ("mixup", "cutmix") if name in kind}
        again = int(occurrences[place])
        expected = mixed_by_hand(images.pixels, LABELS, first, second, again, **settings)
        found = *batch.images[place : place + 2], *batch.labels[place : place + 2]
        for mine, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(mine.numpy(), theirs, atol=2e-6)
        mixed += bool((batch.labels[place] < 1).all())
    assert 11 * settings["probability"] - 5 < mixed <= 11
    alone = images.pixels[order[22]].transpose(2, 0, 1) / 255
    np.testing.assert_allclose(batch.images[22] * torch.tensor(SPEC.std)[:, None, None], alone - np.array(
        SPEC.mean)[:, None, None], atol=1e-6)  # fmt: skip
    assert batch.labels[22].tolist() == np.eye(7)[LABELS[order[22]]].tolist()


def test_any_number_of_microbatches_mixes_the_same_pairs(images):
    order, whole = np.random.default_rng(0), None
    for count in (1, 2, 3, 5):
        plan = Plan(40, 20, count, seed=1, in_pairs=True, repeats=2)
        found = sorted(
            read(images, UpdateSampler(plan, 1, 2), **BOTH), key=lambda b: (b.update, b.number)
        )
        pixels, labels = torch.cat([b.images for b in found]), torch.cat([b.labels for b in found])
        whole = whole or (pixels, labels)
        assert torch.equal(pixels, whole[0]) and torch.equal(labels, whole[1]), (count, order)


def box_of_torchvision(height, width, share, row, column, monkeypatch):
    """Its box (top, bottom, left, right) for these random numbers, and the image's own share of the
    target.
    """
    cutmix, draws = v2.CutMix(num_classes=7), iter([int(column * width), int(row * height)])
    monkeypatch.setattr(
        cutmix._dist, "sample", lambda shape: torch.tensor(share, dtype=torch.float64)
    )
    monkeypatch.setattr(torch, "randint", lambda high, size: torch.tensor([next(draws)]))
    made = cutmix.make_params([torch.zeros(2, 3, height, width)])
    left, top, right, bottom = made["box"]
    return [top, bottom, left, right], made["lam_adjusted"]


def test_boxes_are_torchvisions(monkeypatch):
    random = np.random.default_rng(0).random((300, 3))
    for height, width in ((32, 32), (28, 31), (7, 200)):
        spec = InputSpec(height, width, 3, [0.5] * 3, [0.5] * 3)
        found = Mixing(TrainConfig(cutmix=1.0), spec, 10)._boxes(
            1 - random[:, 0], random[:, 1], random[:, 2]
        )
        for box, numbers in zip(found.tolist(), random, strict=True):
            assert box == box_of_torchvision(height, width, *numbers, monkeypatch)[0]


def test_the_share_of_the_target_is_torchvisions_for_the_clipped_box(monkeypatch):
    mix = Mixing(TrainConfig(cutmix=1.0, seed=5), SPEC, 7).draw(microbatch(range(40)))
    for place in range(0, 40, 2):
        random = uniforms(place, 0)
        numbers = random["mix_share"], random["mix_row"], random["mix_column"]
        _, own = box_of_torchvision(10, 12, *numbers, monkeypatch)
        assert (
            mix.share[place].item()
            == mix.share[place + 1].item()
            == pytest.approx(1 - own, abs=1e-6)
        )


@pytest.mark.parametrize("alpha", [0.1, 0.8, 1.0, 3.0])
def test_shares_are_beta_distributed_and_half_of_the_pairs_are_cut(alpha):
    config = TrainConfig(mixup=alpha, cutmix=1.0, mix_prob=0.7, seed=1)
    mix = Mixing(config, InputSpec(1000, 1000, 1, [0.5], [0.5]), 10).draw(microbatch(range(20000)))
    mixed = mix.partner[::2] != torch.arange(0, 20000, 2)
    cut = mixed & (mix.weight[::2] == 1) & (mix.box[::2] != torch.tensor([0, 1000, 0, 1000])).any(1)
    shares = mix.share[::2][mixed & ~cut].double().numpy()
    assert mixed.float().mean() == pytest.approx(
        0.7, abs=0.02
    ) and cut.sum() / mixed.sum() == pytest.approx(0.5, abs=0.03)
    # float32 cannot tell the rest from 0 and 1
    inner = shares[(shares > 1e-6) & (shares < 1 - 1e-6)]
    low, high = stats.beta(alpha, alpha).cdf([1e-6, 1 - 1e-6])
    p = stats.kstest(inner, lambda x: (stats.beta(alpha, alpha).cdf(x) - low) / (high - low)).pvalue
    assert p > 0.01 and len(inner) / len(shares) == pytest.approx(high - low, abs=0.03)


def test_copies_of_one_sample_are_not_mixed(images):
    same = [microbatch([3, 3, 4, 5, 6, 6], [0, 1, 0, 0, 0, 1])]
    (batch,) = read(images, same, crop_padding=3, **BOTH)
    (plain,) = read(images, same, crop_padding=3)
    kept = [0, 1, 4, 5]
    assert torch.equal(batch.images[kept], plain.images[kept]) and not torch.equal(
        batch.images[2], plain.images[2]
    )
    assert (
        torch.equal(batch.labels[kept].argmax(1), plain.labels[kept])
        and (batch.labels[kept].amax(1) == 1).all()
    )


def test_from_mix_off_epoch_on_nothing_is_mixed_and_without_mixing_labels_are_classes(images):
    order = range(9)
    before, after = read(
        images, [microbatch(order, epoch=2), microbatch(order, epoch=3)], **BOTH, mix_off_epoch=3
    )
    (plain,) = read(images, [microbatch(order, epoch=3)])
    assert before.labels.ndim == 2 and not torch.equal(before.images, plain.images)
    assert after.labels.dtype == plain.labels.dtype == torch.int64
    assert torch.equal(after.images, plain.images) and torch.equal(after.labels, plain.labels)
    assert not advice(TrainConfig(**BOTH, mix_off_epoch=3), (True, True), False, False, 1)
    assert "--mix_off_epoch has no effect: neither --mixup nor --cutmix is set" in advice(
        TrainConfig(mix_off_epoch=3), (True, True), False, False, 1
    )


def test_small_batches_and_empty_ones_can_be_mixed(images):
    for count in (0, 1, 2, 3):
        (batch,) = read(images, [microbatch(range(count))], **BOTH)
        assert batch.images.shape == (count, 3, 10, 12) and batch.labels.shape == (count, 7)
        task = Classification(TrainConfig(label_smoothing=0.1), list("abcdefg"))
        task.weight = torch.ones(7)
        outputs = torch.zeros(count, 7, requires_grad=True)
        task.loss(outputs, batch.labels).backward()
        assert outputs.grad.isfinite().all() and (task.loss(outputs, batch.labels) > 0) == (
            count > 0
        )


def test_rows_of_several_labels_are_mixed_like_classes():
    mix = Mixing(TrainConfig(mixup=1.0, seed=5), SPEC, 3).draw(microbatch([0, 1, 2]))
    rows, share = torch.tensor([[1.0, 1, 0], [0, 1, 1], [0, 0, 1]]), mix.share[0].item()
    expected = [[1 - share, 1, share], [share, 1, 1 - share], [0, 0, 1]]
    assert 0 < share < 1 and mix.targets(rows, 3).tolist() == [
        pytest.approx(row) for row in expected
    ]
    one_output = mix.targets(torch.tensor([1, 0, 1]), 1)
    assert one_output.tolist() == [pytest.approx([value]) for value in (1 - share, share, 1)]


def test_training_accuracy_is_against_the_dominant_label():
    task = Classification(TrainConfig(), ["a", "b", "c"])
    targets = torch.tensor([[0.7, 0.3, 0], [0.4, 0, 0.6]])
    hits = task.training_sums(torch.tensor(0.0), torch.tensor([[2.0, 1, 0], [2, 0, 1]]), targets)[1]
    assert hits.item() == 1
