"""Each augmentation has torchvision's pixels, and as often as torchvision's classes."""

import math
import re
from collections import Counter

import numpy as np
import pytest
import torch
from helpers.draws import plain_uniform
from helpers.make_data import CPU, pictures, smooth
from torchvision.transforms import v2
from torchvision.transforms.v2 import InterpolationMode

import utils.data.auto_augment as auto_augment
import utils.data.erasing as erasing
from utils.config.cli import parse_args, read_config
from utils.config.settings import TrainConfig, to_yaml
from utils.data.augment import Crop, ShiftAndFlip, crop_box, make_augmentation
from utils.data.auto_augment import AUTO_AUGMENTS, ColorJitter, RandAugment, ThreeAugment, TrivialAugment
from utils.data.batches import Batches
from utils.data.draws import ALTERNATING, Draws
from utils.data.erasing import Cutout, RandomErasing
from utils.data.mixing import Mixing
from utils.data.order import Microbatch, Plan
from utils.data.pipeline import make_dataset, make_loader
from utils.data.spec import InputSpec
from utils.data.splits import whole_split


def spec_of(height, width, channels):
    return InputSpec(height, width, channels, [0.2, 0.5, 0.7][:channels], [0.25] * channels)


def uniform(operation, count, epoch=0):
    return Draws(3, epoch, np.arange(count)).uniform(*operation.streams)


def results(operation, image, count):
    """What an operation makes of one image [H, W, C]: uint8 [count, H, W, C]."""
    pixels = torch.from_numpy(image)
    return operation.change(pixels.repeat(count, 1, 1, 1), uniform(operation, count)).numpy()


def torchvision_results(transform, image, count):
    torch.manual_seed(0)
    planes = torch.from_numpy(image).permute(2, 0, 1).contiguous()
    return torch.stack([transform(planes) for _ in range(count)]).permute(0, 2, 3, 1).numpy()


def assert_equally_often(ours, theirs, least=16):
    """A two-sample chi-square test, which the same distribution fails once in millions of seeds."""
    counts = Counter(ours), Counter(theirs)
    pairs = [(counts[0][key], counts[1][key]) for key in counts[0] | counts[1]]
    rare = [sum(side) for side in zip(*[pair for pair in pairs if sum(pair) < least], strict=True)]
    pairs = [pair for pair in pairs if sum(pair) >= least] + ([rare] if sum(rare) >= least else [])
    assert len(pairs) > 1 and len(ours) == len(theirs)
    chi_square, freedom = sum((a - b) ** 2 / (a + b) for a, b in pairs), len(pairs) - 1
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom) + 15, (chi_square, freedom)


def assert_same_distribution(ours, theirs):
    """A two-sample Kolmogorov-Smirnov test at a level of 1e-7."""
    ours, theirs = np.sort(ours), np.sort(theirs)
    values = np.concatenate([ours, theirs])
    apart = np.abs(
        np.searchsorted(ours, values, "right") / len(ours) - np.searchsorted(theirs, values, "right") / len(theirs)
    )
    assert apart.max() < 2.9 * math.sqrt(1 / len(ours) + 1 / len(theirs)), apart.max()


