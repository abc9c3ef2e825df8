"""Splits, classes and images in folders as users have them; missing shards and labels; notes."""

import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from datasets import ClassLabel, Value
from helpers.make_data import encoded, image_folder, parquet, pictures, table
from helpers.ranks import run_ranks
from helpers.training_runs import records, train_run
from pyarrow import parquet as pq

import eval
import train
from utils.config.settings import TrainConfig
from utils.console import printable
from utils.data.selection import load_data, load_split
from utils.data.sources import check_source
from utils.data.splits import Data, whole_split
from utils.training.summary import classes_row, warn_about_data

PETS = {"cat": 10, "dog": 10}
SHORT = ("--model", "mlp", "--max_steps", "2", "--eval_every", "2", "--global_batch_size", "16")


def load(data="folder", **settings):
    return load_data(TrainConfig(data=str(data), cache_dir="cache", **settings))


def refused(*parts, data="folder", **settings):
    """Assert that loading fails with one line that holds all the parts."""
    with pytest.raises((ValueError, OSError)) as caught:
        load(data, **settings)
    for part in parts:
        assert part in str(caught.value)


def sizes(data):
    return len(data.train), data.evaluation.name, len(data.evaluation)


# -- hidden and outer folders
# ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("junk", [".git", "__MACOSX", "lost+found"])
def test_hidden_folders_are_neither_classes_nor_training_data(junk):
    for place in ("train", "test"):
        image_folder(f"folder/{place}", PETS)
    for place in (
        "folder",
        "folder/train",
        "folder/train/cat",
        "folder/train/cat/deeper",
        "folder/test/dog",
    ):
        image_folder(place, {junk: 3})
    Path("folder/train/cat/._000.png").write_bytes(b"a Mac's notes")
    data = load()
    assert data.class_names == ["cat", "dog"] and sizes(data) == (20, "test", 20)
    assert data.train.notes == ()


@pytest.mark.parametrize("inner", ["", "data/pets"])
@pytest.mark.parametrize(
    ("splits", "expected"),
    [([""], (18, "hold-out of train", 2)), (["train", "test"], (20, "test", 20))],
)
def test_the_outer_folder_of_an_archive_is_looked_into_and_reported(inner, splits, expected):
    for split in splits:
        image_folder(Path("folder/archive") / inner / split, PETS)
    image_folder("folder/__MACOSX/archive", {"cat": 3})
    data = load()
    assert data.class_names == ["cat", "dog"] and sizes(data) == expected
    assert any(
        "folder: using archive, the only folder in it with images" in note
        for note in data.train.notes
    )


def test_a_single_class_is_not_taken_for_an_outer_folder():
    image_folder("folder/cat/2020/may", {"day": 30})
    config = TrainConfig(data="folder", cache_dir="cache")
    assert load_split(config, "train", ["cat"], own_data=False)[0].labels.max() == 0
    refused("one class, cat")


@pytest.mark.parametrize("beside", ["loose.png", "other/train/cat"])
def test_a_data_set_among_others_is_named_as_the_folder_to_give(beside):
    image_folder("folder/pets/train", PETS)
    image_folder("folder/pets/val", PETS)
    Path("folder", beside).parent.mkdir(parents=True, exist_ok=True)
    os.link(
        "folder/pets/val/cat/000.png",
        Path("folder", beside + "0.png" * (not beside.endswith("png"))),
    )
    refused(
        "folder: pets is not a class, as it holds the splits train, val; give --data folder/pets, or"
    )


# -- the names of splits
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "training, other, name",
    [
        ("training", "testset", "test"),
        ("TRAIN", "Validation", "validation"),
        ("train_set", "dev", "validation"),
        ("Training Set", "EVAL", "validation"),
    ],
)
def test_splits_are_known_by_their_usual_names_in_any_case(training, other, name):
    image_folder(f"folder/{training}", PETS)
    image_folder(f"folder/{other}", {"dog": 4})
    for settings in ({}, {"eval_split": name}, {"train_split": training, "eval_split": other}):
        data = load(**settings)
        assert data.class_names == ["cat", "dog"] and sizes(data) == (20, name, 4)
    assert data.train.name == "train"
    own = TrainConfig(data="folder", cache_dir="cache")
    assert [
        len(load_split(own, split, ["cat", "dog"])[0]) for split in (None, "train", name, other)
    ] == [4, 20, 4, 4]


