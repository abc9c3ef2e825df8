"""utils/data/csv_file.py: what a list of images may look like, what is refused, runs on it."""

import os
import shutil
import unicodedata
from itertools import product
from pathlib import Path

import pytest
from helpers.loading import RUN, error_of, evaluated, invert, load
from helpers.make_data import image_folder
from helpers.training_runs import (
    kept_in,
    records,
    refused,
    restore,
    same_tensors,
    train_run,
    weights,
    words,
)

import train
from utils.data.sources import absolute_data, open_source
from utils.settings.train import TrainConfig

FLAGS = [*RUN, "--max_steps"]
LISTED = ["--data", "photos/labels.csv", *FLAGS]
MORE = words("9 --run_name run --resume auto")


def write(text, name="labels.csv"):
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return name


def opened(data, **settings):
    return open_source(TrainConfig(data=data, **settings))


def samples(source, split="train"):
    """The path of each image, relative to the working directory, and the name of its class."""
    found = source.split(split)
    paths = [os.path.relpath(found.images.paths[row]) for row in found.image_index]
    return [
        (path, source.class_names[label]) for path, label in zip(paths, found.labels, strict=True)
    ]


def error(text):
    with pytest.raises(ValueError) as caught:
        source = opened(write(text))
        for split in source.openers:
            source.split(split)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -- what a file may look like
# ----------------------------------------------------------------------

EXPECTED = [("a.png", "cat"), ("b, c.png", "dog, small"), ("deep/d.png", "cat")]
PLAIN = 'path,label\na.png,cat\n"b, c.png","dog, small"\ndeep/d.png,cat\n'
FILES = {
    "plain": PLAIN,
    "no last newline": PLAIN[:-1],
    "written by a spreadsheet": b"\xef\xbb\xbf" + PLAIN.replace("\n", "\r\n").encode(),
    "lines that end in CR": PLAIN.replace("\n", "\r"),
    "blank lines": PLAIN.replace("a.png", "\n\na.png") + "\n,\n , \n\n",
    "another order and more columns": "n,LABEL,,Path\n0,cat,x,a.png\n"
    '1,"dog, small",,"b, c.png"\n2,cat,,deep/d.png\n',
    "spaces": 'path, label\na.png , cat\n"b, c.png", "dog, small"\n deep/d.png,cat\n',
    "semicolons": "path;label\na.png;cat\nb, c.png;dog, small\ndeep/d.png;cat\n",
    "Excel's line that names the separator": "sep=;\r\npath;label\r\na.png;cat\r\n"
    "b, c.png;dog, small\r\ndeep/d.png;cat\r\n",
    "tabs": "path\tlabel\na.png\tcat\nb, c.png\tdog, small\ndeep/d.png\tcat\n",
}


@pytest.mark.parametrize("kind", FILES)
def test_the_columns_path_and_label_are_the_samples(kind):
    source = opened(write(FILES[kind]))
    assert samples(source) == EXPECTED and source.class_names == ["cat", "dog, small"]
    assert list(source.openers) == ["train"]
    assert source.split("train").images.names == [path for path, _ in EXPECTED]


def test_other_columns_are_named_by_flags_and_other_suffixes_are_known():
    for name in ("list.tsv", "LIST.CSV"):
        data = write("image,label,species\nx.png,1,cat\n", name)
        source = opened(data, image_column="image", label_column="species")
        assert samples(source) == [("x.png", "cat")]


def test_paths_are_relative_to_the_file_or_absolute(monkeypatch):
    Path("elsewhere").mkdir()
    far, near = Path("elsewhere/x.png").resolve(), Path("photos/near.png").resolve()
    rows = f"{far},cat\n{near},cat\n../elsewhere/y.png,dog\nz.png,dog\n"
    files = opened(write("path,label\n" + rows, "photos/list.csv")).split("train").images
    assert files.names == [str(far), "near.png", "../elsewhere/y.png", "z.png"]
    expected = [far.with_name("y.png"), near.with_name("z.png")]
    assert [Path(path).resolve() for path in files.paths[2:]] == expected
    Path("linked.csv").symlink_to("photos/list.csv")
    saved = absolute_data("linked.csv")
    assert samples(opened(saved))[3] == ("z.png", "dog")  # next to the link, which keeps its suffix
    monkeypatch.chdir("photos")
    assert opened("list.csv").split("train").images.names == files.names


@pytest.mark.parametrize(
    "labels, order",
    [
        ("10 9 1 07 9", "1 07 9 10"),
        ("10 9 b B -1", "-1 10 9 B b"),
        ("NA null 1", "1 NA null"),
    ],
)
def test_classes_that_are_all_numbers_are_in_numeric_order_others_as_folders(labels, order):
    rows = "".join(f"{number}.png,{label}\n" for number, label in enumerate(labels.split()))
    source = opened(write(f"path,label\n{rows}"))
    assert source.class_names == order.split()
    assert [label for _, label in samples(source)] == labels.split()


