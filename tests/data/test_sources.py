"""--data from name to splits: every kind of source, the choice of splits, what is refused."""

import os
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torchvision
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, Value
from helpers.loading import error_of, evaluated, load, sizes
from helpers.make_data import encoded, image_folder, mnist_files, parquet, pictures, table
from helpers.training_runs import train_run, words
from PIL import Image as PillowImage
from pyarrow import parquet as pq

from utils.data.decode import decode_image
from utils.data.decoded import decode_all
from utils.data.hold_out import hold_out, random_subset
from utils.data.labels import renumber
from utils.data.selection import load_split
from utils.data.sources import check_source
from utils.data.splits import whole_split
from utils.settings.train import TrainConfig
from utils.training.setup import resolve_input

ANIMALS = ["cat", "dog", "emu"]
NAMED = ClassLabel(names=ANIMALS)


def same_images(split, expected):
    images = np.stack([decode_image(split, position, 3).numpy() for position in range(len(split))])
    return (images == expected).all()


def labels_of(count, classes=3):
    return [i % classes for i in range(count)]


def named(count, **columns):
    """A table with images of all three animals."""
    return table(labels_of(count), NAMED, **columns)


# -- bundled and made sets
# ----------------------------------------------------------------------


def seen(data):
    """The channels and the size of the model's input that follow from the training images."""
    spec = resolve_input(TrainConfig(model="mlp"), None, data.train)[2]
    return spec.channels, spec.size


def test_digits_are_the_scans_scaled_to_255_with_a_tenth_held_out():
    from sklearn.datasets import load_digits

    data, scans = load("digits"), load_digits()
    assert len(data.train) + len(data.evaluation) == 1797 and abs(len(data.evaluation) - 180) <= 1
    for split in (data.train, data.evaluation):
        pixels = decode_all(split, 8, 8, 1, "cache", None)[..., 0]
        assert np.abs(pixels - scans.images[split.image_index] * 255 / 16).max() <= 0.5
        assert (split.labels == scans.target[split.image_index]).all()
    assert data.class_names == list("0123456789")
    assert seen(data) == (1, (8, 8))


def test_synthetic_sets_have_the_shape_that_their_name_says_and_can_be_learned():
    data = load("synthetic/4x16x3000")
    assert sizes(data) == (3000, "test", 300) and seen(data) == (3, (16, 16))
    assert data.class_names == ["0", "1", "2", "3"] and set(data.train.labels) == {0, 1, 2, 3}
    pixels = decode_all(data.train, 16, 16, 3, "cache", None)
    for position in (0, 1, 2, 2999):  # each class is a brighter band
        image = decode_image(data.train, position, 3).numpy()
        assert image.reshape(4, -1).mean(1).argmax() == data.train.labels[position]
        assert (pixels[np.array([position])][0] == image).all()
    assert len(load("synthetic").train) == 10_000
    assert not (decode_image(data.train, 0, 3) == decode_image(data.evaluation, 0, 3)).all()


def test_a_misspelt_synthetic_set_is_refused_with_the_right_spelling():
    assert "must be synthetic/CLASSESxSIZExCOUNT" in error_of("synthetic/10x32")


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("nothing", "use digits, synthetic/, torchvision/, a .csv file"),
        ("digit", "did you mean digits?"),
        ("~/no", ""),
        ("torchvision/mnist", "did you mean MNIST"),
        ("torchvision/Food101", "use MNIST, FashionMNIST, KMNIST, CIFAR10, CIFAR100"),
    ],
)
def test_data_that_do_not_exist_are_refused_before_anything_is_opened(name, fix):
    with pytest.raises(ValueError, match=f"^--data {name}: no such (file|data set).*{fix}"):
        check_source(TrainConfig(data=name))


def test_data_that_may_exist_pass_the_first_check_which_opens_nothing(tmp_path):
    for name in ("digits", "synthetic/3x3x3", "torchvision/MNIST", "some/thing", str(tmp_path)):
        check_source(TrainConfig(data=name))
    assert not any(Path().iterdir())  # nothing was downloaded or written


def test_a_hub_set_is_read_like_a_local_one_and_its_flaws_are_reported_as_they_are(monkeypatch):
    line = "--data someone/something: no such file or folder, and it cannot be loaded from the Hub"
    assert error_of("someone/something").startswith(line)
    asked, splits = [], DatasetDict(train=named(30), test=named(9))
    monkeypatch.setattr(datasets, "load_dataset", lambda *names: asked.append(names) or splits)
    data = load("someone/something", data_subset="small")
    assert asked == [("someone/something", "small")]
    assert (sizes(data), data.class_names) == ((30, "test", 9), ANIMALS)
    line = "--label_column kind: no such column"
    assert error_of("someone/something", label_column="kind").startswith(line)