def test_the_usual_names_of_the_validation_split_stay_and_validation_means_them_too():
    for name in ("val", "valid", "eval"):
        image_folder(f"{name}/train", PETS)
        image_folder(f"{name}/{name}", PETS)
        for settings in ({}, {"eval_split": name}, {"eval_split": "validation"}):
            assert sizes(load(name, **settings)) == (20, name, 20)


def test_a_split_folder_inside_a_split_folder_of_the_same_name_is_used():
    image_folder("folder/training_set/training_set", PETS)
    image_folder("folder/test_set/test_set", {"cat": 3})
    data = load()
    assert data.class_names == ["cat", "dog"] and sizes(data) == (20, "test", 3)


def test_of_two_folders_for_the_same_split_none_is_chosen_silently():
    for name, count in (("Train", 3), ("training", 4), ("test", 2)):
        image_folder(f"folder/{name}", dict.fromkeys(PETS, count))
    refused("each of Train, training may be the training split", "--train_split")
    assert sizes(load(train_split="training")) == (8, "test", 4)
    for name, count in (("train", 5), ("val", 2), ("Dev", 3)):
        image_folder(f"other/{name}", dict.fromkeys(PETS, count))
    data, chosen = load("other"), load("other", eval_split="Dev")
    assert sizes(data) == (10, "val", 4) and sizes(chosen) == (10, "Dev", 6)
    assert "found: Dev, val" in data.train.notes[0] and not chosen.train.notes


def test_a_folder_of_only_a_test_split_is_evaluated_and_not_trained_on_unless_asked():
    image_folder("folder/test", PETS)
    refused("no split called train", "set --train_split to one of test")
    assert sizes(load(train_split="test")) == (18, "hold-out of test", 2)
    assert (
        len(
            load_split(
                TrainConfig(data="folder", cache_dir="cache"), None, ["cat", "dog"], own_data=False
            )[0]
        )
        == 20
    )


def test_an_evaluation_split_without_a_training_split_is_refused():
    image_folder("folder", {"cat": 4, "dog": 4, "later/cat": 4, "later/dog": 4})
    refused(
        "--eval_split later: there is no train folder next to it",
        "--train_split",
        eval_split="later",
    )


# -- classes or splits
# -----------------------------------------------------------------------------------------------


def test_a_class_may_be_called_train_or_test():
    image_folder("folder", {"bus": 5, "car": 5, "train": 5})
    data = load()
    assert (
        data.class_names == ["bus", "car", "train"] and len(data.train) + len(data.evaluation) == 15
    )


def test_a_folder_that_may_be_a_split_or_a_class_is_refused_until_a_flag_decides():
    image_folder("folder", {"bus": 5, "car": 5, "train/steam": 5, "train/electric": 5})
    refused(
        "train (with the folders electric, steam)",
        "next to bus, car",
        "--train_split train",
        "--train_split .",
    )
    assert load(train_split="train").class_names == ["electric", "steam"]
    everything = load(train_split=".")
    assert everything.class_names == ["bus", "car", "train"]
    assert len(everything.train) + len(everything.evaluation) == 20
    image_folder("pictures", {"train": 5, "test": 5, "a": 5, "b": 5})
    refused("cannot tell splits from classes: test and train next to a, b", data="pictures")