@pytest.mark.parametrize("written, name", [("Dev", "validation"), ("fold 2", "fold 2")])
def test_splits_have_the_names_that_folders_may_have(written, name):
    write(f"path,label,split\na.png,cat,Training\nb.png,dog,Training\nc.png,cat,{written}\n")
    source = opened("labels.csv")
    assert list(source.openers) == ["train", name] and source.class_names == ["cat", "dog"]
    assert samples(source) == [("a.png", "cat"), ("b.png", "dog")]
    assert samples(source, name) == [("c.png", "cat")]
    assert source.aliases["Training"] == "train" and source.aliases.get(written, name) == name


def test_the_training_split_that_is_asked_for_defines_the_classes():
    write("path,label,split\na.png,cat,train\nb.png,dog,fold 2\nc.png,emu,fold 2\n")
    assert opened("labels.csv", train_split="fold 2").class_names == ["dog", "emu"]


def test_rows_of_an_unusual_split_are_said_to_be_left_out_unless_a_flag_names_it():
    image_folder("photos", {"cat": 10, "dog": 10})
    rows = [
        f"{name}/{number:03}.png,{name},{'fold 2' if number > 7 else 'train'}\n"
        for name, number in product(("cat", "dog"), range(10))
    ]
    data = write("path,label,split\n" + "".join(rows), "photos/labels.csv")
    (note,) = load(data).train.notes
    assert "labels.csv: rows of other splits are left out: fold 2 (4)" in note
    found = load(data, eval_split="fold 2")
    assert len(found.evaluation) == 4 and not found.train.notes and not found.evaluation.notes


# -- what is refused
# ----------------------------------------------------------------------