# -- torchvision
# ----------------------------------------------------------------------


def test_mnist_files_are_found_in_the_data_dir_or_in_the_cache():
    images = [pictures(count, (28, 28), 1, seed=count) for count in (40, 20)]
    train, test = ((own, np.arange(len(own)) % 10) for own in images)
    for root, settings in (("cache/torchvision", {}), ("mine", {"data_dir": "mine"})):
        mnist_files(root, train=train, t10k=test)
        data = load("torchvision/MNIST", **settings)
        for split, (pixels, labels) in ((data.train, train), (data.evaluation, test)):
            assert (decode_all(split, 28, 28, 1, "cache", None)[..., 0] == pixels).all()
            assert (split.labels == labels).all()
        assert len(data.class_names) == 10 and seen(data) == (1, (28, 28))


@pytest.mark.full
def test_an_evaluation_does_not_say_that_the_classes_of_a_torchvision_set_changed():
    made = [(pictures(20, (28, 28), 1, seed=seed), np.arange(20) % 10) for seed in (1, 2)]
    mnist_files("cache/torchvision", train=made[0], t10k=made[1])
    flags = words("--data torchvision/MNIST --model mlp --global_batch_size 10 --max_steps 1")
    train_run(1, "run", *flags, *words("--cache_dir cache"))
    assert "classes changed" not in evaluated("--cache_dir", "cache")[1]


def test_a_missing_set_that_cannot_be_downloaded_is_one_line_with_the_fix(monkeypatch):
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    line = "--data torchvision/MNIST: not in nowhere, and the download failed"
    assert error_of("torchvision/MNIST", data_dir="nowhere").startswith(line)


def test_a_set_held_as_a_colour_array_is_read_whole(monkeypatch):
    class Stored:
        def __init__(self, root, train=True, download=False):
            self.data = pictures(20, (32, 32), seed=int(train))
            self.targets, self.classes = labels_of(20, 10), list("abcdefghij")

    monkeypatch.setattr(torchvision.datasets, "CIFAR10", Stored)
    data = load("torchvision/CIFAR10")
    for split, seed in ((data.train, 1), (data.evaluation, 0)):
        assert same_images(split, pictures(20, (32, 32), seed=seed))
    assert data.class_names == list("abcdefghij") and data.train.labels[:3].tolist() == [0, 1, 2]


def test_a_folder_with_the_name_of_a_bundled_set_is_said_not_to_be_used():
    image_folder("digits", {"cat": 20, "dog": 20})
    assert load("digits").train.notes == (
        "--data digits is a bundled data set; for the folder of this name, use --data ./digits",
    )
    assert load("./digits").class_names == ["cat", "dog"]


def test_labels_of_an_own_source_that_are_not_integers_are_refused():
    images = np.zeros((3, 2, 2), np.uint8)
    with pytest.raises(ValueError, match="split 'train' has labels that are not integers"):
        whole_split("train", images, np.array([0.37, 1.9, 2.5]), "made")
    assert whole_split("train", images, [0.0, 1.0, 2.0], "made").labels.dtype == np.int64


# -- image folders
# ----------------------------------------------------------------------


def test_an_image_folder_without_splits_is_held_out_from():
    paths = image_folder("folder", {"cat": 20, "dog": 30}, kind="png")
    data = load("folder")
    assert sizes(data) == (45, "hold-out of train", 5) and data.class_names == ["cat", "dog"]
    for split in (data.train, data.evaluation):
        expected = [np.asarray(PillowImage.open(paths[row])) for row in split.image_index]
        assert same_images(split, expected)
        names = [Path(split.describe(i)).parent.name for i in range(len(split))]
        assert names == [data.class_names[label] for label in split.labels]


def test_a_file_or_folder_that_holds_no_data_set_is_refused_with_what_to_give():
    parquet("clone/data", train=named(9))
    line = "clone: no images in it; for the tables below it, give clone/data"
    assert error_of("clone") == line
    Path("file.txt").touch()
    assert error_of("file.txt").startswith("file.txt: is neither a folder nor a table")


