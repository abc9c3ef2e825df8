"""--data_on_device: the batches are bit for bit those of the loader, and so is the run."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.make_data import CPU, pictures
from helpers.pretended_gpu import GPU, PretendedGpu
from helpers.ranks import returned, run_ranks
from helpers.training_runs import records, same_tensors, train_run, weights, words

import eval
import utils.data.datasets as resident
from extras.first_batch import pixels_of
from utils.data.augment import make_augmentation
from utils.data.batches import DeviceLoader
from utils.data.datasets import ArrayDataset, describe_place, keep_on_device
from utils.data.decoded import make_dataset
from utils.data.order import Microbatch
from utils.data.spec import InputSpec
from utils.data.splits import whole_split
from utils.data.workers import make_loaders
from utils.settings.train import TrainConfig

SPEC = InputSpec(10, 12, 3, [0.1, 0.2, 0.3], [0.5, 0.6, 0.7])
CHANGES = {"crop_padding": 2, "flip": "alternate", "random_erasing": 0.5, "cutout": 3}
ORDER = np.random.default_rng(1).permutation(60)
# Two epochs of unequal microbatches, one without samples, and the second with repeated samples
MICROBATCHES = [Microbatch(0, 3, n, part) for n, part in enumerate(np.split(ORDER, [7, 7, 30, 57]))]
MICROBATCHES += [
    Microbatch(1, 4, number, part % 20, part // 20)
    for number, part in enumerate(np.split(ORDER[::-1], [41]))
]


def read(dataset, microbatches=MICROBATCHES, training=True, **settings):
    config = TrainConfig(seed=5, **(CHANGES | settings))
    dataset.augmentation = make_augmentation(config, SPEC, training)
    (loader,) = make_loaders([(dataset, microbatches)], config, CPU.threads, CPU.device)
    return list(DeviceLoader(loader, SPEC, config, CPU.device, training))


def assert_same(dataset, **settings):
    """The batches of a data set, which are the same if it is on the device."""
    expected = read(dataset, **settings)
    moved = replace(dataset)
    moved.move(CPU.device)
    found = read(moved, **settings)
    assert len(found) == len(expected) == len(MICROBATCHES)
    for one, other in zip(found, expected, strict=True):
        assert (one.update, one.number, one.error) == (other.update, other.number, other.error)
        for name in ("images", "labels", "indices"):
            mine, theirs = getattr(one, name), getattr(other, name)
            assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)
        assert one.images.is_contiguous(memory_format=torch.channels_last)
    return expected


@pytest.fixture
def images():
    return ArrayDataset(pictures(60, (10, 12)), np.arange(60) % 7)


def test_rows_of_several_labels_and_planes_are_drawn_on_the_device_too():
    rows = np.random.default_rng(0).integers(0, 2, (60, 4), np.uint8)
    first = np.ascontiguousarray(pictures(60, (10, 12)).transpose(0, 3, 1, 2))
    for batch in assert_same(ArrayDataset(first.transpose(0, 2, 3, 1), rows)):
        assert batch.labels.dtype == torch.float32
        assert np.array_equal(batch.labels.numpy(), rows[batch.indices.numpy()])


@pytest.mark.parametrize("most", [0, 30, 10**6], ids=["one by one", "groups", "whole epochs"])
@pytest.mark.parametrize("training", [True, False])
def test_microbatches_are_the_same_in_groups_of_any_size(training, most, images, monkeypatch):
    monkeypatch.setattr(resident, "_GROUP", most * 10 * 12 * 3)
    batches = assert_same(images, training=training)
    assert [batch.labels.tolist() for batch in batches] == [
        (each.indices % 7).tolist() for each in MICROBATCHES
    ]
    first = read(images, MICROBATCHES[:1], training=False)[0].images
    assert torch.equal(batches[0].images, first) == (not training)


def test_features_on_the_device_are_those_of_the_view_of_each_sample(images, monkeypatch):
    monkeypatch.setattr(resident, "_GROUP", 30 * 4 * 4)
    values = np.random.default_rng(0).random((3, 60, 2, 2), np.float32)
    features = ArrayDataset(values.reshape(-1, 2, 2), images.labels, origin="computed")
    features.source, features.source_rows = images, np.arange(60)[::-1]  # as with --fold
    for how, place in (("no", "cached"), ("yes", "on cpu")):
        keep_on_device([features], TrainConfig(data_on_device=how), CPU.device)
        assert describe_place([features, features]) == f"computed, 0.0 MB {place}"
        (loader,) = make_loaders([(features, MICROBATCHES)], TrainConfig(), 1, CPU.device)
        found = DeviceLoader(loader, SPEC, TrainConfig(), CPU.device, True)
        for batch, part in zip(found, MICROBATCHES, strict=True):
            again = 0 if part.occurrences is None else part.occurrences
            views = (part.epoch + again + 0 * part.indices) % 3
            assert np.array_equal(batch.images, values[views, part.indices])
            # otherwise bits would depend on the group
            assert batch.images.storage_offset() * 4 % 256 == 0
            assert np.array_equal(batch.labels, images.labels[part.indices])
        shown = pixels_of(features, MICROBATCHES[0])
        assert np.array_equal(shown, images.rows[59 - MICROBATCHES[0].indices])


def test_images_that_loader_processes_augment_stay_with_them(images):
    config = TrainConfig(data_on_device="yes", color_jitter=0.4)
    split = whole_split("train", images.rows.transpose(0, 3, 1, 2), images.labels, "made")
    sets = [make_dataset(split, SPEC, config, training, iter) for training in (True, False)]
    keep_on_device(sets, config, CPU.device)
    assert [bool(each.on_device) for each in sets] == [False, True]
    assert describe_place(sets).endswith("MB on cpu")


def kept_on_gpu(images, setting, free):
    """Whether the images go to a GPU with so many free bytes."""
    PretendedGpu().install()
    torch.cuda.mem_get_info = lambda _device: (free, 10**9)
    keep_on_device([images], TrainConfig(data_on_device=setting), GPU)
    return bool(images.on_device)


@pytest.mark.parametrize(
    ("setting", "free", "kept"),
    [
        ("auto", 4 * 21600, True),
        ("auto", 4 * 21600 - 1, False),
        ("yes", 21600, True),
        ("no", 10**9, False),
    ],
)
def test_images_go_to_a_gpu_if_they_take_a_quarter_of_its_free_memory(setting, free, kept, images):
    assert returned(1, kept_on_gpu, images, setting, free) == [kept]


def test_images_that_do_not_fit_on_the_gpu_are_refused(images):
    (outcome,) = run_ranks(1, kept_on_gpu, images, "yes", 21599)
    assert "--data_on_device yes: 0.0 MB of images or features, but " in outcome.err


def test_on_a_cpu_images_stay_where_they_are_unless_asked(images):
    cpu = CPU.device
    keep_on_device([images], TrainConfig(), cpu)
    assert images.on_device is None
    assert describe_place([images, images]) == "decoded, 0.0 MB in host memory"
    keep_on_device([images], TrainConfig(data_on_device="yes"), cpu)
    assert images.on_device[0].data_ptr() == images.rows.ctypes.data  # not copied
    assert describe_place([images, images]) == "decoded, 0.0 MB on cpu"


# 241 images in updates of 120: the third of each epoch has one image, so rank 1 has none.
FLAGS = words(
    "--model mlp --global_batch_size 120 --max_train_samples 241 --max_steps 9 --lr "
    "0.01 --threads 1 --log_every 3 --save_every 4 --eval_every 4 --flip --crop_padding "
    "1 --eval_batch_size 10 --keep 9"
)


@pytest.mark.full
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_ends_with_the_same_weights_and_metrics_and_is_resumed_either_way(processes):
    timed, logs = ("seconds", "images_per_second", "data_wait", "time"), []
    for name in ("yes", "no"):
        train_run(processes, name, *FLAGS, "--data_on_device", name)
        own = [*records(name, "train"), *records(name, "eval")]
        logs.append([{k: v for k, v in record.items() if k not in timed} for record in own])
    assert logs[0] == logs[1] and same_tensors(weights("yes"), weights("no"))
    for before, after in (("yes", "no"), ("no", "yes")):
        more = words(f"--resume runs/{before}/checkpoints/step-00000004 --data_on_device {after}")
        train_run(processes, f"{before}-{after}", *FLAGS, *more)
        assert same_tensors(weights(f"{before}-{after}"), weights("no"))
    result = returned(processes, eval.main, ["--ckpt", "runs/yes/checkpoints/step-00000009"])[0]
    assert result["accuracy"] == logs[0][-1]["accuracy"]
