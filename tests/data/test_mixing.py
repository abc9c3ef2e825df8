"""--mixup and --cutmix: images and targets against formulas written anew in numpy."""

import numpy as np
import pytest
import torch
from helpers.draws import plain_uniform
from helpers.make_data import CPU, pictures
from scipy import stats

from utils.data.batches import DeviceLoader, Mixing
from utils.data.datasets import ArrayDataset
from utils.data.order import Microbatch, Plan, fold_in
from utils.data.samplers import UpdateSampler
from utils.data.spec import InputSpec
from utils.data.workers import make_loaders
from utils.settings.train import TrainConfig
from utils.tasks.classification import Classification

SPEC = InputSpec(10, 12, 3, [0.1, 0.2, 0.3], [0.5, 0.6, 0.7])
BOTH = {"mixup": 0.4, "cutmix": 0.8}
LABELS = np.arange(40) % 7


def microbatch(indices, occurrences=None, epoch=2):
    again = None if occurrences is None else np.asarray(occurrences)
    return Microbatch(0, epoch, 0, np.asarray(indices, np.int64), again)


class Yielded(list):
    """Microbatches, as a sampler yields them."""

    largest = 40


def read(dataset, microbatches, spec=SPEC, **settings):
    config = TrainConfig(seed=5, num_workers=0, **settings)
    (loader,) = make_loaders([(dataset, Yielded(microbatches))], config, 1, CPU.device)
    return list(DeviceLoader(loader, spec, config, CPU.device, True, 7))


@pytest.fixture
def images():
    return ArrayDataset(pictures(40, (10, 12)), LABELS)