REFUSED = {
    "a.png,cat\nb.png,dog\n": ", row 1: must name one column 'path', but has a.png, cat;",
    "path,label,label\na.png,cat,dog\n": ", row 1: must name one column 'label'",
    "": ": cannot be read (No columns",
    " ,\npath,label\n,\n\n": ", row 2: there is no image",
    "path,label\na.png,cat\n\nb.png,\n": ", row 4: the label is ''",
    "path,label,split\na.png,cat\n": ", row 2: the split is ''",
    "path,label\n,cat\n": ", row 2: the path is ''",
    "path,label\na, b.png,cat\n": ": cannot be read (Error tokenizing data. "
    "C error: Expected 2 fields in line 2",
    "path,label\na.png,cat\nb.png,dog\na.png,dog\n": ", row 4: CWD/a.png is also in row 2",
    'path,label\n"a\n.png",cat\nb.png,\n': ", row 3: the label is ''",  # as a spreadsheet counts
    'path,label\na.png,cat\n"b.png,dog\nc.png,cat\n': ": cannot be read (Error tokenizing",
    b"path,label\na.png,caf\xe9\n": ": cannot be read ('utf-8' codec can't decode",
    "path,label,split\na.png,cat,train\nb.png,dog,test\n": ", row 3: the training split has no"
    " class 'dog'",
    "path,label,split\na.png,cat,val\nb.png,dog,dev\n": ": the splits val and dev may be the same",
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_file_that_cannot_be_right_is_refused_with_its_name_and_row(text):
    line = error(text).replace(os.getcwd(), "CWD")
    assert line.startswith("CWD/labels.csv" + REFUSED[text])


def test_an_image_that_is_listed_in_two_spellings_is_refused_as_in_one():
    Path("real/a").mkdir(parents=True)
    os.symlink("real", "linked")
    os.symlink("real/a", "short")  # short/.. is real, and not this folder
    found = Path("real").resolve()
    for second in ("real/a/../a/x.png", f"{found}/../linked/a/x.png", "short/../a/x.png"):
        rows = f"real/a/x.png,cat,train\ny.png,dog,train\n{second},dog,val\n"
        line = error("path,label,split\n" + rows)
        assert f"labels.csv, row 4: {os.path.join(os.getcwd(), second)} is also in row 2" in line
    text = "path,label\nx.png,cat\nshort/../x.png,dog\nreal/a/x.png,dog\n"
    text += "REAL/a/x.png,cat\nnone/../y.png,cat\n"
    assert len(opened(write(text)).split("train")) == 5


def test_paths_with_backslashes_or_without_endings_are_refused_with_the_file_meant():
    image_folder("photos", {"cat": 2})
    for written in ("photos\\cat\\000.png", "photos/cat/000", "photos\\cat\\000"):
        line = error(f"path,label\nphotos/cat/001.png,dog\n{written},cat\n")
        meant = f"{os.getcwd()}/photos/cat/000.png"
        assert f"row 3: there is no file {os.getcwd()}/{written}, but {meant};" in line


def test_a_path_may_begin_in_the_home_folder_and_wrong_ones_have_a_fix(monkeypatch):
    paths = image_folder("home/photos", {"cat": 2, "dog": 2})
    monkeypatch.setenv("HOME", f"{os.getcwd()}/home")
    rows = [f"~/photos/{path.parent.name}/{path.name},{path.parent.name}" for path in paths]
    found = opened(write("\n".join(["path,label", *rows]))).split("train").images
    assert all(map(os.path.samefile, found.paths, paths))
    rows[1] = "https://example.org/a.png,cat"
    line = error_of(write("\n".join(["path,label", *rows])))
    assert "/https://example.org/a.png (No such file" in line
    assert "; correct these paths or files, or leave them out" in line
    line = error("path,label\na.png,cat\nb.png,dog\na.png,small\n")
    assert line.endswith("list each image once, with all its labels, as in a|b")


def test_rows_are_counted_as_a_spreadsheet_does_also_after_a_separator_line():
    assert ", row 4: the label is ''" in error("sep=;\npath;label\na.png;cat\nb.png;\n")


@pytest.mark.parametrize("folder", ["Übung/é", "dog/../Übung/é"])
def test_a_file_under_another_unicode_form_of_its_path_is_found(folder):
    Path("dog").mkdir()
    paths = image_folder(unicodedata.normalize("NFD", "Übung"), {"é": 2})
    text = f"path,label\n{folder}/000.png,cat\nÜbung/é/001.png,dog\n"
    found = opened(write(unicodedata.normalize("NFC", text))).split("train")
    assert all(map(os.path.samefile, found.images.paths, paths))


# -- runs
# ----------------------------------------------------------------------


def write_list(relabelled=(), more=""):
    """photos/labels.csv with the 60 images of photos/, in the order of the folder."""
    rows = [
        f"{name}/{number:03}.bmp,{'cat' if number in relabelled else name}"
        for name, number in product(("cat", "dog"), range(30))
    ]
    write("\n".join(["path,label", *rows, more]), "photos/labels.csv")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Runs on two processes on 60 images, of a CSV file and of the folder that it lists."""
    folder = tmp_path_factory.mktemp("trained") / "work"
    with kept_in(folder):
        image_folder("photos", {"cat": 30, "dog": 30}, kind="bmp")
        write_list()
        train_run(2, "run", *LISTED, "6")
        train_run(2, "whole", *LISTED, "9")
        train_run(2, "folder", "--data", "photos", *FLAGS, "9")
    return folder


@pytest.fixture
def trained(own_folders, finished, monkeypatch):
    monkeypatch.chdir(restore(finished))


def test_a_run_on_the_list_is_the_run_on_the_folder(trained):
    for kind, key in product(("train", "eval"), ("loss", "accuracy")):
        whole, folder = ([r[key] for r in records(run, kind)] for run in ("whole", "folder"))
        assert whole and whole == folder
    assert same_tensors(weights("whole"), weights("folder"))


@pytest.mark.full
def test_a_resumed_run_on_a_list_that_moved_continues_with_the_same_bits(trained):
    before = evaluated()[0]
    os.rename("photos", "elsewhere")
    found = evaluated("--data", "elsewhere/labels.csv")[0]
    assert all(found[name] == before[name] for name in words("loss accuracy count split"))
    assert found["count"] == 6
    train_run(2, "run", "--data", "elsewhere/labels.csv", *FLAGS, *MORE)
    assert same_tensors(weights("run"), weights("whole"))


def test_a_resume_keeps_the_labels_of_its_list_and_names_images_that_changed(trained):
    write_list(relabelled=(10, 11))
    train_run(2, "run", *LISTED, *MORE)
    assert same_tensors(weights("run"), weights("whole"))
    invert("photos/cat/007.bmp")
    line = refused(train.main, *LISTED, *MORE, "--max_steps", "10")
    assert "1 of 60 images changed: cat/007.bmp;" in line


@pytest.mark.full
def test_rows_that_are_new_or_in_another_order_do_not_move_samples(trained):
    shutil.copy("photos/cat/000.bmp", "photos/a.bmp")
    before = evaluated()[0]
    write_list(more="a.bmp,ant\n")  # the numbers of the other classes change
    assert evaluated()[0]["loss"] == before["loss"]
    write_list(more="a.bmp,dog\n")
    header, *rows = Path("photos/labels.csv").read_text().splitlines()
    write("\n".join([header, *reversed(rows)]), "photos/labels.csv")
    assert evaluated()[0]["loss"] == before["loss"]
    train_run(2, "run", *LISTED, *MORE)
    assert same_tensors(weights("run"), weights("whole"))


@pytest.mark.full
def test_another_list_is_evaluated_whole_or_by_its_splits(trained):
    header, rows = "path,label,split\n", "cat/000.bmp,cat,train\ndog/002.bmp,dog,train\n"
    write("path,label\ncat/000.bmp,cat\ndog/000.bmp,dog\ndog/001.bmp,dog\n", "photos/flat.csv")
    write(f"{header}{rows}dog/001.bmp,dog,fold 2\n", "photos/odd.csv")
    write(f"{header}{rows}dog/000.bmp,dog,val\ndog/001.bmp,dog,val\n", "photos/val.csv")
    for name, more, count, split in (
        ("flat", "", 3, "all images"),
        ("odd", "", 2, "train"),
        ("val", "", 2, "val"),
        ("val", "--split validation", 2, "val"),
    ):
        found, out = evaluated("--data", f"photos/{name}.csv", *words(more))
        assert (found["count"], found["split"]) == (count, split)
        assert f"data             {Path(f'photos/{name}.csv').resolve()}, {split}\n" in out
