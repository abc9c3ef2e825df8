"""--data from name to splits: every kind of source, how splits are chosen, and what is said when
something is wrong.
"""

import errno
import os
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torchvision
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, Value
from helpers.make_data import encoded, image_folder, mnist_files, parquet, pictures, table
from helpers.ranks import run_ranks
from helpers.training_runs import train_run
from PIL import Image as PillowImage
from pyarrow import parquet as pq

import eval
from utils.config.settings import TrainConfig
from utils.data.cache import decode_all
from utils.data.decode import decode, peek
from utils.data.selection import load_data, load_split, renumber
from utils.data.sources import check_source
from utils.data.splits import hold_out, random_subset, whole_split

ANIMALS = ["cat", "dog", "emu"]
NAMED = ClassLabel(names=ANIMALS)


def load(data, **settings):
    return load_data(TrainConfig(data=str(data), cache_dir="cache", **settings))


def refused(data, *parts, **settings):
    """That loading fails with one line holding all the parts."""
    with pytest.raises((ValueError, OSError)) as caught:
        load(data, **settings)
    for part in parts:
        assert part in str(caught.value)


def same_images(split, expected):
    images = np.stack([decode(split, position, 3).numpy() for position in range(len(split))])
    return (images == expected).all()


def labels_of(count, classes=3):
    return [i % classes for i in range(count)]


# -- bundled and made sets
# -------------------------------------------------------------------------------------------


def test_digits_are_the_scans_scaled_to_255_with_a_tenth_held_out():
    from sklearn.datasets import load_digits

    data, scans = load("digits"), load_digits()
    assert len(data.train) + len(data.evaluation) == 1797 and abs(len(data.evaluation) - 180) <= 1
    for split in (data.train, data.evaluation):
        pixels = decode_all(split, 8, 8, 1, "cache", None)[..., 0]
        assert np.abs(pixels - scans.images[split.image_index] * 255 / 16).max() <= 0.5
        assert (split.labels == scans.target[split.image_index]).all()
    assert data.class_names == [str(i) for i in range(10)] and peek(data.train) == (
        1,
        (8, 8),
        255,
        1.0,
    )


def test_synthetic_sets_have_the_shape_that_their_name_says_and_can_be_learned():
    data = load("synthetic/4x16x3000")
    assert (len(data.train), len(data.evaluation), data.evaluation.name) == (3000, 300, "test")
    assert data.class_names == ["0", "1", "2", "3"] and peek(data.train)[:2] == (3, (16, 16))
    assert sorted(set(data.train.labels)) == [0, 1, 2, 3]
    for position in (0, 1, 2, 3, 2999):  # each class is a brighter band
        bands = decode(data.train, position, 3).numpy().reshape(4, -1).mean(1)
        assert bands.argmax() == data.train.labels[position]
    pixels = decode_all(data.train, 16, 16, 3, "cache", None)
    assert (pixels[np.array([2999])][0] == decode(data.train, 2999, 3).numpy()).all()
    assert len(load("synthetic").train) == 10_000
    assert not (decode(data.train, 0, 3) == decode(data.evaluation, 0, 3)).all()


@pytest.mark.parametrize("name", ["synthetic/10x32", "synthetic/0x32x10"])
def test_a_misspelt_synthetic_set_is_refused_with_the_right_spelling(name):
    refused(name, "synthetic/CLASSESxSIZExCOUNT")


@pytest.mark.parametrize("name", ["nothing", "~/no", "a/b/c", "torchvision/MNISTY"])
def test_data_that_do_not_exist_are_refused_before_anything_is_opened(name):
    with pytest.raises(ValueError, match=name):
        check_source(TrainConfig(data=name))


def test_data_that_may_exist_pass_the_first_check_which_opens_nothing(tmp_path):
    for name in (
        "digits",
        "synthetic/3x3x3",
        "torchvision/MNIST",
        "someone/something",
        str(tmp_path),
    ):
        check_source(TrainConfig(data=name))
    assert not any(Path().iterdir())  # nothing was downloaded or written