def mixed_by_hand(pixels, first, second, occurrence, mixup=0, cutmix=0, mix_prob=1.0):
    """Both images [C, H, W] and both targets of a pair, in numpy."""
    # the random numbers of a pair, by the definition of their streams
    random = {
        name: plain_uniform(5, 2, first, fold_in("stream", name), occurrence)
        for name in ("mix", "mix_which", "mix_share", "mix_row", "mix_column")
    }
    mean, std = (np.array(values, np.float64)[:, None, None] for values in (SPEC.mean, SPEC.std))
    one, other = ((pixels[i].transpose(2, 0, 1) / 255 - mean) / std for i in (first, second))
    eye = np.eye(7)
    a, b = eye[LABELS[first]], eye[LABELS[second]]
    if random["mix"] >= mix_prob:
        return one, other, a, b
    cuts = random["mix_which"] < 0.5 if mixup and cutmix else bool(cutmix)
    share = stats.beta(*[cutmix if cuts else mixup] * 2).ppf(random["mix_share"])
    if not cuts:
        mixed = share * one + (1 - share) * other, share * other + (1 - share) * one
    else:
        height, width = one.shape[1:]
        y, x = int(random["mix_row"] * height), int(random["mix_column"] * width)
        rows, columns = (int(size * np.sqrt(1 - share)) // 2 for size in (height, width))
        tall = slice(max(y - rows, 0), min(y + rows, height))
        box = tall, slice(max(x - columns, 0), min(x + columns, width))
        mixed = one.copy(), other.copy()
        mixed[0][:, *box], mixed[1][:, *box] = other[:, *box], one[:, *box]
        share = 1 - (box[0].stop - box[0].start) * (box[1].stop - box[1].start) / (height * width)
    return *mixed, share * a + (1 - share) * b, share * b + (1 - share) * a


@pytest.mark.parametrize("kind", [{"mixup": 0.4}, {"cutmix": 0.8}, {**BOTH, "mix_prob": 0.5}])
@pytest.mark.parametrize("resident", [False, True])
def test_images_and_targets_are_those_of_the_formulas(images, kind, resident):
    order = np.random.default_rng(3).permutation(40)[:23]
    order[8:10] = order[0:2]  # drawn again
    occurrences = np.zeros(23, np.int64)
    occurrences[8:10] = 1
    if resident:
        images.move(CPU.device)
    (batch,) = read(images, [microbatch(order, occurrences)], **kind)
    assert batch.labels.dtype == batch.images.dtype == torch.float32
    mixed = 0
    for place in range(0, 22, 2):
        first, second = order[place : place + 2].tolist()
        again = int(occurrences[place])
        expected = mixed_by_hand(images.rows, first, second, again, **kind)
        found = *batch.images[place : place + 2], *batch.labels[place : place + 2]
        for mine, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(mine.numpy(), theirs, atol=2e-6)
        mixed += bool((batch.labels[place] < 1).all())
    assert 11 * kind.get("mix_prob", 1) - 5 < mixed <= 11
    last = int(order[22])
    alone, _, label, _ = mixed_by_hand(images.rows, last, last, 0, mix_prob=0)
    np.testing.assert_allclose(batch.images[22].numpy(), alone, atol=2e-6)
    assert batch.labels[22].tolist() == label.tolist()


def test_any_number_of_microbatches_mixes_the_same_pairs(images):
    whole = None
    for count in (1, 2, 3, 5):
        plan = Plan(40, 20, count, seed=1, in_pairs=True, repeats=2)
        found = read(images, UpdateSampler(plan, 1, 2), **BOTH)
        pixels, labels = torch.cat([b.images for b in found]), torch.cat([b.labels for b in found])
        whole = whole or (pixels, labels)
        assert torch.equal(pixels, whole[0]) and torch.equal(labels, whole[1]), count


def test_copies_of_one_sample_are_not_mixed(images):
    same = [microbatch([3, 3, 4, 5, 6, 6], [0, 1, 0, 0, 0, 1])]
    (batch,) = read(images, same, crop_padding=3, **BOTH)
    (plain,) = read(images, same, crop_padding=3)
    kept = [0, 1, 4, 5]
    assert torch.equal(batch.images[kept], plain.images[kept])
    assert not torch.equal(batch.images[2], plain.images[2])
    assert torch.equal(batch.labels[kept].argmax(1), plain.labels[kept])
    assert (batch.labels[kept].amax(1) == 1).all()


def test_from_mix_off_epoch_on_nothing_is_mixed_and_labels_are_classes(images):
    epochs = [microbatch(range(9), epoch=epoch) for epoch in (2, 3)]
    before, after = read(images, epochs, **BOTH, mix_off_epoch=3)
    (plain,) = read(images, epochs[1:])
    assert before.labels.ndim == 2 and not torch.equal(before.images, plain.images)
    assert after.labels.dtype == plain.labels.dtype == torch.int64
    assert torch.equal(after.images, plain.images) and torch.equal(after.labels, plain.labels)


def test_small_batches_and_empty_ones_can_be_mixed(images):
    for count in (0, 1, 2, 3):
        (batch,) = read(images, [microbatch(range(count))], **BOTH)
        assert batch.images.shape == (count, 3, 10, 12) and batch.labels.shape == (count, 7)
        task = Classification(TrainConfig(label_smoothing=0.1), list("abcdefg"))
        task.weight = torch.ones(7)
        outputs = torch.zeros(count, 7, requires_grad=True)
        task.loss(outputs, batch.labels).backward()
        assert outputs.grad.isfinite().all()
        assert (task.loss(outputs, batch.labels) > 0) == (count > 0)


def test_rows_of_several_labels_are_mixed_like_classes():
    mix = Mixing(TrainConfig(mixup=1.0, seed=5), SPEC, 3).draw(microbatch([0, 1, 2]))
    rows, share = torch.tensor([[1.0, 1, 0], [0, 1, 1], [0, 0, 1]]), mix.share[0].item()
    expected = [[1 - share, 1, share], [share, 1, 1 - share], [0, 0, 1]]
    assert 0 < share < 1
    assert mix.targets(rows, 3).tolist() == [pytest.approx(row) for row in expected]
    one_output = mix.targets(torch.tensor([1, 0, 1]), 1)
    assert one_output.tolist() == [pytest.approx([value]) for value in (1 - share, share, 1)]


def test_training_accuracy_is_against_the_dominant_label():
    task = Classification(TrainConfig(), ["a", "b", "c"])
    targets = torch.tensor([[0.7, 0.3, 0], [0.4, 0, 0.6]])
    hits = task.training_sums(torch.tensor(0.0), torch.tensor([[2.0, 1, 0], [2, 0, 1]]), targets)[1]
    assert hits.item() == 1