# -- tables
# ----------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["parquet", "arrow", "saved"])
def test_tables_of_two_splits_are_read(layout):
    images = {"train": pictures(30, seed=1), "test": pictures(9, seed=2)}
    splits = {name: table(labels_of(len(own)), NAMED, list(own)) for name, own in images.items()}
    folder = Path("my [1] set*")
    if layout == "parquet":
        parquet(folder, **splits)
    else:
        DatasetDict(splits).save_to_disk(folder)
    if layout == "arrow":
        for name in splits:
            shard = "00000-of-00001.arrow"
            os.rename(folder / name / f"data-{shard}", folder / f"{name}-{shard}")
        os.unlink(folder / "dataset_dict.json")
    data = load(folder)
    assert data.class_names == ANIMALS and data.evaluation.name == "test"
    for split, name in ((data.train, "train"), (data.evaluation, "test")):
        assert split.labels.tolist() == labels_of(len(images[name]))
        assert same_images(split, images[name])
        assert (decode_all(split, 8, 8, 3, "cache", iter) == images[name]).all()


def test_files_are_read_without_asking_the_network(monkeypatch):
    import datasets.load

    asked = []
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", True)
    monkeypatch.setattr(datasets.load, "get_session", lambda: asked.append(1))
    load(parquet("tables", train=named(30)))
    assert not asked


def test_files_are_grouped_into_splits_by_their_names():
    Path("tables").mkdir()
    names = "train-00000-of-00002 train-00001-of-00002 my-set-unsupervised-00000-of-00001 test_1"
    for count, name in enumerate(words(f"{names} Valid.v2 part7"), 1):
        named(count).to_parquet(f"tables/{name}.parquet")
    for name, size in {"train": 1 + 2 + 6, "unsupervised": 3, "test": 4, "valid": 5}.items():
        assert len(load("tables", eval_split=name).evaluation) == size


def test_a_plain_parquet_file_needs_no_types_of_columns():
    """As a writer that knows nothing of `datasets` leaves it: a struct of bytes."""
    images = pictures(30)
    files = [{"bytes": encoded(image, "PNG"), "path": f"{i}.png"} for i, image in enumerate(images)]
    Path("tables").mkdir()
    for name, count in (("train", 30), ("test", 3)):
        made = pa.table(
            {"picture": files[:count], "category": (["emu", "cat", "dog"] * 10)[:count]}
        )
        pq.write_table(made, f"tables/{name}.parquet")
    data = load("tables")
    assert data.class_names == ANIMALS and same_images(data.train, images)
    assert data.train.labels.tolist() == data.evaluation.labels.tolist() * 10 == [2, 0, 1] * 10


@pytest.mark.parametrize(
    "feature, values, names, expected",
    [
        (Value("int16"), [3, 0, 1], ["0", "1", "3"], [2, 0, 1]),
        (Value("bool"), [True, False, True], ["0", "1"], [1, 0, 1]),
        (Value("large_string"), ["b", "a", "b"], ["a", "b"], [1, 0, 1]),
        (Value("string_view"), ["b", "a", "b"], ["a", "b"], [1, 0, 1]),
        (ClassLabel(names=["x", "y"]), [1, 0, 1], ["x", "y"], [1, 0, 1]),
    ],
)
def test_labels_of_every_kind_become_numbers_and_names(feature, values, names, expected):
    table(values * 10, feature).save_to_disk("tables")
    data = load("tables")
    assert data.class_names == names and data.train.labels.dtype == np.int64
    for split in (data.train, data.evaluation):
        assert split.labels.tolist() == [expected[row % 3] for row in split.image_index]