OPERATIONS = {
    "trivialaugment": lambda spec: TrivialAugment(spec),
    "bilinear": lambda spec: TrivialAugment(spec, interpolation="bilinear"),
    "randaugment": lambda spec: RandAugment(spec, 3),
    "3augment": ThreeAugment,
    "color jitter": lambda spec: ColorJitter(0.8),
    "random erasing": lambda spec: RandomErasing(spec, 0.7),
    "cutout": lambda spec: Cutout(spec, 5),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_images_of_any_size_keep_their_shape_and_type(name):
    sizes = [(1, 1), (1, 2), (2, 1), (1, 40), (40, 1), (2, 2), (3, 3), (5, 6), (13, 40), (40, 17), (28, 28)]
    for height, width in sizes:
        for channels in (1, 3):
            spec = spec_of(height, width, channels)
            operation = OPERATIONS[name](spec)
            images = torch.from_numpy(pictures(40, (height, width))[..., :channels].copy())
            before, random = images.clone(), uniform(operation, 40)
            pairs = zip(images.clone(), random, strict=True)
            single = torch.cat([operation.change(pixels[None], numbers[None]) for pixels, numbers in pairs])
            assert single.dtype == torch.uint8 and single.shape == images.shape
            assert torch.equal(images, before)
            if operation.batched:
                for numbers in (random, torch.from_numpy(random)):
                    assert torch.equal(operation.batch(images, operation.prepare(numbers)), single)


# -- automatic augmentation -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [(17, 24), (32, 32), (2, 5)])
@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
def test_each_operation_has_the_pixels_of_torchvisions_class(channels, size, interpolation):
    image = torch.from_numpy(pictures(1, size)[0, ..., :channels].copy())
    planes, spec, mode = image.permute(2, 0, 1), spec_of(*size, channels), InterpolationMode(interpolation)
    sides = [
        (TrivialAugment(spec, 7, interpolation), v2.TrivialAugmentWide(7, interpolation=mode), range(7)),
        (RandAugment(spec, 1, 3, 5, interpolation), v2.RandAugment(1, 3, 5, interpolation=mode), [3]),
    ]
    for ours, theirs, places in sides:
        space = theirs._AUGMENTATION_SPACE
        for number, (name, (magnitudes, signed)) in enumerate(space.items()):
            values = magnitudes(theirs.num_magnitude_bins, *size)
            for place in places:
                for sign in (-1, 1):
                    value = 0.0 if values is None else float(values[place]) * (sign if signed else 1)
                    wanted = theirs._apply_image_or_video_transform(planes, name, value, mode, theirs._fill)
                    random = [(number + 0.5) / len(space), (place + 0.5) / 7, 0.5 + sign / 4]
                    random = random if isinstance(ours, TrivialAugment) else random[::2]
                    found = ours.image(image, np.array(random, np.float32))
                    assert torch.equal(found.permute(2, 0, 1), wanted), (name, value)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (lambda spec: TrivialAugment(spec, 3), v2.TrivialAugmentWide(3)),
        (lambda spec: RandAugment(spec, 1, 3, 5), v2.RandAugment(1, 3, 5)),
        (lambda spec: RandAugment(spec), v2.RandAugment()),
    ],
    ids=["trivialaugment", "one of randaugment", "randaugment"],
)
def test_automatic_augmentation_makes_the_same_images_as_often_as_torchvision(ours, theirs):
    image = pictures(1, (6, 7))[0]
    made = [[x.tobytes() for x in results(ours(spec_of(6, 7, 3)), image, 2500)]]
    made += [[x.tobytes() for x in torchvision_results(theirs, image, 2500)]]
    assert_equally_often(*made)


def test_three_augment_is_one_of_three_as_often_and_blurs_as_much_as_torchvision():
    image = pictures(1, (20, 24))[0]
    each = [v2.Grayscale(3), v2.RandomSolarize(128, p=1.0), v2.GaussianBlur(13, (0.1, 2.0))]
    ours = results(ThreeAugment(spec_of(20, 24, 3)), image, 1500)
    theirs = torchvision_results(v2.RandomChoice(each), image, 1500)
    fixed = {torchvision_results(each[0], image, 1).tobytes(): "grey"}
    fixed[torchvision_results(each[1], image, 1).tobytes()] = "solarized"
    names = [[fixed.get(x.tobytes(), "blurred") for x in side] for side in (ours, theirs)]
    assert set(names[0]) == {"grey", "solarized", "blurred"}
    assert_equally_often(*names)
    blurred = [side[np.array(kinds) == "blurred"] for side, kinds in zip((ours, theirs), names, strict=True)]
    assert_same_distribution(*[x.std((1, 2, 3)) for x in blurred])


