"""utils/data/transforms.py: torchvision's pixels, and as often as torchvision's classes."""

from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from helpers.draws import plain_uniform
from helpers.make_data import pictures, smooth
from helpers.training_runs import words
from scipy import stats
from torchvision.transforms import v2
from torchvision.transforms.v2 import InterpolationMode

from utils.config.cli import parse_args
from utils.data import erasing
from utils.data.augment import Crop, ShiftAndFlip, make_augmentation
from utils.data.batches import Mixing
from utils.data.draws import Draws
from utils.data.erasing import Cutout, RandomErasing
from utils.data.order import Microbatch, Plan
from utils.data.spec import InputSpec
from utils.data.transforms import (
    AUTO_AUGMENTS,
    ColorJitter,
    RandAugment,
    ThreeAugment,
    TrivialAugment,
)
from utils.settings.train import TrainConfig


def spec_of(height, width, channels):
    return InputSpec(height, width, channels, [0.2, 0.5, 0.7][:channels], [0.25] * channels)


def uniform(operation, count, epoch=0):
    return Draws(3, epoch, np.arange(count)).uniform(*operation.streams)


def results(operation, image, count):
    """What an operation makes of one image [H, W, C]: uint8 [count, H, W, C]."""
    pixels = torch.from_numpy(image)
    return operation.batch(pixels.repeat(count, 1, 1, 1), uniform(operation, count)).numpy()


def torchvision_results(transform, image, count):
    torch.manual_seed(0)
    planes = torch.from_numpy(image).permute(2, 0, 1).contiguous()
    return torch.stack([transform(planes) for _ in range(count)]).permute(0, 2, 3, 1).numpy()


def assert_equally_often(ours, theirs, least=16):
    """A two-sample chi-square test, which the same distribution fails once in millions of seeds."""
    counts = Counter(ours), Counter(theirs)
    pairs = np.array([[side[key] for side in counts] for key in counts[0] | counts[1]])
    is_rare = pairs.sum(1) < least
    rare = pairs[is_rare].sum(0, keepdims=True)
    pairs = np.concatenate([pairs[~is_rare], rare[rare.sum(1) >= least]])
    assert len(pairs) > 1 and len(ours) == len(theirs)
    assert stats.chi2_contingency(pairs, correction=False).pvalue > 1e-7