def test_folders_beside_splits_of_the_same_classes_are_left_out_and_named():
    for split in ("train", "test"):
        image_folder(f"folder/{split}", PETS)
    image_folder("folder", {"unlabelled": 7})
    Path("folder/annotations").mkdir()
    data = load()
    assert data.class_names == ["cat", "dog"] and sizes(data) == (20, "test", 20)
    (note,) = data.train.notes
    assert note.startswith(
        "folder: folders next to the splits are not used: unlabelled (split names are train, "
    )
    assert ", val, " in note and ", dev, " in note


def test_folders_named_like_parts_that_hold_the_same_classes_are_refused_until_named():
    image_folder("folder/seg_train", PETS)
    image_folder("folder/seg_test", PETS)
    refused(
        "seg_test, seg_train may be splits or classes",
        "each holds cat, dog",
        "--train_split and --eval_split",
    )
    assert sizes(load(train_split="seg_train", eval_split="seg_test")) == (20, "seg_test", 20)
    assert load(train_split=".").class_names == ["seg_test", "seg_train"]


def test_empty_class_folders_are_not_classes_and_are_reported():
    image_folder("folder/train", PETS)
    image_folder("folder/test", {"cat": 2})
    for empty in ("train/emu", "train/fox/2020/may", "test/gnu"):
        (Path("folder") / empty).mkdir(parents=True)
    Path("folder/train/emu/photo.heic").touch()
    Path("folder/train/cat/notes.TXT").touch()
    data, left_out = load(), "class folders without readable images are left out"
    assert data.class_names == ["cat", "dog"] and sizes(data) == (20, "test", 2)
    assert data.train.notes == (
        f"folder/train: {left_out}: emu, fox",
        "folder/train: files of unsupported types are left out: .txt (1), .heic (1)",
    )
    assert data.evaluation.notes == (f"folder/test: {left_out}: gnu",)


def test_a_folder_of_images_of_unknown_types_is_refused_with_the_types_that_are_read():
    Path("folder/cat").mkdir(parents=True)
    for name in ("1.HEIC", "2.heic", "3.avif"):
        Path("folder/cat", name).touch()
    refused(
        "folder: no images of a supported type, only .heic (2), .avif (1); convert them to one of .jpg, "
    )


def test_the_start_names_the_classes_and_what_was_left_out_and_the_evaluation_its_data():
    image_folder("folder/train", {"ant": 12, "bee": 30, "cat": 20})
    image_folder("folder/test", {"bee": 4, "cat": 6})
    image_folder("other", {"ant": 3, "bee": 3, "cat": 3})
    for name in ("train/ant/1.heic", "train/cat/000.png", "test/cat/.hidden"):
        Path("folder", name).write_bytes(b"a photo")
    flags = ["--data", "folder", "--bad_images", "skip", *SHORT, "--run_name", "run"]
    out = [outcome.out for outcome in run_ranks(2, train.main, flags)]
    for line in (
        "classes    3, each with 12 (class ant) to 30 (class bee) training images, "
        "0 (class ant) to 6 (class cat) evaluation images",
        "1 of 3 classes have no evaluation image: ant",
        "folder/train: files of unsupported types are left out: .heic (1)",
    ):
        assert out[0].splitlines().count(line) == 1 and line not in out[1]
    assert not any("top5" in record for record in records("run"))
    checkpoint = Path("runs/run/checkpoints/step-00000002")
    for given, data, split, classes in (
        ([], "folder", "test", "2 of 3 with samples"),
        (["--data", "other"], "other", "all images", "3"),
        (["--data", "folder", "--split", "train"], "folder", "train", "3"),
    ):
        (outcome,) = run_ranks(1, eval.main, ["--ckpt", "runs/run", *given])
        lines, found = outcome.out.splitlines(), outcome.value
        assert f"Evaluation of {checkpoint}" in lines and "top5" not in found
        assert (
            f"data             {Path(data).resolve()}, {split}" in lines
            and f"classes          {classes}" in lines
        )
        assert found["checkpoint"] == str(checkpoint.resolve()) and found["data"] == str(
            Path(data).resolve()
        )
        assert (found["split"], found["classes"]) == (split, 3)


