"""Augmentation is a function of (seed, epoch, sample), spread as it should be, and equal to plain loops."""

import hashlib
import io
import math

import numpy as np
import pytest
import torch
from helpers.make_data import CPU, encoded, image_folder, pictures, smooth
from PIL import Image

from utils.config.settings import TrainConfig
from utils.data.augment import crop_box, row_starts, shift_and_flip, uniform
from utils.data.batches import Batches
from utils.data.datasets import DecodedImages, EncodedImages
from utils.data.decode import LARGE, center
from utils.data.order import Microbatch
from utils.data.pipeline import make_dataset, make_loader
from utils.data.selection import load_data
from utils.data.spec import InputSpec
from utils.data.splits import whole_split

N = 1 << 16
INDICES = np.arange(N)


def plain_uniform(seed, epoch, index, draw):
    """SplitMix64's output function over the sample, and over the counters from there, in whole numbers of any size."""

    def scramble(x):
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    digest = hashlib.blake2b(repr((seed, "augment", epoch)).encode(), digest_size=8).digest()
    key = (int.from_bytes(digest, "little") + 2**63) % 2**64
    state = scramble(index ^ key)
    return (scramble((state + (draw + 1) * 0x9E3779B97F4A7C15) % 2**64) >> 40) / 2**24


def test_random_numbers_are_those_of_splitmix64():
    indices = [0, 1, 2, 1000, 2**31, 2**40 + 7]
    for seed, epoch in ((0, 0), (1, 0), (0, 1), (12345, 99)):
        ours = uniform(seed, epoch, np.array(indices), 5)
        assert ours.dtype == np.float32
        assert ours.tolist() == [[plain_uniform(seed, epoch, i, draw) for draw in range(5)] for i in indices]


def test_random_numbers_do_not_depend_on_the_batch_or_on_how_many_are_drawn():
    indices = np.random.default_rng(0).permutation(1000)
    whole = uniform(3, 2, indices, 8)
    assert (np.concatenate([uniform(3, 2, part, 8) for part in np.array_split(indices, 143)]) == whole).all()
    assert (uniform(3, 2, indices[::-1], 8) == whole[::-1]).all()
    assert (uniform(3, 2, indices, 3) == whole[:, :3]).all()
    assert uniform(3, 2, indices[:0], 3).shape == (0, 3)


def test_random_numbers_are_uniform():
    values = torch.from_numpy(uniform(0, 0, INDICES, 4))
    assert values.min() >= 0 and values.max() < 1
    for draw in range(4):
        counts = torch.histc(values[:, draw], 256, 0, 1)
        chi_square = ((counts - N / 256) ** 2 / (N / 256)).sum()
        assert abs(chi_square - 255) < 5 * math.sqrt(2 * 255)


def test_draws_epochs_seeds_and_neighbours_are_independent():
    one = torch.from_numpy(uniform(0, 0, INDICES, 2)).double()
    others = {
        "draw": one[:, 1],
        "epoch": uniform(0, 1, INDICES, 1)[:, 0],
        "seed": uniform(1, 0, INDICES, 1)[:, 0],
        "neighbour": np.roll(one[:, 0], 1),
        "index with one bit more": uniform(0, 0, INDICES ^ 1, 1)[:, 0],
    }
    for name, other in others.items():
        pair = torch.stack([one[:, 0], torch.as_tensor(other).double()])
        assert abs(torch.corrcoef(pair)[0, 1]) < 5 / math.sqrt(N), name
        cells = torch.histc((pair[0] * 16).floor() * 16 + (pair[1] * 16).floor(), 256, 0, 256)
        assert abs(((cells - N / 256) ** 2 / (N / 256)).sum() - 255) < 5 * math.sqrt(2 * 255), name


def augmented(images, random, padding, flip):
    return shift_and_flip(images, *row_starts(random, *images.shape[1:3], padding, flip), padding)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("padding, flip", [(0, False), (0, True), (2, False), (3, True)])
