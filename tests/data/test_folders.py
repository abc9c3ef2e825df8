"""utils/data/folders.py: splits, classes and images in folders; missing shards and labels."""

import json
import os
from pathlib import Path

import pytest
from datasets import ClassLabel, Value
from helpers.loading import error_of, load, sizes
from helpers.make_data import image_folder, parquet, pictures, table
from helpers.ranks import run_ranks
from helpers.training_runs import train_run, words

import eval
import train
from utils.console import printable
from utils.data.selection import load_split
from utils.data.splits import Data, whole_split
from utils.settings.train import TrainConfig
from utils.training.summary import classes_row, warn_about_data

SHORT = words("--model mlp --max_steps 2 --eval_every 2 --global_batch_size 16")


def pets(*folders, count=10):
    """Images of cats and dogs in each of these folders."""
    return {f"{folder}/{name}": count for folder in folders for name in ("cat", "dog")}


# -- splits and classes
# ----------------------------------------------------------------------

HELD_OUT, WITH_TEST = (18, "hold-out of train", 2), (20, "test", 20)
LAYOUTS = {
    "classes": (pets("."), {}, HELD_OUT),
    "archive": (pets("a/data/train", "a/data/test") | {"__MACOSX/a/cat": 3}, {}, WITH_TEST),
    "usual names stay": (pets("train", "eval"), {}, (20, "eval", 20)),
    "other names": (pets("Training Set", "dev"), {}, (20, "validation", 20)),
    "flags": (pets("a", "b"), {"train_split": "b", "eval_split": "a"}, (20, "a", 20)),
    "only a test split": (pets("test"), {"train_split": "test"}, (18, "hold-out of test", 2)),
    "others next to splits": (pets("train", "test") | {"unlabelled": 7}, {}, WITH_TEST),
    "no evaluation labels": (pets("train") | {"test": 3}, {"eval_fraction": 0.1}, HELD_OUT),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_splits_and_classes_are_found_in_the_layouts_that_data_sets_have(layout):
    counts, settings, expected = LAYOUTS[layout]
    image_folder("folder", counts)
    data = load(**settings)
    assert data.class_names == ["cat", "dog"] and sizes(data) == expected
    note = {
        "archive": "folder: using a, the only folder in it with images",
        "others next to splits": "folder: folders next to the splits are not used (split names are",
    }.get(layout)
    assert bool(data.train.notes) == bool(note) and (not note or note in data.train.notes[0])


def test_an_evaluation_may_name_a_split_by_its_kind_or_its_folder():
    image_folder("folder", pets("Training Set") | pets("dev", count=2))
    config = TrainConfig(data="folder", cache_dir="cache")
    names = (None, "train", "validation", "dev", "Training Set")
    found = [load_split(config, name, ["cat", "dog"])[0] for name in names]
    assert [len(split) for split in found] == [4, 20, 4, 4, 20]


@pytest.mark.parametrize("junk", [".git", "lost+found"])
def test_hidden_folders_are_neither_classes_nor_training_data(junk):
    image_folder("folder", pets("train", "test"))
    for place in (".", "train", "train/cat", "train/cat/deeper", "test/dog"):
        image_folder(f"folder/{place}", {junk: 3})
    Path("folder/train/cat/._000.png").write_bytes(b"a Mac's notes")
    data = load()
    assert data.class_names == ["cat", "dog"] and sizes(data) == WITH_TEST
    assert data.train.notes == ()


def test_a_class_may_be_called_train_and_a_flag_makes_every_folder_a_class():
    image_folder("folder", {"bus": 5, "car": 5, "train": 5})
    assert load().class_names == ["bus", "car", "train"]
    image_folder("folder", {"train/steam": 5, "train/electric": 5})
    assert load(train_split=".").class_names == ["bus", "car", "train"]
    assert load(train_split="train").class_names == ["electric", "steam"]


REFUSED = {
    "folder: the splits Train and training may be the same": pets("Train", "training"),
    "no split called train; set --train_split to one of test": pets("test"),
    "folder/test: has images but no class folders (3 found)": pets("train") | {"test": 3},
    "folder/test/emu: the training split has no class 'emu', only cat, dog (split 'test': emu)": (
        pets("train") | {"test/emu": 2}
    ),
    "--data folder has one class, cat": {"cat/2020/may": 30},
    "folder: no images in it; an image folder holds CLASS/IMAGE.jpg": {"scans": 0},
}


@pytest.mark.parametrize("line", REFUSED)
def test_a_folder_that_cannot_be_trained_on_is_refused(line):
    image_folder("folder", REFUSED[line])
    assert error_of().startswith(line)


def test_a_folder_of_images_of_unknown_types_is_refused_with_the_types_that_are_read():
    Path("folder/cat").mkdir(parents=True)
    for name in ("1.GIF", "2.gif", "3.jxl"):
        Path("folder/cat", name).touch()
    line = "folder: no images of a supported type, only .gif (2), .jxl (1); convert them to one"
    assert error_of().startswith(line)


# -- what is left out
# ----------------------------------------------------------------------


def test_what_may_have_been_meant_as_samples_is_named():
    image_folder("folder/train", {"cat": 10, "dog": 10, ".": 2, "cat/a": 1, "cat/b/c": 1})
    image_folder("folder/test", {"cat": 2})
    for empty in ("train/emu", "train/fox/2020/may", "test/gnu"):
        (Path("folder") / empty).mkdir(parents=True)
    Path("folder/train/emu/photo.gif").touch()
    Path("folder/train/cat/notes.TXT").touch()
    data, left_out = load(), "class folders without readable images are left out"
    assert data.class_names == ["cat", "dog"] and sizes(data) == (22, "test", 2)
    assert data.train.notes == (
        f"folder/train: {left_out}: emu, fox",
        "folder/train: files of unsupported types are left out: .txt (1), .gif (1)",
        "folder/train: images next to the class folders have no class and are left out: 2",
        "folder/train: folders inside class folders that hold images, but are not classes: 2",
    )
    assert data.evaluation.notes == (f"folder/test: {left_out}: gnu",)


def test_images_are_known_by_their_endings():
    paths = image_folder("folder", {"cat": 12, "dog": 12}, kind="jpg")
    for place, path in enumerate(paths):
        path.rename(path.with_suffix(("", ".jfif", ".JPE", ".jpg")[place % 4]))
    Path("folder/cat/README").write_text("no image")
    os.mkfifo("folder/dog/pipe")  # must not be opened
    os.symlink("itself", "folder/dog/itself")
    data = load()
    assert len(data.train) + len(data.evaluation) == 18
    assert data.train.notes == (
        "folder: files of unsupported types are left out: no extension (9)",
    )


def test_links_are_followed_but_not_in_circles():
    paths = image_folder("elsewhere", {"cat": 6, "wolf": 6})
    image_folder("folder", {"dog/sub": 6})
    os.symlink("../elsewhere/cat", "folder/cat")
    os.symlink(paths[-1].resolve(), "folder/dog/linked.png")
    links = [("dog/up", "../dog"), ("dog/zzz", "sub"), ("cat/self", "."), ("self", ".")]
    for link, target in [*links, ("dog/top", ".."), ("dog/cats", "../cat")]:
        os.symlink(target, f"folder/{link}")
    data = load()
    assert data.class_names == ["cat", "dog"] and len(data.train.images.paths) == 13


# -- lines at the start of a run
# ----------------------------------------------------------------------


@pytest.mark.full
def test_the_start_names_classes_and_what_was_left_out_and_an_evaluation_its_data():
    image_folder("folder/train", {"ant": 12, "bee": 30, "cat": 20})
    image_folder("folder/test", {"bee": 4, "cat": 6})
    image_folder("other", {"ant": 3, "bee": 3, "cat": 3})
    for name in ("train/ant/1.gif", "train/cat/000.png", "test/cat/.hidden"):
        Path("folder", name).write_bytes(b"a photo")
    flags = ["--data", "folder", "--bad_images", "skip", *SHORT, "--run_name", "run"]
    out = [outcome.out for outcome in run_ranks(2, train.main, flags)]
    for line in (
        "classes    3, each with 12 (class ant) to 30 (class bee) training images, "
        "0 (class ant) to 6 (class cat) evaluation images",
        "1 of 3 classes have no evaluation image: ant",
        "folder/train: files of unsupported types are left out: .gif (1)",
    ):
        assert out[0].splitlines().count(line) == 1 and line not in out[1]
    for given, data, split, classes in (
        ([], "folder", "test", "2 of 3 with samples"),
        (["--data", "other"], "other", "all images", "3"),
        (["--data", "folder", "--split", "train"], "folder", "train", "3"),
    ):
        (outcome,) = run_ranks(1, eval.main, ["--ckpt", "runs/run", *given])
        lines, found = outcome.out.splitlines(), outcome.value
        assert f"data             {Path(data).resolve()}, {split}" in lines
        assert f"classes          {classes}" in lines
        assert (found["split"], found["classes"]) == (split, 3)
        assert found["data"] == str(Path(data).resolve())


def test_the_start_names_the_classes_without_training_images():
    train, even = (whole_split("", pictures(3), labels, "") for labels in ([0, 0, 1], [0, 1, 2]))
    data = Data(train, even, ["ant", "bee", "dog"])
    row = "3, each with 0 (class dog) to 2 (class ant) training images, 1 evaluation images"
    assert classes_row(data) == row
    assert "1 of 3 classes have no training image: dog" in warn_about_data(data)


@pytest.mark.full
def test_class_names_without_utf8_or_with_a_newline_are_trained_and_resumed():
    image_folder("folder", {"cat": 12, "caf\udce9": 12, "new\nline": 12})
    os.rename("folder/cat/000.png", b"folder/cat/b\xff\n.png")
    flags = ["--data", "folder", *SHORT]
    train_run(2, "run", *flags)
    state = next(Path("runs/run/checkpoints").glob("step-*/state.json")).read_bytes()
    assert json.loads(state)["class_names"] == ["caf\udce9", "cat", "new\nline"]
    (found,) = run_ranks(1, eval.main, ["--ckpt", "runs/run"])
    assert found.code == 0 and "caf<U+DCE9> " in found.out and "new line " in found.out
    found.out.encode()
    train_run(1, "run", *flags, "--resume", "auto", "--max_steps", "4")


def test_a_name_with_escape_codes_is_printed_without_them():
    assert printable("cat\x1b[31m\n two\udce9\u200b") == "cat<U+001B>[31m two<U+DCE9><U+200B>"


@pytest.mark.full
def test_a_test_split_that_chooses_the_checkpoint_is_named():
    for other in ("test", "val"):
        image_folder(f"{other}-set", pets("train", other))
        flags = ["--data", f"{other}-set", *SHORT, "--run_name", other, "--report", "true"]
        (outcome,) = run_ranks(1, train.main, flags)
        start = "split test chooses the best checkpoint, so its score will be slightly too high; "
        assert (start in outcome.out) == (other == "test")
        page = Path(f"runs/{other}/report.html").read_text()
        assert ("The split test chose the best checkpoint" in page) == (other == "test")


# -- shards and labels
# ----------------------------------------------------------------------

NAMED = ClassLabel(names=["cat", "dog", "emu"])


def shards(folder, total, numbers, name="train", tail=""):
    Path(folder).mkdir(exist_ok=True)
    for number in numbers:
        part = table([0, 1, 2] * 4, NAMED)
        part.to_parquet(f"{folder}/{name}-{number:05}-of-{total:05}{tail}.parquet")


def test_each_shard_must_be_there_once_but_a_single_file_may_be_given():
    shards("folder", 3, [1, 2, 3])  # counted from one
    shards("folder", 1, [0], "test", tail="-0a1b2c3d")
    Path("folder/._train-00001-of-00003.parquet").write_bytes(b"a Mac's notes")  # left alone
    assert sizes(load()) == (36, "test", 12)
    shards("folder", 3, [1], tail=" (1)")
    assert error_of().startswith("folder: has 4 of 3 shards train-...-of-00003; add or remove")
    shards("other", 10**9, [2], "my-set-train")
    assert "other: has 1 of 1000000000 shards my-set-train-...-of-" in error_of("other")
    assert len(load("other/my-set-train-00002-of-1000000000.parquet").train) == 11


def test_integer_labels_that_occur_are_the_classes():
    table([9000, 0, 3000] * 10, Value("int64")).save_to_disk("folder")
    data = load()
    assert data.class_names == ["0", "3000", "9000"]
    for split in (data.train, data.evaluation):
        assert split.labels.tolist() == [[2, 0, 1][row % 3] for row in split.image_index]
    parquet("new", train=table([0, 1000] * 9, Value("int64")), test=table([0, 7], Value("int64")))
    line = "the training split has no class 7, only 0, 1000 (split 'test': 0, 7)"
    assert error_of("new").startswith(line)
    table([0, 500, -3, 500, 0], Value("int64")).save_to_disk("negative")
    line = "image 2 of split 'train' has the label -1, outside 0..1"
    assert error_of("negative").startswith(line)


def test_a_link_that_gives_a_class_two_names_is_refused():
    image_folder("folder", pets("train"))
    os.symlink("cat", "folder/train/kitten")
    assert "links give a class two names; the folders themselves are /" in error_of()