def test_a_hub_name_that_cannot_be_loaded_is_one_line_that_names_it():
    refused("someone/something", "--data someone/something", "no such file or folder", "Hub")


def test_a_hub_set_is_read_like_a_local_one_and_its_flaws_are_reported_as_they_are(monkeypatch):
    asked, splits = (
        [],
        DatasetDict(train=table(labels_of(30), NAMED), test=table(labels_of(9), NAMED)),
    )
    monkeypatch.setattr(datasets, "load_dataset", lambda *names: asked.append(names) or splits)
    data = load("someone/something", data_subset="small")
    assert asked == [("someone/something", "small")]
    assert (len(data.train), data.evaluation.name, data.class_names) == (30, "test", ANIMALS)
    refused("someone/something", "--label_column kind: no such column", label_column="kind")


# -- torchvision
# -----------------------------------------------------------------------------------------------------


def test_mnist_files_are_found_in_the_data_dir_or_in_the_cache():
    train, test = pictures(40, (28, 28), 1, seed=1), pictures(20, (28, 28), 1, seed=2)
    for root, settings in (("cache/torchvision", {}), ("mine", {"data_dir": "mine"})):
        mnist_files(root, train=(train, np.arange(40) % 10), t10k=(test, np.arange(20) % 10))
        data = load("torchvision/MNIST", **settings)
        for split, images in ((data.train, train), (data.evaluation, test)):
            assert (decode_all(split, 28, 28, 1, "cache", None)[..., 0] == images).all()
            assert split.labels.tolist() == labels_of(len(images), 10)
        assert len(data.class_names) == 10 and peek(data.train)[:2] == (1, (28, 28))
        assert decode_all(data.train, 32, 32, 1, "cache", iter).shape == (40, 32, 32, 1)


def test_an_evaluation_does_not_say_that_the_classes_of_a_torchvision_set_changed():
    """They are only known when a split is open."""
    made = [(pictures(20, (28, 28), 1, seed=seed), np.arange(20) % 10) for seed in (1, 2)]
    mnist_files("cache/torchvision", train=made[0], t10k=made[1])
    of_data = ["--data", "torchvision/MNIST", "--cache_dir", "cache"]
    train_run(1, "run", *of_data, "--model", "mlp", "--global_batch_size", "10", "--max_steps", "1")
    (outcome,) = run_ranks(1, eval.main, ["--ckpt", "runs/run", "--cache_dir", "cache"])
    assert outcome.code == 0 and "classes changed" not in outcome.out, outcome.out


def test_a_missing_set_that_cannot_be_downloaded_is_one_line_with_the_fix(monkeypatch):
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    refused(
        "torchvision/MNIST",
        "torchvision/MNIST: not in nowhere",
        "download",
        "--data_dir",
        data_dir="nowhere",
    )
    refused("torchvision/mnist", "no such data set", "did you mean MNIST")
    refused(
        "torchvision/Food101",
        "no such data set; use MNIST, FashionMNIST, KMNIST, CIFAR10, CIFAR100",
        "Hub",
    )


def test_a_set_held_as_a_colour_array_is_read_whole(monkeypatch):
    class Stored(torchvision.datasets.VisionDataset):
        def __init__(self, root, train=True, download=False):
            self.data = pictures(20, (32, 32), seed=int(train))
            self.targets, self.classes = labels_of(20, 10), list("abcdefghij")

        def __len__(self):
            return 20

    monkeypatch.setattr(torchvision.datasets, "CIFAR10", Stored)
    data = load("torchvision/CIFAR10")
    for split, seed in ((data.train, 1), (data.evaluation, 0)):
        images = pictures(20, (32, 32), seed=seed)
        assert (
            same_images(split, images)
            and (decode_all(split, 32, 32, 3, "cache", None) == images).all()
        )
    assert data.class_names == list("abcdefghij") and data.train.labels.tolist() == labels_of(
        20, 10
    )