@pytest.mark.parametrize("strength", [0.4, pytest.param(1.5, marks=pytest.mark.full)])
def test_color_jitter_has_the_distribution_of_torchvision(strength):
    image = smooth(12, 14)
    ours = results(ColorJitter(strength), image, 2500)
    theirs = torchvision_results(v2.ColorJitter(strength, strength, strength), image, 2500)
    statistics = {
        "brightness": lambda x: x.mean((1, 2, 3)),
        "contrast": lambda x: x.mean(3).std((1, 2)),
        "saturation": lambda x: x.std(3).mean((1, 2)),
        "corner": lambda x: x[:, 0, -1, 0] + x[:, -1, 0, 1] / 1000,
    }
    for statistic in statistics.values():
        assert_same_distribution(statistic(ours.astype(float)), statistic(theirs.astype(float)))


@pytest.mark.parametrize("place", range(3))
def test_the_factors_of_color_jitter_reach_their_limits_and_no_further(place):
    """One factor at a time: the others are 1."""
    image, adjust = torch.from_numpy(pictures(1, (5, 6))[0]), ["brightness", "contrast", "saturation"][place]
    kernel = getattr(v2.functional, f"adjust_{adjust}")
    for number, factor in ((0.0, 0.7), (1 - 2**-24, 1.3), (0.25, 0.85)):
        random = np.full(4, 0.5, np.float32)
        random[1 + place] = number
        wanted = kernel(image.permute(2, 0, 1), factor).permute(1, 2, 0)
        assert (ColorJitter(0.3).image(image, random).int() - wanted.int()).abs().max() <= 1


def test_all_orders_of_color_jitter_are_equally_likely(monkeypatch):
    orders = []
    adjust = tuple(lambda x, factor, name=name: orders.append(name) or x for name in "bcs")
    monkeypatch.setattr(ColorJitter, "adjust", adjust)
    results(ColorJitter(0.5), pictures(1, (1, 1))[0], 3000)
    counts = Counter("".join(orders[n : n + 3]) for n in range(0, len(orders), 3))
    assert set(counts) == {"bcs", "bsc", "cbs", "csb", "sbc", "scb"}
    assert all(abs(count - 500) < 5.5 * math.sqrt(500 * 5 / 6) for count in counts.values())


# -- boxes ----------------------------------------------------------------------------------------------------------


def box_of(changed):
    """Top, left, height and width of the pixels that are True [H, W]; None if there are none."""
    rows, columns = np.flatnonzero(changed.any(1)), np.flatnonzero(changed.any(0))
    if not len(rows):
        return None
    assert changed.sum() == len(rows) * len(columns)  # a whole box
    return rows[0], columns[0], len(rows), len(columns)


@pytest.mark.parametrize("size", [pytest.param((20, 20), marks=pytest.mark.full), (9, 31)])
def test_random_erasing_has_the_boxes_of_torchvision(size):
    assert tuple(v2.RandomErasing().scale) == erasing._AREA  # a chi-square test does not see 1/3 instead of 0.33
    image = np.full((*size, 3), 255, np.uint8)
    ours = results(RandomErasing(spec_of(*size, 3), 0.6), image, 3000)
    theirs = torchvision_results(v2.RandomErasing(0.6, value=0), image, 3000)
    boxes = [[box_of(x[..., 0] < 255) for x in side] for side in (ours, theirs)]
    assert_equally_often(*[[box is None for box in side] for side in boxes])
    for part in range(4):
        assert_equally_often(*[[box and int(box[part]) for box in side] for side in boxes])
    assert_equally_often(*[[box and int(box[2] * 100 + box[3]) for box in side] for side in boxes])
    filled = ours[(ours != 255).any((1, 2, 3))]
    colours = np.unique(filled[(filled != 255).any(3)], axis=0)
    assert colours.tolist() == [[51, 128, 178]]  # the mean colour, 0.2, 0.5 and 0.7, of 255


def test_a_filled_box_is_zero_after_normalisation_up_to_rounding():
    spec, pixels = spec_of(8, 8, 3), pictures(4, (8, 8))
    split = whole_split("train", pixels.transpose(0, 3, 1, 2), np.arange(4), "made")
    config = TrainConfig(cutout=40)
    loader = make_loader(
        make_dataset(split, spec, config, True, iter), [Microbatch(0, 0, 0, np.arange(4))], config, 1, CPU.device
    )
    (batch,) = Batches(loader, spec, config, CPU.device, training=True)
    assert batch.images.abs().max() <= 0.5 / 255 / 0.25 + 1e-6