def test_the_start_names_the_sizes_of_the_classes_and_those_without_images():
    pixels, names = pictures(6), ["ant", "bee\ncat", "dog"]
    train = whole_split("train", pixels[:4], [0, 0, 1, 1], "")
    even = whole_split("test", pixels, [0, 1, 2, 2, 1, 0], "")
    data = Data(train, even, names)
    assert (
        classes_row(data)
        == "3, each with 0 (class dog) to 2 (class ant) training images, 2 evaluation images"
    )
    assert "1 of 3 classes have no training image: dog" in warn_about_data(data)
    few = Data(even, train.select(np.asarray([0, 1])), names)
    assert "2 of 3 classes have no evaluation image: bee cat, dog" in warn_about_data(few)


def test_images_without_a_class_folder_are_reported_or_refused_if_there_is_nothing_else():
    image_folder("folder/train", PETS)
    image_folder("folder", {"test": 3, "train": 2})
    refused(
        "folder/test: has images but no class folders (3 found)", "--eval_split", "--eval_fraction"
    )
    data = load(eval_fraction=0.5)
    assert sizes(data) == (10, "hold-out of train", 10)
    assert data.train.notes == (
        "folder/train: images next to the class folders have no class and are left out: 2",
    )
    image_folder(".", {"flat": 4})
    refused("flat: has images but no class folders (4 found)", "CLASS/IMAGE.jpg", data="flat")


def test_an_empty_layout_is_refused():
    Path("folder/scans").mkdir(parents=True)
    refused("folder: no images in it; an image folder holds CLASS/IMAGE.jpg")


# -- special files and links
# -----------------------------------------------------------------------------------------


def test_links_to_files_and_folders_are_followed():
    paths = image_folder("elsewhere", {"cat": 6, "wolf": 6})
    image_folder("folder", {"dog": 6})
    os.symlink("../elsewhere/cat", "folder/cat")
    os.symlink(paths[-1].resolve(), "folder/dog/linked.png")
    data = load()
    assert data.class_names == ["cat", "dog"] and len(data.train) + len(data.evaluation) == 13


def test_links_in_circles_are_left_out_and_no_image_is_counted_twice():
    image_folder("folder", {"cat/sub": 6, "dog": 6})
    for link, target in (
        ("cat/up", ".."),
        ("cat/top", "../.."),
        ("cat/zzz", "sub"),
        ("loop", "."),
        ("dog/self", "."),
    ):
        os.symlink(target, f"folder/{link}")
    data = load()
    files = {Path(path).resolve() for path in data.train.images.paths}
    assert data.class_names == ["cat", "dog"] and len(files) == len(data.train.images.paths) == 12
    assert "folder/cat/top" in data.train.notes[0]


def test_an_image_with_two_classes_is_refused():
    image_folder("folder", {"cat/sub": 6, "dog": 6})
    os.symlink("../dog", "folder/cat/dogs")
    refused("folder/cat/dogs", "also a folder of class dog", "remove the link")
    os.unlink("folder/cat/dogs")
    os.symlink("dog", "folder/puppy")
    refused("folder/puppy: is also a folder of class dog", "remove the link")


@pytest.mark.parametrize(
    ("link", "target"), [("val", "train"), ("val/cat/more", "../../train/dog/deep")]
)
def test_an_evaluation_folder_that_links_to_training_images_is_refused(link, target):
    image_folder("folder/train", PETS | {"dog/deep": 10})
    image_folder("folder/test", PETS)
    if link != "val":
        image_folder("folder/val", PETS)
    os.symlink(target, f"folder/{link}")
    refused(
        "folder/val: the folder of class cat is also used for training, in folder/train; remove the link"
    )
    # only the folders that are used are compared
    assert load(eval_split="test").evaluation.name == "test"
    assert load(eval_split="train").evaluation.name == "train"


def test_class_names_that_are_not_utf8_or_hold_a_newline_are_trained_saved_and_resumed():
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