def test_columns_are_found_by_type_or_by_name():
    coarse = [label // 2 for label in labels_of(30)], ClassLabel(names=["fur", "feather"])
    named(30, coarse=coarse).save_to_disk("labels")
    assert error_of("labels").startswith("each of label, coarse may be the label column")
    assert load("labels", label_column="coarse").class_names == ["fur", "feather"]
    named(30, other=(list(pictures(30, seed=5)), Image())).save_to_disk("images")
    assert error_of("images").startswith("each of image, other may be the image column")
    data = load("images", image_column="other")
    assert same_images(data.train, pictures(30, seed=5)[data.train.image_index])


def made_tables():
    named(30, weight=([0.5] * 30, Value("float32"))).save_to_disk("weights")
    Dataset.from_dict({"number": [1, 2, 3]}).save_to_disk("numbers")
    odd = named(30).rename_column("label", "thing").cast_column("thing", Value("int64"))
    odd.save_to_disk("odd")
    texts, numbers = table(["0", "1"] * 5, Value("string")), table([0, 1] * 5, Value("int64"))
    DatasetDict(train=texts, test=numbers).save_to_disk("mixed")
    DatasetDict(train=named(30), test=table([-1] * 5, NAMED)).save_to_disk("unlabelled")
    table([0, 1, None] * 5, Value("int64")).save_to_disk("holed")
    table([0.0, None] * 5, Value("float64")).save_to_disk("gap")  # as pandas writes integers
    files = pa.array([encoded(image, "PNG") for image in pictures(3)], pa.binary_view())
    Path("view").mkdir()
    pq.write_table(pa.table({"image": files, "label": [0, 1, 0]}), "view/train.parquet")
    parquet("empty", train=named(30), test=table([], NAMED))
    bare = Dataset.from_dict({"image": list(pictures(5))}, features=Features({"image": Image()}))
    DatasetDict(test=bare, train=named(30)).save_to_disk("bare")
    file = parquet("damaged", train=named(30), test=named(9)) / "test-00000-of-00001.parquet"
    raw = file.read_bytes()
    file.write_bytes(raw[:200] + b"\xff" * 400 + raw[600:])
    named(30).save_to_disk("gone")
    next(Path("gone").glob("*.arrow")).unlink()


@pytest.fixture(scope="module")
def flawed(tmp_path_factory):
    """The folder of all tables that are refused."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("flawed"))
        made_tables()
        return Path.cwd()


FLAWS = {
    "--label_column label: holds Value('float64'), not labels; convert labels to integers": (
        "gap",
        {},
    ),
    "--image_column image: holds Value('binary_view'), not images; convert labels to integers or "
    "strings, and images to binary": ("view", {"image_column": "image"}),
    "--image_column photo: no such column": ("weights", {"image_column": "photo"}),
    "--image_column label: holds ": ("weights", {"image_column": "label"}),
    "--label_column weight: holds ": ("weights", {"label_column": "weight"}),
    "there is no image column": ("numbers", {}),
    "there is no label column": ("odd", {}),
    "the training split has no class 0, only '0', '1' (split 'test': 0, 1)": ("mixed", {}),
    "image 0 of split 'test' has the label -1, outside 0..2": ("unlabelled", {}),
    "split 'train' has null labels (5)": ("holed", {}),
    "empty: cannot be read": ("empty", {}),
    "split 'test' has no column 'label', only image": ("bare", {}),
    "damaged: cannot be read": ("damaged", {}),
    "gone: cannot be read": ("gone", {}),
}


@pytest.mark.parametrize("line", FLAWS)
def test_a_table_that_cannot_be_right_is_refused(flawed, line, monkeypatch):
    data, settings = FLAWS[line]
    monkeypatch.chdir(flawed)
    assert error_of(data, **settings).startswith(line)
    if data == "bare":  # its test split is not used
        assert len(load("bare", eval_fraction=0.2).evaluation) == 6


def test_a_row_group_that_arrow_cannot_read_at_once_is_not_called_damaged(monkeypatch):
    """It reads images of at most 2 GB; a file of this size is not made here."""

    def load_dataset(*args, **options):
        raise OSError("damaged") from pa.ArrowNotImplementedError(
            "Nested data conversions not implemented for chunked array outputs"
        )

    parquet("large", train=named(30))
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    line = error_of("large")
    assert line.startswith("large: cannot be read (a row group has more than 2 GB); write it again")


@pytest.mark.parametrize("kind", [pa.ipc.new_stream, pa.ipc.new_file])
def test_arrow_files_of_both_formats_are_read_and_must_name_the_classes_alike(kind):
    Path("arrow").mkdir()

    def write(name, dataset):
        whole = dataset.data.table
        with pa.OSFile(f"arrow/{name}.arrow", "wb") as file, kind(file, whole.schema) as writer:
            writer.write_table(whole)

    write("train-b", named(30))
    assert load("arrow").class_names == ANIMALS
    write("train-a", table(labels_of(30), Value("int64")))  # without names
    write("train-c", table(labels_of(30), ClassLabel(names=ANIMALS[::-1])))
    line = "train-c.arrow: label has other classes than in arrow/train-b.arrow"
    assert line in error_of("arrow")


# -- which splits
# ----------------------------------------------------------------------

SIZES = {"train": 30, "validation": 6, "test": 9, "extra": 12}


def test_splits_are_chosen_by_name_and_by_custom():
    DatasetDict({name: named(size) for name, size in SIZES.items()}).save_to_disk("tables")
    for settings, expected in (
        ({}, (30, "validation", 6)),
        ({"eval_split": "test"}, (30, "test", 9)),
        ({"train_split": "validation"}, (6, "test", 9)),
        ({"train_split": "extra", "eval_fraction": 0.25}, (9, "hold-out of extra", 3)),
    ):
        assert sizes(load("tables", **settings)) == expected
    for flag in ("train_split", "eval_split"):
        line = f"--{flag} day: no such split; use one of train, validation, test, extra"
        assert error_of("tables", **{flag: "day"}) == line
    DatasetDict(one=named(30)).save_to_disk("single")
    assert load("single").evaluation.name == "hold-out of one"


def labelled(counts):
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts)), counts))
    return whole_split("train", np.zeros((len(labels), 1, 1), np.uint8), labels, "made")


@pytest.mark.parametrize("fraction", [0.05, 0.9])
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
        assert (part.labels == split.labels[part.image_index]).all()
        assert (np.diff(part.image_index) > 0).all()


def test_a_hold_out_is_the_same_for_a_seed_and_another_for_another():
    split = labelled([100, 100])
    held = [hold_out(split, 0.2, seed)[1].image_index for seed in range(200)]
    assert (hold_out(split, 0.2, 0)[1].image_index == held[0]).all()
    often = np.bincount(np.concatenate(held), minlength=200)
    assert often.min() > 15 and often.max() < 70  # every sample's turn comes, about 40 times


def test_few_samples_of_many_classes_can_be_held_out_from():
    _, held = hold_out(labelled([4] * 100), 0.1, 0)
    assert len(held) == 40 and np.bincount(held.labels).max() == 1


@pytest.mark.parametrize("counts, fraction", [([3, 2], 0.01), ([2, 2], 0.999)])
def test_a_hold_out_of_nothing_or_everything_is_refused(counts, fraction):
    with pytest.raises(ValueError, match="hold-out of train: would have"):
        for seed in range(20):
            hold_out(labelled(counts), fraction, seed)


def test_subsets_are_random_and_of_both_splits():
    data, whole = load("digits", max_train_samples=100, max_eval_samples=50), load("digits")
    assert sizes(data) == (100, whole.evaluation.name, 50)
    for split, all_of_it in ((data.train, whole.train), (data.evaluation, whole.evaluation)):
        assert set(split.image_index) <= set(all_of_it.image_index)
    rows = data.train.image_index
    assert rows.max() > 1400 and len(set(data.train.labels)) == 10
    assert (rows == load("digits", max_train_samples=100).train.image_index).all()
    assert set(rows) != set(random_subset(whole.train, 100, seed=1).image_index)
    assert len(random_subset(whole.train, 10**6, seed=1)) == len(whole.train)


def test_eval_gets_the_split_that_was_evaluated_or_trained_on_or_any_other():
    DatasetDict({name: named(size) for name, size in SIZES.items()}).save_to_disk("tables")

    def splits_of(names, **settings):
        data, config = load("tables", **settings), TrainConfig(data="tables", **settings)
        return data, [load_split(config, name, ANIMALS, data.table, True)[0] for name in names]

    _, found = splits_of((None, "train", "test"), max_train_samples=5)
    assert {split.name: len(split) for split in found} == {"validation": 6, "train": 30, "test": 9}
    data, (held, trained) = splits_of((None, "train"), eval_fraction=0.2, max_eval_samples=4)
    assert (held.image_index == data.evaluation.image_index).all() and len(held) == 4
    assert len(trained) == 4 and set(trained.image_index) <= set(data.train.image_index)
    with pytest.raises(ValueError, match="--split day: no such split; use one of train, validat"):
        load_split(TrainConfig(data="tables"), "day", ANIMALS)


def test_eval_counts_classes_as_the_checkpoint_does():
    named(30).save_to_disk("tables")
    config, names = TrainConfig(data="tables"), ["emu", "ant", "cat", "dog"]
    split, _ = load_split(config, "train", names)
    assert split.labels.tolist() == [2, 3, 0] * 10
    with pytest.raises(ValueError, match="does not have the class 'dog', only cat, emu"):
        load_split(config, "train", ["cat", "emu"])
    only_cats = split.select(np.flatnonzero(split.labels == 2))
    assert set(renumber(only_cats, names, ["cat"]).labels) == {0}
    several = whole_split("test", np.zeros((2, 2, 2), np.uint8), [[1, 0, 0], [1, 1, 0]], "")
    found = renumber(several, ["bird", "dog", "emu"], ["dog", "bird", "cat"])
    assert found.labels.tolist() == [[0, 1, 0], [1, 1, 0]]
