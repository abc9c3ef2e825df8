"""Augmentation equals plain loops, for single photographs and for batches of small images."""

import io
import math

import numpy as np
import pytest
import torch
from helpers.draws import plain_uniform
from helpers.make_data import CPU, encoded, image_folder, pictures, smooth
from PIL import Image
from torchvision.transforms.v2 import functional as F

from utils.config.settings import TrainConfig
from utils.data.augment import AUGMENTATIONS, Augmentation, Operation, ShiftAndFlip, crop_box, make_augmentation
from utils.data.batches import Batches
from utils.data.datasets import DecodedImages, EncodedImages, ResidentImages
from utils.data.decode import LARGE, center
from utils.data.draws import Draws
from utils.data.order import Microbatch
from utils.data.pipeline import make_dataset, make_loader
from utils.data.selection import load_data
from utils.data.spec import InputSpec
from utils.data.splits import whole_split

N = 1 << 16
INDICES = np.arange(N)


def uniform(count, draws):
    return Draws(0, 0, INDICES[:count]).uniform(*map(str, range(draws)))


def shifted_and_flipped(image, random, padding, flip):
    """One image [H, W, C] by plain indexing; `random` is vertical shift, horizontal shift, flip."""
    height, width, _ = image.shape
    padded = np.pad(image, ((padding, padding), (padding, padding), (0, 0)))
    top, left = (int(np.float32(number) * np.float32(2 * padding + 1)) for number in random[:2])
    moved = padded[top : top + height, left : left + width]
    return moved[:, ::-1] if flip and random[2] < 0.5 else moved


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("padding, flip", [(0, True), (2, False), (3, True)])
def test_shift_and_flip_equals_a_loop_over_images(channels, padding, flip):
    images = pictures(40, (7, 9))[..., :channels].copy()
    operation = ShiftAndFlip(InputSpec(7, 9, channels, [0], [1]), padding, flip)
    random = uniform(40, 3)
    expected = [shifted_and_flipped(*pair, padding, flip) for pair in zip(images, random, strict=True)]
    random = random[:, (0 if padding else 2) : (3 if flip else 2)]  # as many as its streams
    found = operation.batch(torch.from_numpy(images), operation.prepare(random))
    assert (found.numpy() == np.stack(expected)).all()