def test_a_folder_with_the_name_of_a_bundled_set_is_said_not_to_be_used():
    image_folder("digits", {"cat": 20, "dog": 20})
    assert load("digits").train.notes == (
        "--data digits is a bundled data set; for the folder of this name, use --data ./digits",
    )
    assert load("./digits").class_names == ["cat", "dog"]


def test_labels_of_an_own_source_that_are_not_integers_are_refused():
    images = np.zeros((3, 2, 2), np.uint8)
    with pytest.raises(
        ValueError, match="split 'train' has labels that are not integers; give class numbers"
    ):
        whole_split("train", images, np.array([0.37, 1.9, 2.5]), "made")
    with pytest.raises(ValueError, match="not integers"):
        whole_split("train", images, np.array([[0, 0.5], [1, 0], [0, 1]]), "made")
    assert whole_split("train", images, [0.0, 1.0, 2.0], "made").labels.dtype == np.int64


# -- image folders
# ---------------------------------------------------------------------------------------------------


def test_an_image_folder_without_splits_is_held_out_from():
    paths = image_folder("folder", {"cat": 20, "dog": 30}, kind="png")
    data = load("folder")
    assert (len(data.train), len(data.evaluation), data.evaluation.name) == (
        45,
        5,
        "hold-out of train",
    )
    assert data.class_names == ["cat", "dog"]
    for split in (data.train, data.evaluation):
        assert same_images(
            split, [np.asarray(PillowImage.open(paths[row])) for row in split.image_index]
        )
        assert [Path(split.describe(i)).parent.name for i in range(len(split))] == [
            data.class_names[label] for label in split.labels
        ]


def test_an_image_folder_with_two_splits_uses_both():
    image_folder("folder/train", {"cat": 6, "dog": 4}, kind="jpg")
    image_folder("folder/val", {"dog": 3}, kind="jpg")
    data = load("folder")
    assert (len(data.train), data.evaluation.name, data.evaluation.labels.tolist()) == (
        10,
        "val",
        [1, 1, 1],
    )


def test_only_images_count_at_any_depth_and_in_any_case():
    image_folder("folder/cat/2020/may", {"day": 12}, kind="JPEG")
    image_folder("folder", {"dog": 12}, kind="PNG")
    Path("folder/cat/notes.txt").write_text("no image")
    data = load("folder")
    assert data.class_names == ["cat", "dog"] and len(data.train) + len(data.evaluation) == 24


def test_a_folder_that_holds_no_data_set_is_refused_with_what_it_should_hold():
    Path("folder/train/cat").mkdir(parents=True)
    refused("folder", "folder/train: no images in it", "CLASS/IMAGE.jpg")
    image_folder("folder/train", {"cat": 9})
    image_folder("folder/test", {"emu": 2})
    refused("folder", "folder/test/emu", "no class 'emu', only cat (split 'test': emu)")
    parquet("clone/data", train=table(labels_of(9), NAMED))
    refused("clone", "clone: no images in it", "give clone/data")
    Path("file.txt").touch()
    refused(
        "file.txt", "file.txt: is neither a folder nor a table", "a .csv file that lists images"
    )


# -- tables
# ----------------------------------------------------------------------------------------------------------


def tables(train=30, test=9):
    images = {"train": pictures(train, seed=1), "test": pictures(test, seed=2)}
    return images, {name: table(labels_of(len(i)), NAMED, list(i)) for name, i in images.items()}


@pytest.mark.parametrize("layout", ["parquet", "arrow", "saved"])
def test_tables_of_two_splits_are_read(layout):
    images, splits = tables()
    if layout == "parquet":
        parquet("tables", **splits)
    else:
        DatasetDict(splits).save_to_disk("tables")
    if layout == "arrow":
        for name in splits:
            os.rename(
                f"tables/{name}/data-00000-of-00001.arrow", f"tables/{name}-00000-of-00001.arrow"
            )
        os.unlink("tables/dataset_dict.json")
    data = load("tables")
    assert data.class_names == ANIMALS and data.evaluation.name == "test"
    for split, name in ((data.train, "train"), (data.evaluation, "test")):
        assert split.labels.tolist() == labels_of(len(images[name]))
        assert same_images(split, images[name])
        assert (decode_all(split, 8, 8, 3, "cache", iter) == images[name]).all()