@pytest.mark.parametrize("side", [1, 4, 5, 30])
def test_cutout_is_a_square_with_a_uniform_centre_cut_off_at_the_border(side):
    height, width, count = 7, 10, 4000
    image = np.full((height, width, 1), 255, np.uint8)
    changed = results(Cutout(spec_of(height, width, 1), side), image, count)[..., 0] < 255
    chances = np.zeros((height, width))
    for row in range(height):
        for column in range(width):
            top, left = row - side // 2, column - side // 2
            chances[max(0, top) : max(0, top + side), max(0, left) : max(0, left + side)] += 1 / (height * width)
    deviation = np.sqrt(chances * (1 - chances) / count)
    assert (np.abs(changed.mean(0) - chances) <= 6 * deviation + 1e-9).all()
    boxes = Counter(box_of(x) for x in changed)
    assert len(boxes) == (height * width if side < 7 else 1 if side > 20 else len(boxes))
    assert all(box[2] <= side and box[3] <= side for box in boxes)


# -- alternating flips ----------------------------------------------------------------------------------------------


def flipped(epoch, occurrences=None, count=400, seed=5):
    """Which of `count` images are mirrored."""
    augmentation = make_augmentation(TrainConfig(seed=seed, flip="alternate"), spec_of(1, 2, 1), True)
    images = torch.tensor([0, 1], dtype=torch.uint8).view(1, 1, 2, 1).expand(count, 1, 2, 1)
    microbatch = Microbatch(0, epoch, 0, np.arange(count), occurrences)
    return augmentation.batch(images, augmentation.prepare(microbatch))[:, 0, 0, 0].numpy() == 1


def test_alternating_flips_mirror_each_image_in_every_other_epoch():
    first = flipped(0)
    assert 150 < first.sum() < 250  # half of them begin mirrored
    for epoch in range(1, 6):
        assert (flipped(epoch) == (first ^ (epoch % 2 == 1))).all()
    assert 100 < (flipped(0, seed=6) ^ first).sum() < 300
    times = np.arange(400) % 3
    assert (flipped(4, times) == (first ^ (times % 2 == 1))).all()
    assert (flipped(7, times) == (first ^ (times % 2 == 0))).all()


def test_alternating_numbers_are_uniform_and_the_same_for_tensors():
    indices, times = np.arange(4096), np.arange(4096) % 4
    by_array = Draws(1, 5, indices, times).uniform("a", ALTERNATING)
    by_tensor = Draws(1, 5, torch.from_numpy(indices), torch.from_numpy(times)).uniform("a", ALTERNATING)
    assert by_tensor.numpy().tolist() == by_array.tolist()
    assert (by_array[:, :1] == Draws(1, 5, indices, times).uniform("a")).all()
    counts = np.histogram(by_array[:, 1], 64, (0, 1))[0]
    assert abs(((counts - 64) ** 2 / 64).sum() - 63) < 5 * math.sqrt(2 * 63)
    later = Draws(1, 6, indices, times).uniform(ALTERNATING)[:, 0]
    assert (np.abs(later - by_array[:, 1]) == 0.5).all()


# -- where operations run, and their settings -----------------------------------------------------------------------