def test_a_path_that_a_checkpoint_could_not_name_is_refused_at_once():
    image_folder("d\udce9ta", PETS)
    for settings in ({"data": "d\udce9ta"}, {"data": "digits", "cache_dir": "c\udce9"}):
        with pytest.raises(ValueError, match="not UTF-8; rename it"):
            check_source(TrainConfig(**settings))


# -- shards and labels
# -----------------------------------------------------------------------------------------------

NAMED = ClassLabel(names=["cat", "dog", "emu"])


def shards(folder, total, numbers, name="train", kind="parquet", tail=""):
    Path(folder).mkdir(exist_ok=True)
    for number in numbers:
        part = table([0, 1, 2] * 4, NAMED)
        getattr(part, f"to_{kind}")(f"{folder}/{name}-{number:05}-of-{total:05}{tail}.{kind}")


def test_a_missing_shard_is_named():
    shards("folder", 10, [number for number in range(10) if number not in (4, 9)], "my-set-train")
    missing = "my-set-train-00004-of-00010, my-set-train-00009-of-00010"
    refused(
        f"folder: 2 of 10 shards not found: {missing};",
        "remove -of-00010 from the names of the others",
    )
    shards("folder", 10, [4, 9], "my-set-train")
    data = load()
    assert len(data.train) + len(data.evaluation) == 120


def test_shards_may_be_counted_from_one_and_a_single_file_may_be_given():
    shards("folder", 3, [1, 2, 3])
    shards("folder", 1, [0], "test", tail="-0a1b2c3d")
    assert sizes(load()) == (36, "test", 12)
    shards("other", 3, [2])
    assert len(load("other/train-00002-of-00003.parquet").train) == 11
    shards("huge", 10**9, [2])
    refused(
        "999999999 of 1000000000 shards not found: train-00000-of-1000000000",
        "(13 in all)",
        data="huge",
    )


def test_a_shard_that_is_there_twice_is_refused():
    shards("folder", 2, [0, 1])
    for total, number, tail in ((2, 1, " (1)"), (2, 1, "-0a1b2c")):
        shards("folder", total, [number], tail=tail)
        copy = f"train-{number:05}-of-{total:05}{tail}.parquet"
        refused(copy, "train-0000", "remove one of the two")
        Path(f"folder/{copy}").unlink()
    assert len(load().train) == 22


def test_tables_must_be_regular_files_and_hidden_ones_are_left_alone():
    parquet("folder", train=table([0, 1, 2] * 10, NAMED))
    Path("folder/._train-00000-of-00001.parquet").write_bytes(b"a Mac's notes")
    assert len(load().train) == 27
    os.symlink("nowhere", "folder/test.parquet")
    refused("folder/test.parquet: is not a regular file")
    os.mkfifo("pipe.parquet")
    refused("pipe.parquet: is neither a folder nor a regular file", data="pipe.parquet")


def numbered(path, labels):
    table(labels, Value("int64")).save_to_disk(path)
    return path


def test_integer_labels_with_large_gaps_are_names_of_classes():
    values = [1000 * number for number in range(10)]
    data = load(numbered("folder", values[::-1] * 4))
    assert data.class_names == [str(value) for value in values]
    for split in (data.train, data.evaluation):
        assert [values[label] for label in split.labels] == [
            values[9 - row % 10] for row in split.image_index
        ]
        assert (
            "only the labels that occur are classes: 0, 1000, 2000, ... (10 in all)"
            in split.notes[0]
        )
    fewer = TrainConfig(data=numbered("fewer", [9000, 0, 3000] * 2), cache_dir="cache")
    assert (
        load_split(fewer, None, data.class_names, own_data=False)[0].labels.tolist()
        == [9, 0, 3] * 2
    )
    parquet("new", train=table([0, 1000] * 9, Value("int64")), test=table([0, 7], Value("int64")))
    refused("the training split has no class 7, only 0, 1000 (split 'test': 0, 7)", data="new")