def test_a_folder_of_tables_may_have_any_name():
    images, splits = tables()
    data = load(parquet("my [1] set*", **splits))
    assert data.class_names == ANIMALS and same_images(data.train, images["train"])


def test_files_are_read_without_asking_the_network(monkeypatch):
    import datasets.load

    asked = []
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", True)
    monkeypatch.setattr(datasets.load, "get_session", lambda: asked.append(1))
    load(parquet("tables", train=table(labels_of(30), NAMED)))
    assert not asked


def test_files_are_grouped_into_splits_by_their_names():
    names = {
        "train-00000-of-00002": "train",
        "train-00001-of-00002": "train",
        "my-set-unsupervised-00000-of-00001": "unsupervised",
        "test_1": "test",
        "Valid.v2": "valid",
        "part7": "train",
    }
    Path("tables").mkdir()
    for count, name in enumerate(names, 1):
        table(labels_of(count), NAMED).to_parquet(f"tables/{name}.parquet")
    sizes = {}
    for count, name in enumerate(names.values(), 1):
        sizes[name] = sizes.get(name, 0) + count
    for name, size in sizes.items():
        assert len(load("tables", eval_split=name).evaluation) == size


def plain_parquet(path, labels, images):
    """As a writer that knows nothing of `datasets` leaves it: a struct of bytes, no types of
    features.
    """

    files = [{"bytes": encoded(image, "PNG"), "path": f"{i}.png"} for i, image in enumerate(images)]
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"picture": files, "category": labels}), path)


@pytest.mark.parametrize(
    "labels, names", [([0, 2, 1], ["0", "1", "2"]), (["emu", "cat", "dog"], ANIMALS)]
)
def test_a_plain_parquet_file_needs_no_types_of_columns(labels, names):
    images = pictures(30)
    plain_parquet("tables/train.parquet", labels * 10, images)
    plain_parquet("tables/test.parquet", labels, images[:3])
    data = load("tables")
    assert [data.class_names[label] for label in data.train.labels] == [
        str(label) for label in labels * 10
    ]
    assert data.class_names == names and same_images(data.train, images)
    assert data.evaluation.labels.tolist() == data.train.labels[:3].tolist()


@pytest.mark.parametrize(
    "feature, values, names",
    [
        (Value("int16"), [3, 0, 1], ["0", "1", "2", "3"]),
        (Value("bool"), [True, False, True], ["0", "1"]),
        (Value("large_string"), ["b", "a", "b"], ["a", "b"]),
        (ClassLabel(names=["x", "y"]), [1, 0, 1], ["x", "y"]),
    ],
)
def test_labels_of_every_kind_become_numbers_and_names(feature, values, names):
    table(values * 10, feature).save_to_disk("tables")
    data, expected = (
        load("tables"),
        [names.index(v) if isinstance(v, str) else int(v) for v in values],
    )
    assert data.class_names == names and data.train.labels.dtype == np.int64
    for split in (data.train, data.evaluation):
        assert split.labels.tolist() == [expected[row % 3] for row in split.image_index]