def test_loader_processes_change_small_images_like_one_process_does():
    spec, pixels = spec_of(12, 12, 3), pictures(40, (12, 12))
    split = whole_split("train", pixels.transpose(0, 3, 1, 2), np.arange(40), "made")
    order = np.random.default_rng(0).permutation(40)
    microbatches = type("Given", (list,), {"largest": 20})(
        [Microbatch(0, 2, 0, order[:20]), Microbatch(0, 2, 1, order[20:])]
    )
    found = {}
    for workers in (0, 2):
        config = TrainConfig(
            seed=1, auto_augment="trivialaugment", random_erasing=0.5, flip="alternate", num_workers=workers
        )
        dataset = make_dataset(split, spec, config, True, iter)
        loader = make_loader(dataset, microbatches, config, 1, CPU.device)
        assert loader.num_workers == workers
        found[workers] = torch.cat([b.images for b in Batches(loader, spec, config, CPU.device, training=True)])
        evaluated = make_dataset(split, spec, config, False, iter)
        assert evaluated.augmentation is None
    assert torch.equal(found[0], found[2])
    plain = (torch.from_numpy(pixels[order]) / 255 - torch.tensor(spec.mean)) / torch.tensor(spec.std)
    assert (found[0] - plain.permute(0, 3, 1, 2)).abs().amax((1, 2, 3)).gt(0.1).sum() > 30


def test_each_operation_has_streams_of_its_own():
    settings = {"crop_padding": 1, "flip": "alternate", "min_scale": 0.5, "color_jitter": 0.1, "cutout": 3}
    config = TrainConfig(random_erasing=0.5, auto_augment="randaugment", **settings)
    operations = make_augmentation(config, spec_of(8, 8, 3), True).operations
    streams = [stream for operation in operations.values() for stream in operation.streams]
    assert len(operations) == 6 and len(streams) == len(set(streams))
    random = make_augmentation(config, spec_of(8, 8, 3), True).draw(Microbatch(0, 4, 0, np.array([7]), np.array([2])))
    assert random["shift and flip"][0, 0] == np.float32(plain_uniform(0, 4, 7, 1, 2))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--auto_augment_args", "{num_ops: 3}"], "--auto_augment_args has no effect without --auto_augment; set"),
        (["--auto_augment", "randaugmen"], "no such auto augment; did you mean randaugment"),
        (
            ["--auto_augment", "randaugment", "--auto_augment_args", "{magnitude: 31}"],
            "magnitude must be between",
        ),
        (["--auto_augment", "trivialaugment", "--auto_augment_args", "{num_ops: 3}"], "unknown argument num_ops"),
        (["--flip", "often"], "--flip must be true, false or alternate, got often"),
        (["--random_erasing", "1.5"], "--random_erasing must be at most 1"),
        (["--color_jitter", "-1"], "--color_jitter must be at least 0"),
    ],
)
def test_invalid_settings_of_augmentation_are_named_in_one_line(flags, message, capsys):
    with pytest.raises(SystemExit):
        parse_args(TrainConfig, "train.py", flags, [AUTO_AUGMENTS])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("word", "value"), [("alternate", "alternate"), ("true", True), ("false", False)])
def test_flip_is_true_false_or_alternate_and_is_read_again_from_a_file(word, value, tmp_path):
    config = parse_args(TrainConfig, "train.py", ["--flip", word], [AUTO_AUGMENTS])
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert config.flip is value or config.flip == value == "alternate"
    assert read_config(tmp_path / "config.yaml").flip == config.flip


# -- the same choices in later versions -----------------------------------------------------------------------------