def test_shift_and_flip_equals_a_loop_over_images(channels, padding, flip):
    images = torch.from_numpy(pictures(40, (7, 9))[..., :channels].copy())
    random = uniform(0, 0, INDICES[:40], 3)
    expected = []
    for image, (down, right, mirror) in zip(images.numpy(), random.tolist(), strict=True):
        padded = np.pad(image, ((padding, padding), (padding, padding), (0, 0)))
        top, left = int(down * (2 * padding + 1)), int(right * (2 * padding + 1))
        moved = padded[top : top + 7, left : left + 9]
        expected.append(moved[:, ::-1] if flip and mirror < 0.5 else moved)
    assert (augmented(images, random, padding, flip).numpy() == np.stack(expected)).all()


def test_shifts_are_all_equally_likely_and_half_of_the_images_are_mirrored():
    images = torch.zeros(N // 4, 5, 5, 1, dtype=torch.uint8)
    images[:, 2, 2] = 255
    random = uniform(0, 0, INDICES[: N // 4], 3)
    moved = augmented(images, random, 2, False)
    counts = (moved == 255).sum(0).flatten().double()
    assert counts.sum() == N // 4  # never out of sight
    assert ((counts / (N // 4) - 1 / 25).abs() < 5 * math.sqrt(1 / 25 / (N // 4))).all()
    images = torch.arange(2, dtype=torch.uint8)[None, None, :, None].expand(N // 4, 1, 2, 1)
    mirrored = (augmented(images, random, 0, True)[:, 0, 0, 0] == 1).double().mean()
    assert abs(mirrored - 0.5) < 5 * 0.5 / math.sqrt(N // 4)


@pytest.mark.parametrize("size", [(480, 640), (640, 480), (30, 300), (1, 1), (2, 50)])
@pytest.mark.parametrize("min_scale", [0.08, 0.5])
def test_crop_boxes_lie_inside_the_image_with_the_area_and_shape_they_should_have(size, min_scale):
    height, width = size
    for random in uniform(0, 0, INDICES[:500], 4):
        top, left, crop_height, crop_width = crop_box(height, width, random, min_scale)
        assert 0 <= top <= top + crop_height <= height and crop_height >= 1
        assert 0 <= left <= left + crop_width <= width and crop_width >= 1
        area = height * width * (min_scale + (1 - min_scale) * float(random[0]))
        assert crop_height * crop_width <= area + crop_height + crop_width  # but for rounding
        if crop_height < height and crop_width < width and min(crop_height, crop_width) > 50:
            assert abs(crop_height * crop_width / area - 1) < 0.03
            assert 3 / 4 / 1.03 < crop_width / crop_height < 4 / 3 * 1.03


def test_crop_boxes_reach_every_side_of_the_image():
    boxes = [crop_box(100, 100, random, 0.08) for random in uniform(0, 0, INDICES[:3000], 4)]
    assert min(box[0] for box in boxes) == min(box[1] for box in boxes) == 0
    assert max(box[0] + box[2] for box in boxes) == max(box[1] + box[3] for box in boxes) == 100
    assert 0.45 < np.mean([(box[0] + box[2] / 2) / 100 for box in boxes]) < 0.55


# -- datasets and loaders --------------------------------------------------------------------------------------------

SPEC = InputSpec(112, 112, 3, [0.5] * 3, [0.25] * 3)


def photographs(count=12):
    files = [encoded(smooth(120 + 5 * i, 150) // (1 + i % 3), "JPEG") for i in range(count)]
    return whole_split("train", files, np.arange(count), "made")


class Given(list):
    """A sampler of these microbatches."""

    largest = 12


def loaded(dataset, microbatches, **settings):
    loader = make_loader(dataset, Given(microbatches), TrainConfig(**settings), CPU.threads, CPU.device)
    return [batch["images"] for batch in loader]


def test_photographs_are_cropped_alike_in_any_batch_and_by_any_number_of_workers():
    dataset = EncodedImages(photographs(), SPEC, seed=5, min_scale=0.08)
    order = np.random.default_rng(0).permutation(12)
    whole = loaded(dataset, [Microbatch(1, order)], num_workers=0)[0]
    in_fours = loaded(dataset, [Microbatch(1, order[i : i + 4]) for i in (0, 4, 8)], num_workers=2)
    alone = loaded(dataset, [Microbatch(1, order[i : i + 1]) for i in range(12)], num_workers=0)
    assert torch.equal(torch.cat(in_fours), whole) and torch.equal(torch.cat(alone), whole)


def test_photographs_are_cropped_otherwise_in_another_epoch_or_with_another_seed():
    order = np.arange(12)
    images = {
        (seed, epoch): EncodedImages(photographs(), SPEC, seed, 0.08).__getitems__(Microbatch(epoch, order))["images"]
        for seed, epoch in ((5, 0), (5, 1), (6, 0))
    }
    for other in ((5, 1), (6, 0)):
        assert all(not torch.equal(a, b) for a, b in zip(images[5, 0], images[other], strict=True))


def test_evaluation_takes_the_centre_of_a_photograph_whatever_epoch_and_seed():
    split = photographs()
    wanted = [center(torch.from_numpy(np.array(pixels)), 112, 112, 0.875) for pixels in decoded_by_pillow(split)]
    for seed, epoch in ((0, 0), (1, 7)):
        images = EncodedImages(split, SPEC, seed, None).__getitems__(Microbatch(epoch, np.arange(12)))["images"]
        assert (images.int() - torch.stack(wanted).int()).abs().max() <= 1


@pytest.mark.parametrize("min_scale", [0.08, 1.0])
def test_half_of_the_photographs_are_mirrored_left_to_right_in_training_and_none_in_evaluation(min_scale):
    split, order = photographs(40), np.random.default_rng(0).permutation(40)
    microbatch, config = Microbatch(3, order), TrainConfig(flip=True, seed=5, min_scale=min_scale)
    plain = EncodedImages(split, SPEC, 5, min_scale).__getitems__(microbatch)["images"]
    training, evaluating = (make_dataset(split, SPEC, config, is_training, iter) for is_training in (True, False))
    is_mirrored = [plain_uniform(5, 3, int(index), 2) < 0.5 for index in order]
    assert 10 < sum(is_mirrored) < 30
    expected = [image.flip(1) if flip else image for image, flip in zip(plain, is_mirrored, strict=True)]
    assert torch.equal(training.__getitems__(microbatch)["images"], torch.stack(expected))
    centres = EncodedImages(split, SPEC, 5, None).__getitems__(microbatch)["images"]
    assert torch.equal(evaluating.__getitems__(microbatch)["images"], centres)


@pytest.mark.parametrize("min_scale", [0.3, 1.0, None])
def test_photographs_larger_than_needed_are_decoded_smaller_and_show_the_same(min_scale):
    file = encoded(smooth(960, 1280), "JPEG", quality=95)
    small_and_large = [whole_split("train", [raw] * 12, np.arange(12), "made") for raw in (file, file + bytes(LARGE))]
    whole, reduced = (
        EncodedImages(split, SPEC, 5, min_scale).__getitems__(Microbatch(3, np.arange(12)))["images"].int()
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
        EncodedImages(split, SPEC, 0, 0.08),
        Given([Microbatch(0, np.arange(4))]),
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
    loader = make_loader(DecodedImages(pixels, labels), [Microbatch(4, order)], config, CPU.threads, CPU.device)
    for training in (True, False):
        images, targets, indices = next(iter(Batches(loader, spec, config, CPU.device, training)))
        raw = torch.from_numpy(pixels[order])
        raw = augmented(raw, uniform(9, 4, order, 3), 2, True) if training else raw
        expected = (raw.double() / 255 - torch.tensor(spec.mean)) / torch.tensor(spec.std)
        assert images.dtype == torch.float32
        assert torch.allclose(images.double(), expected.permute(0, 3, 1, 2), atol=1e-5)
        assert targets.tolist() == labels[order].tolist() and indices.tolist() == order.tolist()


def test_an_empty_batch_passes_through_everything():
    none = np.zeros(0, np.int64)
    small = InputSpec(8, 8, 1, [0.5], [0.5])
    config = TrainConfig(crop_padding=2, flip=True, num_workers=0)
    datasets = ((DecodedImages(pictures(5, channels=1)[..., None], np.arange(5)), small), (photographs(2), SPEC))
    for dataset, spec in datasets:
        dataset = dataset if spec is small else EncodedImages(dataset, spec, 0, 0.08)
        loader = make_loader(dataset, Given([Microbatch(0, none)]), config, CPU.threads, CPU.device)
        images, labels, indices = next(iter(Batches(loader, spec, config, CPU.device, training=True)))
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
        batch = dataset.__getitems__(Microbatch(0, np.array([9, 0])))
        assert batch["images"].shape == (2, side, side, 3) and batch["labels"].tolist() == [1, 0]
