"""utils/data/augment.py: single photographs and batches of small images, against plain loops."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from helpers.draws import plain_uniform
from helpers.make_data import CPU, encoded, pictures, smooth
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as F

from utils.data.augment import AUGMENTATIONS, Center, crop_box, make_augmentation
from utils.data.batches import DeviceLoader
from utils.data.datasets import ArrayDataset
from utils.data.decode import LARGE
from utils.data.decoded import make_dataset
from utils.data.draws import Draws
from utils.data.erasing import Cutout
from utils.data.order import Microbatch
from utils.data.spec import InputSpec
from utils.data.splits import whole_split
from utils.data.workers import make_loaders
from utils.settings.train import TrainConfig


def shifted_and_flipped(image, random, padding, flip):
    """One image [H, W, C] by plain indexing; `random` is vertical shift, horizontal shift, flip."""
    height, width, _ = image.shape
    padded = np.pad(image, ((padding, padding), (padding, padding), (0, 0)))
    top, left = (int(np.float32(number) * np.float32(2 * padding + 1)) for number in random[:2])
    moved = padded[top : top + height, left : left + width]
    return moved[:, ::-1] if flip and random[2] < 0.5 else moved


@pytest.mark.parametrize("size", [(480, 640), (30, 300), (1, 1)])
@pytest.mark.parametrize("min_scale", [0.08, 0.5])
def test_crop_boxes_lie_inside_the_image_with_the_area_and_shape_they_should_have(size, min_scale):
    height, width = size
    for random in Draws(0, 0, np.arange(500)).uniform(*"0123"):
        top, left, crop_height, crop_width = crop_box(height, width, random, min_scale)
        assert 0 <= top <= top + crop_height <= height and crop_height >= 1
        assert 0 <= left <= left + crop_width <= width and crop_width >= 1
        area = height * width * (min_scale + (1 - min_scale) * float(random[0]))
        assert crop_height * crop_width <= area + crop_height + crop_width  # but for rounding
        if 50 < crop_height < height and 50 < crop_width < width:
            assert crop_height * crop_width / area == pytest.approx(1, abs=0.03)
            assert 3 / 4 / 1.03 < crop_width / crop_height < 4 / 3 * 1.03


# -- single images and batches
# ----------------------------------------------------------------------

# Settings with which each entry of AUGMENTATIONS makes an operation
ENABLED = {
    "crop": [{"min_scale": 0.5}],
    "shift and flip": [
        {"flip": "alternate"},
        {"crop_padding": 2, "flip": True},
    ],
    "auto augment": [
        {"auto_augment": "randaugment"},
        {"auto_augment": "3augment"},
        {"auto_augment": "trivialaugment"},
    ],
    "color jitter": [{"color_jitter": 0.4}],
    "random erasing": [{"random_erasing": 0.5}],
    "cutout": [{"cutout": 8}],
}
ALL = {name: value for settings in ENABLED.values() for name, value in settings[-1].items()}
CASES = ENABLED | {"all": [ALL]}


def both_ends(augmentation, images, microbatch):
    """The same images changed one by one, and as a batch or by their data set."""
    random, changed = augmentation.draw(microbatch), images[microbatch.indices]
    single = changed.clone()
    for place, pixels in enumerate(changed):
        own = [numbers[[place]] for numbers in random]
        single[place] = augmentation.apply(pixels[None].clone(), own)[0]
    dataset = ArrayDataset(images.numpy(), np.arange(len(images)), augmentation)
    if not dataset.in_loader:
        return single, augmentation.apply(changed, random)
    return single, dataset.__getitems__(microbatch).images


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_a_batch_is_changed_like_its_single_images_bit_for_bit(name):
    count, pixels = 200, pictures(200, (20, 24))
    images, numbers = torch.from_numpy(pixels.copy()), np.random.default_rng(0).permutation(count)
    spec = InputSpec(20, 24, 3, [0.3] * 3, [1] * 3)
    for settings in CASES[name]:
        made = make_augmentation(TrainConfig(seed=4, **settings), spec, True)
        assert len(made.transforms) == (len(AUGMENTATIONS) if name == "all" else 1)
        single, batch = both_ends(made, images, Microbatch(0, 1, 0, numbers))
        assert torch.equal(single, batch) and single.dtype == torch.uint8
        assert (single != images[numbers]).any((1, 2, 3)).sum() > 0.1 * count
        repeated = both_ends(made, images, Microbatch(0, 1, 0, numbers, np.arange(count) % 2))[1]
        differs = (repeated != batch).any((1, 2, 3))
        assert not differs[::2].any() and differs[1::2].sum() > 0.1 * count / 2
        splits = [Microbatch(9, 1, 3, part) for part in np.split(numbers, [1, 1, 120])]
        parts = [both_ends(made, images, part)[1] for part in splits]
        assert torch.equal(torch.cat(parts), batch)
    assert (images.numpy() == pixels).all()  # no operation changes its input


class Given(list):
    """A sampler of these microbatches."""

    largest = 12


def read(dataset, spec, config, microbatches):
    """The batches on the device."""
    (loader,) = make_loaders([(dataset, Given(microbatches))], config, CPU.threads, CPU.device)
    return list(DeviceLoader(loader, spec, config, CPU.device, training=True))


def changed_by_hand(image, index, spec, is_cropped, padding, flip):
    """Crop, shift and flip with torchvision, NumPy and plain random numbers; then Cutout."""

    def draw(*counters):
        return [plain_uniform(5, 2, index, counter) for counter in counters]

    if is_cropped:
        box = crop_box(*image.shape[:2], draw(5, 6, 7, 8), 0.3)
        planes = torch.from_numpy(image.transpose(2, 0, 1)).contiguous()
        mode = InterpolationMode(spec.interpolation)
        cut = F.resized_crop(planes, *box, list(spec.size), mode, antialias=True)
        image = cut.permute(1, 2, 0).numpy()
    moved = shifted_and_flipped(image, draw(1, 2, 3), padding, flip)
    random = Draws(5, 2, np.array([index])).uniform(*Cutout.streams)
    return Cutout(spec, 8).batch(torch.from_numpy(moved.copy())[None], random)[0]


@pytest.mark.parametrize(
    "size, place, padding, flip, mode",
    [
        ((24, 30), "host", 2, True, "bilinear"),
        ((24, 30), "device", 0, True, "bilinear"),
        ((24, 30), "loader", 3, False, "bilinear"),
        ((100, 120), "loader", 2, True, "bilinear"),
        ((100, 120), "loader", 2, True, "bicubic"),
    ],
)
def test_small_images_and_photographs_have_the_same_flags_in_the_same_order(
    size, place, padding, flip, mode
):
    spec = InputSpec(*size, 3, [0.0] * 3, [1 / 255] * 3, interpolation=mode)
    crop = 0.3 if place == "loader" else 1.0
    workers = 2 * (place == "loader")
    config = TrainConfig(seed=5, num_workers=workers, min_scale=crop, cutout=8)
    config = replace(config, crop_padding=padding, flip=flip)
    pixels = pictures(30, size if spec.small else (150, 170))
    planes = pixels.transpose(0, 3, 1, 2)
    images = planes if spec.small else [encoded(image, "PNG") for image in pixels]
    split = whole_split("train", images, np.arange(30), "made")
    dataset = make_dataset(split, spec, config, True, iter)
    if place == "device":
        dataset.move(CPU.device)
    order = np.random.default_rng(0).permutation(30)
    parts = enumerate(np.split(order, [12]))
    microbatches = [Microbatch(0, 2, number, part) for number, part in parts]
    batches = read(dataset, spec, config, microbatches)
    assert torch.cat([batch.labels for batch in batches]).tolist() == order.tolist()
    found = torch.cat([batch.images for batch in batches]).permute(0, 2, 3, 1).round().byte()
    for image, index in zip(found, order.tolist(), strict=True):
        expected = changed_by_hand(pixels[index], index, spec, crop < 1, padding, flip)
        assert torch.equal(image, expected)


def test_each_flag_has_effect_at_any_size_and_only_photographs_are_cropped():
    def made(spec, training=True, **settings):
        return make_augmentation(TrainConfig(**settings), spec, training).transforms

    small = InputSpec(96, 96, 1, [0], [1])
    assert made(SPEC)[0].min_scale == 0.08 and made(small) == []
    for spec, settings in product((SPEC, small), ENABLED.values()):
        kinds = list(map(type, made(spec, **settings[0])))
        assert kinds != list(map(type, made(spec, min_scale=1.0)))
    for made_of in (made(SPEC, min_scale=1.0), made(SPEC, False, min_scale=0.5)):
        assert [type(transform) for transform in made_of] == [Center]


# -- datasets and loaders
# ----------------------------------------------------------------------

SPEC = InputSpec(112, 112, 3, [0.5] * 3, [0.25] * 3)


@pytest.mark.parametrize("side, min_scale", [(112, 0.3), (112, 1.0), (32, 1.0)])
def test_photographs_larger_than_needed_are_decoded_smaller_and_show_the_same(side, min_scale):
    file, found = encoded(smooth(960, 1280), "JPEG", quality=95), []
    spec = replace(SPEC, height=side, width=side)
    config = TrainConfig(seed=5, cache_dir="cache", min_scale=min_scale)
    for raw in (file, file + bytes(LARGE)):
        split = whole_split("train", [raw] * 12, np.arange(12), f"{len(raw)}")
        dataset = make_dataset(split, spec, config, True, iter)
        found.append(dataset.__getitems__(Microbatch(0, 3, 0, np.arange(12))).images.int())
    assert not torch.equal(*found) and (found[0] - found[1]).abs().max() <= 4


def test_an_empty_batch_passes_through_everything():
    config = TrainConfig(crop_padding=2, flip=True, num_workers=0)
    split = whole_split("train", [encoded(smooth(120, 150), "JPEG")], np.arange(1), "made")
    photographs = make_dataset(split, SPEC, config, True, iter)
    (batch,) = read(photographs, SPEC, config, [Microbatch(0, 0, 0, np.zeros(0, np.int64))])
    assert batch.images.shape == (0, 3, 112, 112) and batch.images.dtype == torch.float32
    assert batch.labels.shape == batch.indices.shape == (0,) and batch.labels.dtype == torch.int64