def test_columns_are_found_by_type_or_by_name():
    count = 30
    coarse = ([label // 2 for label in labels_of(count)], ClassLabel(names=["fur", "feather"]))
    second = (list(pictures(count, seed=5)), Image())
    table(labels_of(count), NAMED, coarse=coarse).save_to_disk("two labels")
    refused("two labels", "each of label, coarse may be the label column", "--label_column")
    assert load("two labels", label_column="coarse").class_names == ["fur", "feather"]
    table(labels_of(count), NAMED, other=second).save_to_disk("two images")
    refused("two images", "each of image, other may be the image column", "--image_column")
    data = load("two images", image_column="other")
    assert same_images(data.train, pictures(count, seed=5)[data.train.image_index])


def test_columns_that_do_not_fit_are_refused():
    table(labels_of(30), NAMED, weight=([0.5] * 30, Value("float32"))).save_to_disk("tables")
    refused(
        "tables",
        "--image_column photo: no such column",
        "image, label, weight",
        image_column="photo",
    )
    refused("tables", "--image_column label: holds ", image_column="label")
    refused(
        "tables", "--label_column weight: labels must be integers or strings", label_column="weight"
    )
    Dataset.from_dict({"number": [1, 2, 3]}).save_to_disk("numbers")
    refused("numbers", "there is no image column", "--image_column", "number")
    table(labels_of(30), NAMED).rename_column("label", "thing").cast_column(
        "thing", Value("int64")
    ).save_to_disk("odd")
    refused("odd", "there is no label column", "--label_column", "thing")


def test_a_split_without_a_label_column_is_refused_only_when_it_is_used():
    bare = Dataset.from_dict({"image": list(pictures(5))}, features=Features({"image": Image()}))
    DatasetDict(test=bare, train=table(labels_of(30), NAMED)).save_to_disk("tables")
    refused("tables", "split 'test' has no column 'label'", "choose another split")
    assert len(load("tables", eval_fraction=0.2).evaluation) == 6


def test_labels_that_look_like_the_classes_but_are_of_another_type_are_shown_as_what_they_are():
    texts, numbers = table(["0", "1"] * 5, Value("string")), table([0, 1], Value("int64"))
    DatasetDict(train=texts, test=numbers).save_to_disk("mixed")
    refused("mixed", "the training split has no class 0, only '0', '1' (split 'test': 0, 1)")
    DatasetDict(train=table([0, 1] * 5, Value("int64")), test=texts).save_to_disk("other")
    refused("other", "the training split has no class '0', only 0, 1 (split 'test': '0', '1')")


@pytest.mark.parametrize("kind", [pa.ipc.new_stream, pa.ipc.new_file])
def test_arrow_files_of_both_formats_are_read_and_must_name_the_classes_alike(kind):
    Path("arrow").mkdir()

    def write(name, dataset):
        whole = dataset.data.table
        with pa.OSFile(f"arrow/{name}.arrow", "wb") as file, kind(file, whole.schema) as writer:
            writer.write_table(whole)

    write("train-b", table(labels_of(30), NAMED))
    assert load("arrow").class_names == ANIMALS
    write("train-a", table(labels_of(30), Value("int64")))  # without names
    write("train-c", table(labels_of(30), ClassLabel(names=ANIMALS[::-1])))
    own, other = ", ".join(ANIMALS[::-1]), ", ".join(ANIMALS)
    refused(
        "arrow", f"train-c.arrow: label has the classes {own}, but in arrow/train-b.arrow {other}"
    )


def test_labels_outside_the_classes_are_refused_with_their_place():
    DatasetDict(train=table(labels_of(30), NAMED), test=table([-1] * 5, NAMED)).save_to_disk(
        "unlabelled"
    )
    refused(
        "unlabelled",
        "image 0 of split 'test' has the label -1, outside 0..2",
        "unlabelled",
        "--eval_split",
    )
    table([0, 1, None] * 5, Value("int64")).save_to_disk("holed")
    refused("holed", "image 2 of split 'train' has a null label")
    named = {
        "train": table(["a", "b"] * 5, Value("string")),
        "test": table(["a", "emu"], Value("string")),
    }
    DatasetDict(named).save_to_disk("named")
    refused("named", "the training split has no class 'emu', only a, b (split 'test': a, emu)")


def test_empty_splits_are_refused():
    parquet("files", train=table(labels_of(30), NAMED), test=table([], NAMED))
    refused("files", "files: cannot be read", "a table must have rows")
    empty = Dataset.from_dict(
        {"image": [], "label": []}, features=Features({"image": Image(), "label": NAMED})
    )
    with pa.ipc.new_stream("none.arrow", empty.features.arrow_schema) as stream:
        stream.write_table(empty.data.table)
    refused("none.arrow", "split 'train' is empty", "--train_split")


def test_a_cache_that_cannot_be_written_is_named_and_not_the_healthy_data(monkeypatch):
    parquet("tables", train=table(labels_of(30), NAMED))
    Path("file").touch()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", Path("file/datasets"))
    refused("tables", "file/datasets: ", "cannot be written (Not a directory); set HF_HOME to")

    def fill_disk(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(datasets, "load_dataset", fill_disk)
    refused("tables", "cannot be written (No space left on device); set HF_HOME to")


@pytest.mark.parametrize("damage", ["truncated", "middle"])
def test_a_corrupt_parquet_file_is_refused(damage):
    parquet("tables", train=table(labels_of(30), NAMED), test=table(labels_of(9), NAMED))
    file = Path("tables/test-00000-of-00001.parquet")
    raw = file.read_bytes()
    file.write_bytes(
        raw[: len(raw) // 2] if damage == "truncated" else raw[:200] + b"\xff" * 400 + raw[600:]
    )
    refused("tables", "tables: cannot be read", "fix or remove the damaged file")


def test_a_damaged_arrow_file_or_saved_folder_is_named():
    table(labels_of(30), NAMED).save_to_disk("saved")
    file = next(Path("saved").glob("*.arrow"))
    file.write_bytes(file.read_bytes()[:500])
    refused(file, f"{file}: cannot be read")
    file.unlink()
    refused("saved", "saved: cannot be read", "data-00000-of-00001.arrow")


# -- which splits
# ----------------------------------------------------------------------------------------------------


def test_splits_are_chosen_by_name_and_by_custom():
    sizes = {"train": 30, "validation": 6, "test": 9, "extra": 12}
    splits = {name: table(labels_of(size), NAMED) for name, size in sizes.items()}
    DatasetDict(splits).save_to_disk("tables")
    for settings, expected in (
        ({}, (30, "validation", 6)),
        ({"eval_split": "test"}, (30, "test", 9)),
        ({"train_split": "validation"}, (6, "test", 9)),
        ({"train_split": "extra", "eval_fraction": 0.25}, (9, "hold-out of extra", 3)),
    ):
        data = load("tables", **settings)
        assert (len(data.train), data.evaluation.name, len(data.evaluation)) == expected
    for flag in ("train_split", "eval_split"):
        refused(
            "tables",
            f"--{flag} day: no such split; use one of train, validation, test, extra",
            **{flag: "day"},
        )
    DatasetDict(one=splits["train"], two=splits["test"]).save_to_disk("others")
    refused("others", "no split called train", "--train_split", "one, two")
    assert len(load("others", train_split="one").train) == 27
    DatasetDict(one=splits["train"]).save_to_disk("single")
    assert load("single").evaluation.name == "hold-out of one"


def labelled(counts):
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts)), counts))
    return whole_split("train", np.zeros((len(labels), 1, 1), np.uint8), labels, "made")