def test_a_few_missing_numbers_stay_classes_and_negative_ones_have_no_label():
    assert load(numbered("half", [1, 3, 1, 3] * 5)).class_names == ["0", "1", "2", "3"]
    assert load(numbered("less", [1, 4, 1, 4] * 5)).class_names == ["1", "4"]
    refused(
        "image 2", "has the label -1", "unlabelled", data=numbered("negative", [0, 500, -3, 500, 0])
    )


def test_a_shard_with_other_columns_than_the_others_is_refused():
    made = table([0, 1] * 10, ClassLabel(names=["a", "b"]))
    Path("folder").mkdir()
    made.to_parquet("folder/train-00000-of-00002.parquet")
    made.rename_column("label", "kind").to_parquet("folder/train-00001-of-00002.parquet")
    refused("folder: cannot be read (Couldn't cast", "fix or remove the damaged file")


def test_string_labels_may_hold_newlines_and_must_be_utf8():
    images = [{"bytes": encoded(image, "PNG"), "path": None} for image in pictures(20)]
    offsets = pa.array(range(0, 63, 3), pa.int32()).buffers()[1]
    wrong = pa.StringArray.from_buffers(20, offsets, pa.py_buffer(b"caf\xe9aa" * 10))
    for name, labels in (("good", pa.array(["a\nb", "c"] * 10)), ("bad", wrong)):
        pq.write_table(pa.table({"image": images, "label": labels}), f"{name}.parquet")
    assert load("good.parquet").class_names == ["a\nb", "c"]
    refused("--label_column label: a label is not UTF-8 text", data="bad.parquet")


# -- what may surprise
# -----------------------------------------------------------------------------------------------


def test_folders_with_images_below_the_classes_are_said_not_to_be_classes():
    for name in ("a", "b", "c"):
        image_folder(f"folder/pets/{name}", {"": 2})
        image_folder(f"folder/wild/{name}", {"": 2})
    data = load()
    assert data.class_names == ["pets", "wild"]
    assert data.train.notes == (
        "folder: folders inside class folders that hold images, but are not classes: 6",
    )


def test_images_are_known_by_other_endings_and_without_one_by_their_content():
    paths = image_folder("folder", {"cat": 12, "dog": 12}, kind="jpg")
    for place, path in enumerate(paths):
        path.rename(path.with_suffix(("", ".jfif", ".JPE", ".jpg")[place % 4]))
    Path("folder/cat/README").write_text("no image")
    os.mkfifo("folder/dog/pipe")  # must not be opened
    os.symlink("itself", "folder/dog/itself")
    data = load()
    assert len(data.train) + len(data.evaluation) == 24
    assert data.train.notes == (
        "folder: files of unsupported types are left out: no extension (3)",
    )


def test_a_single_class_is_refused_with_what_was_left_out():
    image_folder("folder", {"cat": 20})
    Path("folder/dog").mkdir()
    Path("folder/dog/1.heic").touch()
    refused(
        "has one class, cat; folder: class folders without readable images are left out: dog; folder: files of"
    )


# -- lines at the start of a run
# -------------------------------------------------------------------------------------


def test_a_name_with_escape_codes_is_printed_without_them():
    assert printable("cat\x1b[31m\n two\udce9\u200b") == "cat<U+001B>[31m two<U+DCE9><U+200B>"


@pytest.mark.full
def test_a_test_split_that_chooses_the_checkpoint_is_named_at_the_start_and_on_the_page():
    for other in ("test", "val"):
        for split in ("train", other):
            image_folder(f"{other}-set/{split}", PETS)
        flags = ["--data", f"{other}-set", *SHORT, "--run_name", other, "--report", "true"]
        (outcome,) = run_ranks(1, train.main, flags)
        start = "split test chooses the best checkpoint, so its score will be slightly too high; "
        assert (start in outcome.out) == (other == "test")
        page = Path(f"runs/{other}/report.html").read_text()
        assert ("The split test chose the best checkpoint" in page) == (other == "test")