OPERATIONS = {
    "trivialaugment": lambda spec: TrivialAugment(spec),
    "bilinear": lambda spec: TrivialAugment(spec, interpolation="bilinear"),
    "randaugment": lambda spec: RandAugment(spec, 3),
    "3augment": ThreeAugment,
    "color jitter": lambda spec: ColorJitter(0.8),
    "random erasing": lambda spec: RandomErasing(spec, 0.7),
    "cutout": lambda spec: Cutout(spec, min(5, max(spec.size) - 1)),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_images_of_any_size_keep_their_shape_and_type(name):
    for height, width in [(1, 1), (1, 2), (40, 1), (3, 3), (13, 40)]:
        for channels in (1, 3):
            operation = OPERATIONS[name](spec_of(height, width, channels))
            images = torch.from_numpy(pictures(40, (height, width))[..., :channels].copy())
            before, random = images.clone(), uniform(operation, 40)
            pairs = zip(images.clone(), random, strict=True)
            parts = [operation.batch(pixels[None], numbers[None]) for pixels, numbers in pairs]
            single = torch.cat(parts)
            assert single.dtype == torch.uint8 and single.shape == images.shape
            assert torch.equal(images, before)
            assert not operation.batched or torch.equal(operation.batch(images, random), single)


# -- automatic augmentation
# ----------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [(17, 24), (2, 5)])
@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
def test_each_operation_has_the_pixels_of_torchvisions_class(channels, size, interpolation):
    image = torch.from_numpy(pictures(1, size)[0, ..., :channels].copy())
    planes, spec = image.permute(2, 0, 1), spec_of(*size, channels)
    mode = InterpolationMode(interpolation)
    wide, rand = v2.TrivialAugmentWide(interpolation=mode), v2.RandAugment(1, 3, interpolation=mode)
    for ours, theirs, places in (
        (TrivialAugment(spec, interpolation), wide, range(0, 31, 5)),
        (RandAugment(spec, 1, 3, interpolation), rand, [3]),
    ):
        space = theirs._AUGMENTATION_SPACE
        for number, (name, (magnitudes, signed)) in enumerate(space.items()):
            values = magnitudes(theirs.num_magnitude_bins, *size)
            for place, sign in product(places, (-1, 1)):
                value = 0.0 if values is None else float(values[place]) * (sign if signed else 1)
                wanted = theirs._apply_image_or_video_transform(
                    planes, name, value, mode, theirs._fill
                )
                random = [(number + 0.5) / len(space), (place + 0.5) / 31, 0.5 + sign / 4]
                random = random if isinstance(ours, TrivialAugment) else random[::2]
                found = ours.image(image, torch.tensor(random))
                assert torch.equal(found.permute(2, 0, 1), wanted), (name, value)


@pytest.mark.full
@pytest.mark.parametrize(
    "ours, theirs, magnitudes",
    [(TrivialAugment, v2.TrivialAugmentWide(3), 3), (RandAugment, v2.RandAugment(), 31)],
)
def test_automatic_augmentation_makes_the_same_images_as_often_as_torchvision(
    ours, theirs, magnitudes, monkeypatch
):
    monkeypatch.setattr("utils.data.transforms._MAGNITUDES", magnitudes)
    image = pictures(1, (6, 7))[0]
    made = results(ours(spec_of(6, 7, 3)), image, 2500), torchvision_results(theirs, image, 2500)
    assert_equally_often(*[[x.tobytes() for x in side] for side in made])


def test_three_augment_is_one_of_three_as_often_and_blurs_as_much_as_torchvision():
    image = pictures(1, (20, 24))[0]
    each = [v2.Grayscale(3), v2.RandomSolarize(128, p=1.0), v2.GaussianBlur(13, (0.1, 2.0))]
    grey, solarized = (torchvision_results(one, image, 1).tobytes() for one in each[:2])
    kinds, blurs = [], []
    for side in (
        results(ThreeAugment(spec_of(20, 24, 3)), image, 1500),
        torchvision_results(v2.RandomChoice(each), image, 1500),
    ):
        kinds.append([(grey, solarized, x.tobytes()).index(x.tobytes()) for x in side])
        blurs.append(side[np.array(kinds[-1]) == 2].std((1, 2, 3)))
    assert set(kinds[0]) == {0, 1, 2}
    assert_equally_often(*kinds)
    assert stats.ks_2samp(*blurs).pvalue > 1e-7


def test_color_jitter_has_the_distribution_of_torchvision():
    image = smooth(12, 14)
    ours = results(ColorJitter(0.4), image, 2500).astype(float)
    theirs = torchvision_results(v2.ColorJitter(0.4, 0.4, 0.4), image, 2500).astype(float)
    for statistic in (
        lambda x: x.mean((1, 2, 3)),  # brightness
        lambda x: x.mean(3).std((1, 2)),  # contrast
        lambda x: x.std(3).mean((1, 2)),  # saturation
        lambda x: x[:, 0, -1, 0] + x[:, -1, 0, 1] / 1000,
    ):
        assert stats.ks_2samp(statistic(ours), statistic(theirs)).pvalue > 1e-7


# -- boxes
# ----------------------------------------------------------------------


def box_of(changed):
    """Top, left, height and width of the pixels that are True [H, W]; None if there are none."""
    rows, columns = np.flatnonzero(changed.any(1)), np.flatnonzero(changed.any(0))
    if not len(rows):
        return None
    assert changed.sum() == len(rows) * len(columns)  # a whole box
    return rows[0], columns[0], len(rows), len(columns)


def test_random_erasing_has_the_boxes_of_torchvision():
    # a chi-square test does not see 1/3 instead of 0.33
    assert tuple(v2.RandomErasing().scale) == erasing._AREA
    image = np.full((9, 31, 3), 255, np.uint8)
    ours = results(RandomErasing(spec_of(9, 31, 3), 0.6), image, 3000)
    theirs = torchvision_results(v2.RandomErasing(0.6, value=0), image, 3000)
    boxes = [[box_of(x[..., 0] < 255) for x in side] for side in (ours, theirs)]
    assert_equally_often(*[[box is None for box in side] for side in boxes])
    for part in range(4):
        assert_equally_often(*[[box and int(box[part]) for box in side] for side in boxes])
    assert_equally_often(*[[box and int(box[2] * 100 + box[3]) for box in side] for side in boxes])
    colours = np.unique(ours[(ours != 255).any(3)], axis=0)
    assert colours.tolist() == [[51, 128, 178]]  # the mean colour, 0.2, 0.5 and 0.7, of 255


@pytest.mark.parametrize("side", [4, 5])
def test_cutout_is_a_square_with_a_uniform_centre_cut_off_at_the_border(side):
    height, width, count = 7, 10, 4000
    image = np.full((height, width, 1), 255, np.uint8)
    changed = results(Cutout(spec_of(height, width, 1), side), image, count)[..., 0] < 255
    chances = np.zeros((height, width))
    for row, column in np.ndindex(height, width):
        top, left = row - side // 2, column - side // 2
        box = slice(max(0, top), max(0, top + side)), slice(max(0, left), max(0, left + side))
        chances[box] += 1 / (height * width)
    deviation = np.sqrt(chances * (1 - chances) / count)
    assert (np.abs(changed.mean(0) - chances) <= 6 * deviation + 1e-9).all()
    assert len({box_of(x) for x in changed}) == height * width
    with pytest.raises(ValueError, match="can cover the whole 7x10 image; use a smaller one"):
        Cutout(spec_of(height, width, 1), width)


# -- alternating flips
# ----------------------------------------------------------------------


def flipped(epoch, occurrences=None, count=400, seed=5):
    """Which of `count` images are mirrored."""
    config = TrainConfig(seed=seed, flip="alternate")
    augmentation = make_augmentation(config, spec_of(1, 2, 1), True)
    images = torch.tensor([0, 1], dtype=torch.uint8).view(1, 1, 2, 1).expand(count, 1, 2, 1)
    microbatch = Microbatch(0, epoch, 0, np.arange(count), occurrences)
    return augmentation.apply(images, augmentation.draw(microbatch))[:, 0, 0, 0].numpy() == 1


def test_alternating_flips_mirror_each_image_in_every_other_epoch():
    first = flipped(0)
    assert 150 < first.sum() < 250  # half of them begin mirrored
    for epoch in range(1, 4):
        assert (flipped(epoch) == (first ^ (epoch % 2 == 1))).all()
    assert 100 < (flipped(0, seed=6) ^ first).sum() < 300
    times = np.arange(400) % 3
    assert (flipped(7, times) == (first ^ (times % 2 == 0))).all()


# -- where operations run, and their settings
# ----------------------------------------------------------------------


def test_each_operation_has_streams_of_its_own():
    config = TrainConfig(crop_padding=1, flip="alternate", min_scale=0.5, color_jitter=0.1)
    config = replace(config, cutout=3, random_erasing=0.5, auto_augment="randaugment")
    augmentation = make_augmentation(config, spec_of(8, 8, 3), True)
    streams = [stream for transform in augmentation.transforms for stream in transform.streams]
    assert len(augmentation.transforms) == 6 and len(streams) == len(set(streams))
    random = augmentation.draw(Microbatch(0, 4, 0, np.array([7]), np.array([2])))
    assert random[1][0, 0] == np.float32(plain_uniform(0, 4, 7, 1, 2))


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--auto_augment randaugmen", "did you mean randaugment"),
        ("--flip often", "--flip must be true, false or alternate"),
    ],
)
def test_invalid_settings_of_augmentation_are_named_in_one_line(flags, message, capsys):
    with pytest.raises(SystemExit):
        parse_args(TrainConfig, "train.py", words(flags), [AUTO_AUGMENTS])
    assert message in capsys.readouterr().err