@pytest.mark.parametrize("fraction", [0.05, 1 / 3, 0.9])
def test_a_hold_out_is_disjoint_complete_and_of_every_class_its_share(fraction):
    split = labelled([500, 100, 37, 10, 6, 1])
    rest, held = hold_out(split, fraction, seed=3)
    assert sorted([*rest.image_index, *held.image_index]) == list(range(654))
    assert not set(rest.image_index) & set(held.image_index)
    assert abs(len(held) - fraction * 654) <= 2
    for label, count in enumerate([500, 100, 37, 10, 6]):
        assert abs((held.labels == label).sum() - fraction * count) <= 1
    assert (rest.labels == 5).sum() == 1  # what there is one of can only be learned
    for part in (rest, held):
        assert (part.labels == split.labels[part.image_index]).all() and (
            np.diff(part.image_index) > 0
        ).all()


def test_a_hold_out_is_the_same_for_a_seed_and_another_for_another():
    split = labelled([100, 100])
    held = [hold_out(split, 0.2, seed)[1].image_index for seed in range(200)]
    assert (hold_out(split, 0.2, 0)[1].image_index == held[0]).all()
    often = np.bincount(np.concatenate(held), minlength=200)
    assert often.min() > 15 and often.max() < 70  # every sample's turn comes, about 40 times