CHOICES = {
    "RandomErasing": [[6, 17, 16, 29], [2, 14, 14, 26], [20, 15, 20, 15], [2, 26, 2, 26]],
    "Cutout": [[10, 0, 18, 8], [3, 13, 11, 21], [12, 23, 20, 31], [-4, -2, 4, 6]],
    "TrivialAugment": [[("solarize", 0.1)], [("posterize", 5.0)], [("rotate", -45.0)], [("sharpness", 0.528)]],
    "RandAugment": [
        [("solarize", 0.7), ("shear_y", 0.09)],
        [("posterize", 7.0), ("contrast", -0.27)],
        [("color", 0.27), ("identity", 0.0)],
        [("shear_x", 0.09), ("autocontrast", 0.0)],
    ],
    "ThreeAugment": [[("blur", 0.2837)], [("blur", 0.9343)], [("solarize",)], [("blur", 1.2125)]],
    "ColorJitter": [
        [("saturation", 0.6895), ("brightness", 1.297), ("contrast", 1.4428)],
        [("brightness", 1.2398), ("saturation", 1.1059), ("contrast", 1.3932)],
        [("brightness", 0.598), ("saturation", 1.3578), ("contrast", 0.9585)],
        [("brightness", 0.9849), ("saturation", 1.2184), ("contrast", 0.7752)],
    ],
    "Crop": [[0, 61, 200, 201], [46, 143, 108, 133], [4, 54, 147, 172], [0, 25, 200, 259]],
    "ShiftAndFlip": [[8, 3, 0], [4, 3, 0], [6, 2, 1], [1, 5, 1]],
    "Mixing": [
        [1.0, 15, 20, 11, 23],
        [1.0, 8, 20, 18, 30],
        [1.0, 0, 8, 0, 14],
        [1.0, 3, 19, 6, 30],
        [1.0, 0, 15, 0, 25],
        [1.0, 0, 14, 4, 24],
    ],
    "weighted": [6, 3, 11, 8, 10, 4, 10, 3, 8, 10, 7, 9],
    "repeats": [1, 7, 1, 7, 5, 0, 5, 0],
}


def choices(monkeypatch):
    """What each operation chooses at random for four samples, the last one drawn for the second time."""
    spec, found = InputSpec(20, 30, 3, [0.5] * 3, [0.5] * 3), []
    draws = {}

    def of(operation, choose):
        random = Draws(1, 2, np.arange(4), np.array([0, 0, 0, 1])).uniform(*operation.streams)
        found.clear()
        draws[type(operation).__name__] = [choose(operation, row) for row in random]

    def box(operation, row):
        return [int(edge) for edge in operation.boxes(torch.from_numpy(row[None]))]

    def recorded(operation, row):
        operation.planes(torch.zeros(3, 20, 30, dtype=torch.uint8), row.tolist())
        result = found.copy()
        found.clear()
        return result

    def record(name):
        def function(x, *rest):
            found.append((name, *(round(value, 4) for value in rest if isinstance(value, float))))
            return x

        return function

    def change(policy, x, name, strength):
        return record(re.sub("([XY])$", r"_\1", name).lower())(x, strength)

    monkeypatch.setattr(auto_augment._Policy, "change", change)
    monkeypatch.setattr(auto_augment, "_solarize", lambda x, threshold: record("solarize")(x))
    monkeypatch.setattr(auto_augment.F, "rgb_to_grayscale", lambda x, channels: record("grey")(x))
    monkeypatch.setattr(auto_augment.F, "gaussian_blur", lambda x, size, sigmas: record("blur")(x, sigmas[0]))
    of(RandomErasing(spec, 0.7), box)
    of(Cutout(spec, 8), box)
    of(TrivialAugment(spec), recorded)
    of(RandAugment(spec), recorded)
    of(ThreeAugment(spec), recorded)
    monkeypatch.setattr(ColorJitter, "adjust", tuple(map(record, ("brightness", "contrast", "saturation"))))
    of(ColorJitter(0.5), recorded)
    of(Crop(spec, 0.1), lambda operation, row: list(crop_box(200, 300, row.tolist(), operation.min_scale)))
    of(ShiftAndFlip(spec, 4, "alternate"), lambda operation, row: [int(x[0]) for x in operation._choices(row[None])])
    mixing = Mixing(TrainConfig(seed=1, mixup=0.4, cutmix=1.0), spec, 5)
    mix = mixing.draw(Microbatch(0, 2, 0, np.arange(12)))
    pairs = zip(mix.weight[::2].tolist(), mix.box[::2].tolist(), strict=True)
    draws["Mixing"] = [[round(weight, 4), *box] for weight, box in pairs]
    draws["weighted"] = Plan(12, 4, 1, seed=1, weights=np.arange(12) / 11).draws(2)[0].tolist()
    draws["repeats"] = Plan(8, 4, 1, seed=1, repeats=2).draws(2)[0].tolist()
    return draws


def test_a_later_version_makes_the_same_random_choices(monkeypatch):
    assert choices(monkeypatch) == CHOICES