def test_shifts_are_all_equally_likely_and_half_of_the_images_are_mirrored():
    images = torch.zeros(N // 4, 5, 5, 1, dtype=torch.uint8)
    images[:, 2, 2] = 255
    shift = ShiftAndFlip(InputSpec(5, 5, 1, [0], [1]), 2, False)
    moved = shift.batch(images, shift.prepare(uniform(N // 4, 2)))
    counts = (moved == 255).sum(0).flatten().double()
    assert counts.sum() == N // 4  # never out of sight
    assert ((counts / (N // 4) - 1 / 25).abs() < 5 * math.sqrt(1 / 25 / (N // 4))).all()
    images = torch.arange(2, dtype=torch.uint8)[None, None, :, None].expand(N // 4, 1, 2, 1)
    flip = ShiftAndFlip(InputSpec(1, 2, 1, [0], [1]), 0, True)
    mirrored = (flip.batch(images, flip.prepare(uniform(N // 4, 1)))[:, 0, 0, 0] == 1).double().mean()
    assert abs(mirrored - 0.5) < 5 * 0.5 / math.sqrt(N // 4)


@pytest.mark.parametrize("size", [(480, 640), (640, 480), (30, 300), (1, 1), (2, 50)])
@pytest.mark.parametrize("min_scale", [0.08, 0.5])
def test_crop_boxes_lie_inside_the_image_with_the_area_and_shape_they_should_have(size, min_scale):
    height, width = size
    for random in uniform(500, 4):
        top, left, crop_height, crop_width = crop_box(height, width, random, min_scale)
        assert 0 <= top <= top + crop_height <= height and crop_height >= 1
        assert 0 <= left <= left + crop_width <= width and crop_width >= 1
        area = height * width * (min_scale + (1 - min_scale) * float(random[0]))
        assert crop_height * crop_width <= area + crop_height + crop_width  # but for rounding
        if crop_height < height and crop_width < width and min(crop_height, crop_width) > 50:
            assert abs(crop_height * crop_width / area - 1) < 0.03
            assert 3 / 4 / 1.03 < crop_width / crop_height < 4 / 3 * 1.03


def test_crop_boxes_reach_every_side_of_the_image():
    boxes = [crop_box(100, 100, random, 0.08) for random in uniform(3000, 4)]
    assert min(box[0] for box in boxes) == min(box[1] for box in boxes) == 0
    assert max(box[0] + box[2] for box in boxes) == max(box[1] + box[3] for box in boxes) == 100
    assert 0.45 < np.mean([(box[0] + box[2] / 2) / 100 for box in boxes]) < 0.55


# -- single images and batches ---------------------------------------------------------------------------------------

# Settings with which each entry of AUGMENTATIONS makes an operation
ENABLED = {
    "crop": [{"min_scale": 0.08}, {"min_scale": 0.5}],
    "shift and flip": [
        *({"crop_padding": 3}, {"flip": True}, {"flip": "alternate"}),
        {"crop_padding": 2, "flip": True},
    ],
    "auto augment": [
        *({"auto_augment": "3augment"}, {"auto_augment": "randaugment", "auto_augment_args": {"num_ops": 3}}),
        {"auto_augment": "trivialaugment"},
    ],
    "color jitter": [{"color_jitter": 0.4}],
    "random erasing": [{"random_erasing": 0.5}],
    "cutout": [{"cutout": 3}, {"cutout": 8}],
}
ALL = {name: value for settings in ENABLED.values() for name, value in settings[-1].items()}
BATCHED = ["shift and flip", "random erasing", "cutout"]  # the others run in loader processes
ALL_BATCHED = {name: value for each in BATCHED for name, value in ENABLED[each][-1].items()}


def cases(name):
    """The settings of one entry, or of all."""
    return [ALL] if name == "all" else [ALL_BATCHED] if name == "all batched" else ENABLED[name]


def both_ends(augmentation, images, microbatch):
    """The same images changed one by one, and as a batch or by their data set."""
    random, changed = augmentation.draw(microbatch), images[microbatch.indices]
    single = changed.clone()
    for place in range(len(changed)):
        alone = {name: numbers[place : place + 1] for name, numbers in random.items()}
        single[place : place + 1] = augmentation.change(single[place : place + 1].clone(), alone)
    if augmentation.batched:
        return single, augmentation.batch(changed, augmentation.prepare(microbatch))
    dataset = DecodedImages(images.numpy(), np.arange(len(images)), augmentation)
    return single, dataset.__getitems__(microbatch).images


@pytest.mark.parametrize("channels", [1, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", [*AUGMENTATIONS, "all", "all batched"])
def test_a_batch_is_changed_like_its_single_images_bit_for_bit(name, channels):
    count = 300
    pixels = pictures(count, (20, 24))[..., :channels].copy()
    images, numbers = torch.from_numpy(pixels.copy()), np.random.default_rng(0).permutation(count)
    spec = InputSpec(20, 24, channels, [0.3] * channels, [1] * channels)
    for settings in cases(name):
        made = make_augmentation(TrainConfig(seed=4, **settings), spec, True)
        names = {"all": [*AUGMENTATIONS], "all batched": BATCHED}.get(name, [name])
        assert list(made.operations) == names and made.batched == all(each in BATCHED for each in names)
        single, batch = both_ends(made, images, Microbatch(0, 1, 0, numbers))
        assert torch.equal(single, batch) and single.dtype == torch.uint8
        assert sum(torch.equal(*pair) for pair in zip(single, images[numbers], strict=True)) < 0.9 * count
        repeated = both_ends(made, images, Microbatch(0, 1, 0, numbers, np.arange(count) % 2))[1]
        same = [torch.equal(*pair) for pair in zip(repeated, batch, strict=True)]
        assert all(same[::2]) and sum(same[1::2]) < 0.9 * count / 2
        parts = [both_ends(made, images, Microbatch(9, 1, 3, part))[1] for part in np.split(numbers, [1, 1, 200])]
        assert torch.equal(torch.cat(parts), batch)
    assert (images.numpy() == pixels).all()  # no operation changes its input


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", [*BATCHED, "all batched"])
def test_images_on_the_device_are_changed_like_those_of_the_loader_bit_for_bit(name, channels):
    spec, order = (
        InputSpec(20, 24, channels, [0.5] * channels, [0.25] * channels),
        np.random.default_rng(0).permutation(150),
    )
    parts = np.split(order, [40, 40, 75])
    microbatches = [Microbatch(update, update // 3, 0, part) for update, part in enumerate(parts)]
    microbatches += [Microbatch(4, 2, 0, order % 50, order // 50)]
    pixels = pictures(150, (20, 24))[..., :channels].copy()
    for settings in cases(name):
        config = TrainConfig(seed=4, **settings)
        decoded = DecodedImages(pixels, np.arange(150), make_augmentation(config, spec, True))
        by_loader, on_device = (
            [
                batch.images
                for batch in Batches(
                    make_loader(dataset, microbatches, config, CPU.threads, CPU.device),
                    spec,
                    config,
                    CPU.device,
                    training=True,
                )
            ]
            for dataset in (decoded, ResidentImages(decoded, CPU.device))
        )
        assert len(by_loader) == len(microbatches)
        assert all(torch.equal(*pair) for pair in zip(by_loader, on_device, strict=True))


class DarkenTop(Operation):
    """An operation that does not commute with the others."""

    streams, batched = ("darken",), True

    def image(self, pixels, random):
        return pixels // 2 if random[0] < 0.5 else torch.cat([pixels[:5] // 4, pixels[5:]])

    def prepare(self, random):
        return {"dark": torch.as_tensor(random)[:, 0] < 0.5}

    def batch(self, images, prepared):
        top = torch.cat([images[:, :5] // 4, images[:, 5:]], 1)
        return torch.where(prepared["dark"][:, None, None, None], images // 2, top)


def changed_by_hand(image, seed, epoch, index, size, is_cropped):
    """Crop, shift by up to 2 and flip, then darken, with torchvision, NumPy and plain random numbers."""

    def draw(*counters):
        return [plain_uniform(seed, epoch, index, counter) for counter in counters]

    if is_cropped:
        box = crop_box(*image.shape[:2], draw(5, 6, 7, 8), 0.3)
        cropped = F.resized_crop(torch.from_numpy(image.transpose(2, 0, 1).copy()), *box, size, antialias=True)
        image = cropped.permute(1, 2, 0).numpy()
    moved = shifted_and_flipped(image, draw(1, 2, 3), 2, True).copy()
    if Draws(seed, epoch, np.array([index])).uniform("darken") < 0.5:
        return moved // 2
    moved[:5] //= 4
    return moved


@pytest.mark.parametrize(
    ("size", "place"),
    [((24, 30), "host"), ((24, 30), "device"), ((24, 30), "loader"), ((100, 120), "loader")],
)  # small images and photographs
def test_small_images_and_photographs_are_changed_by_the_same_flags_in_the_same_order(size, place, monkeypatch):
    monkeypatch.setitem(AUGMENTATIONS, "darken", lambda config, spec: DarkenTop())
    spec, crop = InputSpec(*size, 3, [0.0] * 3, [1 / 255] * 3), 0.3 if place == "loader" else 1.0
    config = TrainConfig(seed=5, num_workers=0, crop_padding=2, flip=True, min_scale=crop)
    pixels = pictures(30, size if spec.small else (150, 170))
    images = pixels.transpose(0, 3, 1, 2) if spec.small else [encoded(image, "PNG") for image in pixels]
    dataset = make_dataset(whole_split("train", images, np.arange(30), "made"), spec, config, True, iter)
    if place == "device":
        dataset = ResidentImages(dataset, CPU.device)
    order = np.random.default_rng(0).permutation(30)
    loader = make_loader(dataset, Given([Microbatch(0, 2, 0, order)]), config, CPU.threads, CPU.device)
    (batch,) = Batches(loader, spec, config, CPU.device, training=True)
    found = batch.images.permute(0, 2, 3, 1).round().to(torch.uint8).numpy()
    for image, index in zip(found, order.tolist(), strict=True):
        assert (image == changed_by_hand(pixels[index], 5, 2, index, list(size), crop < 1)).all()


def test_each_flag_has_effect_at_any_size_and_by_default_only_photographs_are_cropped():
    split, microbatch = photographs(), Microbatch(0, 0, 0, np.arange(12))
    default, explicit = (
        photograph_set(split, **settings).__getitems__(microbatch).images for settings in ({}, {"min_scale": 0.08})
    )
    assert torch.equal(default, explicit)
    assert make_augmentation(TrainConfig(), InputSpec(96, 96, 1, [0], [1]), True).operations == {}
    for spec in (SPEC, InputSpec(96, 96, 1, [0], [1])):
        for name, settings in ENABLED.items():
            assert all(name in make_augmentation(TrainConfig(**each), spec, True).operations for each in settings)
        assert "crop" not in make_augmentation(TrainConfig(min_scale=1.0), spec, True).operations
        assert "crop" not in make_augmentation(TrainConfig(min_scale=0.5), spec, False).operations


def test_two_operations_cannot_share_a_stream():
    shared = Augmentation(0, {"one": DarkenTop(), "two": DarkenTop()})
    with pytest.raises(AssertionError, match="used twice"):
        shared.prepare(Microbatch(0, 0, 0, np.arange(3)))


# -- datasets and loaders --------------------------------------------------------------------------------------------

SPEC = InputSpec(112, 112, 3, [0.5] * 3, [0.25] * 3)


def photographs(count=12):
    files = [encoded(smooth(120 + 5 * i, 150) // (1 + i % 3), "JPEG") for i in range(count)]
    return whole_split("train", files, np.arange(count), "made")


class Given(list):
    """A sampler of these microbatches."""

    largest = 12


def photograph_set(split, seed=0, training=True, **settings):
    return make_dataset(split, SPEC, TrainConfig(seed=seed, **settings), training, iter)


def loaded(dataset, microbatches, **settings):
    loader = make_loader(dataset, Given(microbatches), TrainConfig(**settings), CPU.threads, CPU.device)
    return [batch.images for batch in loader]


def test_photographs_are_cropped_alike_in_any_batch_and_by_any_number_of_workers():
    dataset = photograph_set(photographs(), 5)
    order = np.random.default_rng(0).permutation(12)
    whole = loaded(dataset, [Microbatch(0, 1, 0, order)], num_workers=0)[0]
    in_fours = loaded(dataset, [Microbatch(0, 1, 0, order[i : i + 4]) for i in (0, 4, 8)], num_workers=2)
    alone = loaded(dataset, [Microbatch(0, 1, 0, order[i : i + 1]) for i in range(12)], num_workers=0)
    assert torch.equal(torch.cat(in_fours), whole) and torch.equal(torch.cat(alone), whole)


def test_photographs_are_cropped_otherwise_in_another_epoch_or_with_another_seed():
    order = np.arange(12)
    images = {
        (seed, epoch): photograph_set(photographs(), seed).__getitems__(Microbatch(0, epoch, 0, order)).images
        for seed, epoch in ((5, 0), (5, 1), (6, 0))
    }
    for other in ((5, 1), (6, 0)):
        assert all(not torch.equal(a, b) for a, b in zip(images[5, 0], images[other], strict=True))


def test_evaluation_takes_the_centre_of_a_photograph_whatever_epoch_and_seed():
    split = photographs()
    wanted = [center(torch.from_numpy(np.array(pixels)), 112, 112, 0.875) for pixels in decoded_by_pillow(split)]
    for seed, epoch in ((0, 0), (1, 7)):
        images = photograph_set(split, seed, training=False).__getitems__(Microbatch(0, epoch, 0, np.arange(12))).images
        assert (images.int() - torch.stack(wanted).int()).abs().max() <= 1


@pytest.mark.parametrize("min_scale", [0.08, 1.0])
def test_half_of_the_photographs_are_mirrored_left_to_right_in_training_and_none_in_evaluation(min_scale):
    split, order = photographs(40), np.random.default_rng(0).permutation(40)
    microbatch = Microbatch(0, 3, 0, order)
    plain = photograph_set(split, 5, min_scale=min_scale).__getitems__(microbatch).images
    training, evaluating = (photograph_set(split, 5, when, flip=True, min_scale=min_scale) for when in (True, False))
    is_mirrored = [plain_uniform(5, 3, int(index), 3) < 0.5 for index in order]
    assert 10 < sum(is_mirrored) < 30
    expected = [image.flip(1) if flip else image for image, flip in zip(plain, is_mirrored, strict=True)]
    assert torch.equal(training.__getitems__(microbatch).images, torch.stack(expected))
    centres = photograph_set(split, 5, training=False).__getitems__(microbatch).images
    assert torch.equal(evaluating.__getitems__(microbatch).images, centres)


@pytest.mark.parametrize("min_scale", [0.3, 1.0, None])
def test_photographs_larger_than_needed_are_decoded_smaller_and_show_the_same(min_scale):
    file = encoded(smooth(960, 1280), "JPEG", quality=95)
    small_and_large = [whole_split("train", [raw] * 12, np.arange(12), "made") for raw in (file, file + bytes(LARGE))]
    whole, reduced = (
        photograph_set(split, 5, min_scale=min_scale).__getitems__(Microbatch(0, 3, 0, np.arange(12))).images.int()
        for split in small_and_large
    )
    assert not torch.equal(whole, reduced)
    assert (whole - reduced).abs().max() <= 4


def test_large_images_of_a_small_data_set_are_decoded_smaller_and_show_the_same(tmp_path):
    file, spec, caches = encoded(smooth(480, 640), "JPEG", quality=95), InputSpec(32, 32, 3, [0.5] * 3, [0.5] * 3), []
    for name, raw in (("whole", file), ("reduced", file + bytes(LARGE))):
        config = TrainConfig(cache_dir=str(tmp_path / name))
        caches.append(make_dataset(whole_split("train", [raw], np.zeros(1), "made"), spec, config, True, iter).pixels)
    whole, reduced = (np.array(pixels).astype(int) for pixels in caches)
    assert not np.array_equal(whole, reduced)
    assert np.abs(whole - reduced).max() <= 4


def decoded_by_pillow(split):
    return [Image.open(io.BytesIO(raw)) for raw in split.images]


def test_an_unreadable_photograph_is_named_through_the_workers():
    split = photographs(4)
    split.images[2] = split.images[2][:300]
    loader = make_loader(
        photograph_set(split),
        Given([Microbatch(0, 0, 0, np.arange(4))]),
        TrainConfig(num_workers=1),
        CPU.threads,
        CPU.device,
    )
    batches = Batches(loader, SPEC, TrainConfig(), CPU.device, training=True)
    with pytest.raises(ValueError, match=r"^image 2 of split 'train': not a readable image"):
        assert len(list(batches)) == 1
        batches.check()


def test_a_batch_is_normalised_and_augmented_as_its_sample_numbers_say():
    pixels, labels = pictures(20, (10, 12)), np.arange(20) % 3
    config = TrainConfig(crop_padding=2, flip=True, seed=9)
    spec = InputSpec(10, 12, 3, [0.1, 0.2, 0.3], [0.5, 0.6, 0.7])
    order = np.array([7, 3, 19, 0])
    random = [[plain_uniform(9, 4, int(index), counter) for counter in (1, 2, 3)] for index in order]
    changed = [shifted_and_flipped(*pair, 2, True) for pair in zip(pixels[order], random, strict=True)]
    for training, raw in ((True, np.stack(changed)), (False, pixels[order])):
        dataset = DecodedImages(pixels, labels, make_augmentation(config, spec, training))
        loader = make_loader(dataset, Given([Microbatch(0, 4, 0, order)]), config, CPU.threads, CPU.device)
        (batch,) = Batches(loader, spec, config, CPU.device, training)
        images, targets, indices = batch.images, batch.labels, batch.indices
        expected = (torch.from_numpy(raw).double() / 255 - torch.tensor(spec.mean)) / torch.tensor(spec.std)
        assert images.dtype == torch.float32
        assert torch.allclose(images.double(), expected.permute(0, 3, 1, 2), atol=1e-5)
        assert targets.tolist() == labels[order].tolist() and indices.tolist() == order.tolist()


def test_an_empty_batch_passes_through_everything():
    none = np.zeros(0, np.int64)
    small = InputSpec(8, 8, 1, [0.5], [0.5])
    config = TrainConfig(crop_padding=2, flip=True, num_workers=0)
    datasets = ((DecodedImages(pictures(5, channels=1)[..., None], np.arange(5)), small), (photographs(2), SPEC))
    for dataset, spec in datasets:
        dataset = dataset if spec is small else photograph_set(dataset)
        loader = make_loader(dataset, Given([Microbatch(0, 0, 0, none)]), config, CPU.threads, CPU.device)
        (batch,) = Batches(loader, spec, config, CPU.device, training=True)
        images, labels, indices = batch.images, batch.labels, batch.indices
        assert images.shape == (0, spec.channels, spec.height, spec.width) and images.dtype == torch.float32
        assert labels.shape == indices.shape == (0,) and labels.dtype == torch.int64


def test_small_images_are_decoded_beforehand_and_photographs_are_not(tmp_path):
    image_folder("folder/train", {"a": 5, "b": 5}, size=(20, 20))
    image_folder("folder/test", {"a": 2, "b": 2}, size=(20, 20))
    config = TrainConfig(data="folder", cache_dir="cache")
    data = load_data(config)
    small = make_dataset(data.train, InputSpec(32, 32, 3, [0.5] * 3, [0.5] * 3), config, True, iter)
    large = make_dataset(data.train, InputSpec(128, 128, 3, [0.5] * 3, [0.5] * 3), config, True, iter)
    assert isinstance(small, DecodedImages) and isinstance(large, EncodedImages)
    for dataset, side in ((small, 32), (large, 128)):
        batch = dataset.__getitems__(Microbatch(0, 0, 0, np.array([9, 0])))
        assert batch.images.shape == (2, side, side, 3) and batch.labels.tolist() == [1, 0]