def test_few_samples_of_many_classes_can_be_held_out_from():
    _, held = hold_out(labelled([4] * 100), 0.1, 0)
    assert len(held) == 40 and np.bincount(held.labels).max() == 1


@pytest.mark.parametrize("counts, fraction", [([3, 2], 0.01), ([1, 1, 1], 0.5), ([2, 2], 0.999)])
def test_a_hold_out_of_nothing_or_everything_is_refused(counts, fraction):
    with pytest.raises(
        ValueError, match=r"too few samples .*; add samples, change --eval_fraction or name"
    ):
        for seed in range(20):
            hold_out(labelled(counts), fraction, seed)


def test_subsets_are_random_and_of_both_splits():
    data, whole = load("digits", max_train_samples=100, max_eval_samples=50), load("digits")
    assert (len(data.train), len(data.evaluation)) == (100, 50)
    assert set(data.train.image_index) <= set(whole.train.image_index) and set(
        data.evaluation.image_index
    ) <= set(whole.evaluation.image_index)
    assert data.train.image_index.max() > 1400 and len(set(data.train.labels)) == 10
    assert (data.train.image_index == load("digits", max_train_samples=100).train.image_index).all()
    assert set(data.train.image_index) != set(random_subset(whole.train, 100, seed=1).image_index)
    assert len(random_subset(whole.train, 10**6, seed=1)) == len(whole.train)


def test_eval_gets_the_split_that_was_evaluated_or_trained_on_or_any_other():
    sizes = {"train": 30, "validation": 6, "test": 9}
    DatasetDict({name: table(labels_of(size), NAMED) for name, size in sizes.items()}).save_to_disk(
        "tables"
    )
    config = TrainConfig(data="tables", max_train_samples=5)
    for name, expected in ((None, "validation"), ("train", "train"), ("test", "test")):
        split, _ = load_split(config, name, ANIMALS)
        assert (split.name, len(split)) == (expected, sizes[expected])
    with pytest.raises(
        ValueError, match="--split day: no such split; use one of train, validation, test"
    ):
        load_split(config, "day", ANIMALS)
    config = TrainConfig(data="tables", eval_fraction=0.2, max_eval_samples=4)
    data = load_data(config)
    held, trained = load_split(config, None, ANIMALS)[0], load_split(config, "train", ANIMALS)[0]
    assert (held.image_index == data.evaluation.image_index).all() and len(held) == 4
    assert len(trained) == 4 and set(trained.image_index) <= set(data.train.image_index)


def test_eval_counts_classes_as_the_checkpoint_does():
    table(labels_of(30), NAMED).save_to_disk("tables")
    config = TrainConfig(data="tables", eval_fraction=0.5)
    split, _ = load_split(config, "train", ["emu", "ant", "cat", "dog"])
    assert split.labels.tolist() == [[2, 3, 0][row % 3] for row in split.image_index]
    with pytest.raises(ValueError, match="does not have the class 'dog', only cat, emu"):
        load_split(config, "train", ["cat", "emu"])
    only_cats = split.select(np.flatnonzero(split.labels == 2))
    assert set(renumber(only_cats, ["emu", "ant", "cat", "dog"], ["cat"]).labels) == {0}
    several = whole_split("test", np.zeros((2, 2, 2), np.uint8), [[1, 0, 0], [1, 1, 0]], "")
    assert renumber(several, ["bird", "dog", "emu"], ["dog", "bird", "cat"]).labels.tolist() == [
        [0, 1, 0],
        [1, 1, 0],
    ]