def test_a_magnitude_that_does_not_exist_is_an_error():
    config = TrainConfig(auto_augment="randaugment", auto_augment_args={"magnitude": 31})
    with pytest.raises(ValueError, match="magnitude must be between 0 and 30"):
        make_augmentation(config, spec_of(8, 8, 3), True)


# -- the same choices in later versions
# ----------------------------------------------------------------------


CHOICES = {
    "RandomErasing": [134.5, 144.3, 151.3, 151.3],
    "Cutout": [151.6, 151.3, 134.5, 152.0],
    "TrivialAugment": [94.9, 147.6, 103.6, 151.3],
    "RandAugment": [76.7, 143.7, 152.4, 142.6],
    "ThreeAugment": [151.3, 151.1, 68.0, 151.0],
    "ColorJitter": [184.0, 180.1, 90.5, 143.3],
    "Crop": [148.0, 171.1, 118.0, 152.8],
    "ShiftAndFlip": [127.3, 146.6, 82.8, 83.3],
    "Mixing": [15, 20, 11, 23, 8, 20, 18, 30],
    "weighted": [6, 3, 11, 8, 10, 4, 10, 3, 8, 10, 7, 9],
    "repeats": [1, 7, 1, 7, 5, 0, 5, 0],
}


def choices():
    """What each operation makes of a picture for four samples, the last one drawn for the second
    time.
    """
    spec, image = spec_of(20, 30, 3), torch.from_numpy(smooth(20, 30))
    operations = [RandomErasing(spec, 0.7), Cutout(spec, 8), Crop(spec, 0.1), ColorJitter(0.5)]
    operations += [TrivialAugment(spec), RandAugment(spec), ThreeAugment(spec)]
    operations += [ShiftAndFlip(4, "alternate")]
    found = {}
    for operation in operations:
        random = Draws(1, 2, np.arange(4), np.array([0, 0, 0, 1])).uniform(*operation.streams)
        changed = operation.batch(image.repeat(4, 1, 1, 1), random).double()
        weighted = changed * torch.arange(30)[:, None] / 14.5
        found[type(operation).__name__] = weighted.mean((1, 2, 3)).tolist()
    mixing = Mixing(TrainConfig(seed=1, mixup=0.4, cutmix=1.0), spec, 5)
    mix = mixing.draw(Microbatch(0, 2, 0, np.arange(12)))
    found["Mixing"] = mix.box[:4:2].flatten().tolist()
    found["weighted"] = Plan(12, 4, 1, seed=1, weights=np.arange(12) / 11).draws(2)[0].tolist()
    found["repeats"] = Plan(8, 4, 1, seed=1, repeats=2).draws(2)[0].tolist()
    return found


def test_a_later_version_makes_the_same_random_choices():
    found = choices()
    assert found.keys() == CHOICES.keys()
    for name, expected in CHOICES.items():
        assert found[name] == pytest.approx(expected, abs=0.2), name
