"""A run keeps a record of its samples: its hold-out stays the same, and changes are reported in
words.
"""

import gzip
import json
import os
import shutil
import unicodedata
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from datasets import ClassLabel
from helpers.make_data import image_folder, parquet, pictures, table
from helpers.ranks import run_ranks
from helpers.training_runs import (
    kept_in,
    records,
    refused,
    restore,
    same_tensors,
    train_run,
    weights,
)
from PIL import Image

import eval
import train
import utils.data.sources as sources
from utils.config.settings import TrainConfig
from utils.data.samples import FILE, list_samples, match_files, read_samples
from utils.data.splits import Files, whole_split
from utils.runs.manifest import write_manifest

FLAGS = (
    "--data",
    "data",
    "--model",
    "mlp",
    "--model_args",
    "{hidden: 8}",
    "--threads",
    "1",
    "--global_batch_size",
)
FLAGS += (
    "12",
    "--lr",
    "0.01",
    "--lr_schedule",
    "constant",
    "--log_every",
    "1",
    "--eval_every",
    "9",
    "--save_every",
)
FLAGS += ("3", "--max_steps", "6")
MORE = (*FLAGS[:-1], "9", "--run_name", "run", "--resume", "auto")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run on a folder of 60 BMP files, whose size says nothing of their content."""
    folder = tmp_path_factory.mktemp("trained") / "work"
    with kept_in(folder):
        paths = image_folder("data", {"cat": 30, "dog": 30}, kind="bmp")
        train_run(1, "run", *FLAGS)
        train_run(1, "whole", *FLAGS[:-1], "9")
    return folder, paths


@pytest.fixture
def trained(own_folders, finished, monkeypatch):
    """The run `run`, which may go on for three updates, the run `whole`, which has them, and their
    data.
    """
    folder, paths = finished
    monkeypatch.chdir(restore(folder))
    return paths


def evaluated(*flags):
    (outcome,) = run_ranks(1, eval.main, ["--ckpt", "runs/run", "--json", "eval.json", *flags])
    assert outcome.code == 0, outcome.err
    return outcome.value, outcome.out


def keep_time(path: Path, change) -> None:
    """Change a file and restore its times, as a copy or an archive does."""
    status = path.stat()
    change(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def invert(path: Path) -> None:
    Image.fromarray(255 - np.asarray(Image.open(path))).save(path)


def checkpoint() -> Path:
    return Path("runs/run/checkpoints/step-00000006")


def numbers(record: dict) -> dict:
    return {name: record[name] for name in ("accuracy", "loss", "count", "per_class_accuracy")}


def test_files_and_classes_renamed_to_another_unicode_form_are_the_same():
    # the other form is in another place in the order of text
    image_folder("data", {"Café": 30, "Cafz": 30})
    Path("data/Cafz/001.png").rename("data/Cafz/é.png")
    train_run(1, "run", *FLAGS)
    train_run(1, "whole", *FLAGS[:-1], "9")
    before, _ = evaluated()
    known, _ = evaluated("--split", "train")
    Path("data/Café").rename(unicodedata.normalize("NFD", "data/Café"))
    Path("data/Cafz/é.png").rename(unicodedata.normalize("NFD", "data/Cafz/é.png"))
    after, out = evaluated()
    assert numbers(after) == numbers(before) and numbers(
        evaluated("--split", "train")[0]
    ) == numbers(known)
    assert "matched although in another Unicode form: Café" in unicodedata.normalize("NFC", out)
    assert not any(line in out for line in ("changed", "no longer in", "new files"))
    Path("data").rename("moved")  # elsewhere, it still counts as the data of the run
    assert numbers(evaluated("--data", "moved")[0]) == numbers(before)
    Path("moved").rename("data")
    train_run(1, "run", *MORE)
    assert same_tensors(weights("run"), weights("whole"))
    shutil.copytree("data/Cafz", "data/emu")
    line = refused(train.main, *FLAGS[:-1], "12", "--run_name", "run", "--resume", "auto")
    assert "the classes changed since training (new: emu)" in line


def test_new_files_do_not_move_samples_from_training_to_evaluation(trained):
    before, _ = evaluated()
    for number in range(5):
        shutil.copy(trained[0], f"data/cat/0000{number}.bmp")  # sorts before all others
    after, out = evaluated()
    assert numbers(after) == numbers(before) and after["count"] == 6
    assert "split 'train' has new files since training, which are left out: cat/00000.bmp" in out
    assert evaluated("--split", "train")[0]["count"] == 54


def test_a_resume_goes_on_with_the_samples_it_began_with_when_files_are_new(trained):
    shutil.copy(trained[0], "data/dog/00.bmp")
    (outcome,) = run_ranks(1, train.main, [*MORE])
    assert outcome.code == 0 and "split 'train' has new files" in outcome.out
    assert_whole()


def assert_whole():
    assert [r["loss"] for r in records("run", "train")] == [
        r["loss"] for r in records("whole", "train")
    ]
    assert same_tensors(weights("run"), weights("whole"))


CHANGES = {
    "one changed": (lambda paths: keep_time(paths[7], invert), ("1 of ", "changed: cat/007.bmp")),
    "deleted": (
        lambda paths: paths[40].unlink(),
        ("dog/010.bmp (no longer in the data set)", "--bad_images skip"),
    ),
    "a class more": (
        lambda paths: image_folder("data", {"emu": 3}),
        ("the classes changed", "new: emu"),
    ),
    "a class less": (
        lambda paths: shutil.rmtree("data/cat"),
        ("the classes changed", "removed: cat"),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_resume_reports_in_words_what_changed_in_the_data(trained, change):
    act, texts = CHANGES[change]
    act(trained)
    line = refused(train.main, *MORE)
    assert all(text in line for text in texts), line
    record = read_samples(checkpoint() / FILE)
    assert not any(
        part.labels in line or (part.content and part.content in line) for part in record.parts
    )


def test_an_evaluation_reports_changed_images_and_goes_on(trained):
    for path in trained:
        keep_time(path, invert)
    record, out = evaluated()
    assert record["count"] == 6 and "6 of 6 images of 'hold-out of train' changed: " in out


def test_an_evaluation_reports_missing_files_and_leaves_them_out_only_on_request(trained):
    gone = Path("data", read_samples(checkpoint() / FILE).evaluation.names[2])
    gone.unlink()
    line = refused(eval.main, "--ckpt", "runs/run")
    assert "1 of 6 images of split 'hold-out of train' cannot be read" in line
    assert f"{gone} (no longer in the data set)" in line
    record, out = evaluated("--bad_images", "skip")
    assert record["count"] == 5 and "1 of 6 images" in out


def test_a_data_set_that_moved_is_still_the_run_s_own(trained):
    before, _ = evaluated()
    os.rename("data", "elsewhere")
    assert numbers(evaluated("--data", "elsewhere")[0]) == numbers(before)
    train_run(1, "run", "--data", "elsewhere", *MORE[2:])
    assert_whole()


def test_images_to_evaluate_on_that_the_run_trained_on_are_counted(trained):
    os.rename("data", "elsewhere")
    held = read_samples(checkpoint() / FILE).evaluation.names
    Path("elsewhere", held[0]).unlink()
    record, out = evaluated("--data", "elsewhere")
    assert (
        record["count"] == 59 and "the run trained on 54 of the 59 images of split 'train'" in out
    )


def test_other_settings_for_the_splits_are_refused_with_the_changes(trained):
    line = refused(train.main, *MORE, "--eval_fraction", "0.5")
    assert "--eval_fraction was None when the run started, and is now 0.5" in line


NAMED = ClassLabel(names=["cat", "dog"])


def write_table(images, labels=None):
    shutil.rmtree("data", ignore_errors=True)
    parquet(
        "data",
        train=table(
            [i % 2 for i in range(len(images))] if labels is None else labels, NAMED, list(images)
        ),
    )


@pytest.mark.parametrize(
    ("images", "labels", "text"),
    [
        pytest.param(
            lambda p: p[:-3],
            None,
            "split 'train' had 60 samples and now has 57",
            marks=pytest.mark.full,
        ),
        (lambda p: 255 - p, None, "the images of split 'train' changed"),
        pytest.param(
            lambda p: p, [1, 0] * 30, "the labels of split 'train' changed", marks=pytest.mark.full
        ),
    ],
)
def test_a_table_that_changed_is_refused_by_resume_and_by_evaluation_of_its_hold_out(
    images, labels, text
):
    pixels = pictures(60)
    write_table(pixels)
    train_run(1, "run", *FLAGS)
    write_table(pixels)  # the same rows in a new file
    assert evaluated()[0]["accuracy"] == records("run", "eval")[-1]["accuracy"]
    write_table(images(pixels), labels)
    assert text in refused(train.main, *MORE)
    line = refused(eval.main, "--ckpt", "runs/run")
    assert text in line and "--split train" in line


def test_a_table_to_evaluate_on_that_changed_is_refused_by_a_resume():
    parquet("data", train=table([0, 1] * 30, NAMED), test=table([0, 1] * 10, NAMED))
    train_run(1, "run", *FLAGS)
    parquet("data", test=table([0, 1] * 9, NAMED))
    assert "split 'test' had 20 samples and now has 18" in refused(train.main, *MORE)
    assert "split 'test' had 20 samples and now has 18" in evaluated()[1]


def test_arrays_in_memory_are_known_by_their_content():
    """A data set of torchvision may hold its images as one array."""
    train_run(1, "run", "--data", "digits", *FLAGS[2:])
    assert "the images of split 'train' changed" in refused(
        _train_on_dimmed_digits, "--data", "digits", *MORE[2:]
    )


def _train_on_dimmed_digits(flags):
    digits = sources.SOURCES["digits"]

    def dimmed(*given):
        source = digits(*given)
        source.split("train").images[17] //= 2
        return source

    sources.SOURCES["digits"] = dimmed
    train.main(flags)


def test_ranks_that_see_different_images_are_refused():
    for name in ("one", "two"):
        image_folder(f"{name}/data", {"cat": 30, "dog": 30}, seed=len(name), kind="bmp")
    Path("two/data/dog/000.bmp").write_bytes(Path("two/data/dog/001.bmp").read_bytes())
    line = refused(
        _train_in_a_folder_of_its_own, *FLAGS, "--output_dir", os.path.abspath("runs"), processes=2
    )
    assert "rank 1 has different images in --data data than rank 0" in line


def _train_in_a_folder_of_its_own(flags):
    os.chdir("one" if os.environ["RANK"] == "0" else "two")
    train.main(flags)


HOSTILE = {
    "not gzip": lambda values: b"names",
    "cut short": lambda values: gzip.compress(b"{}" * 999)[:-9],
    "nested": lambda values: gzip.compress(b"[" * 100_000),
    "bomb": lambda values: gzip.compress(b" " * (2**30 + 2), 1),
    "small bomb": lambda values: values["train"].update(ends=[0] * 10**7),
    "names": lambda values: values["train"]["names"].__setitem__(3, 5),
    "counts": lambda values: values["evaluation"].update(count=10**9),
    "choice": lambda values: values["choices"].update(seed="0"),
}


def change_record(change):
    path = checkpoint() / FILE
    values = json.loads(gzip.decompress(path.read_bytes()))
    path.write_bytes(change(values) or gzip.compress(json.dumps(values).encode()))
    (checkpoint() / "manifest.json").unlink()
    write_manifest(checkpoint())


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.full] * name.endswith(("bomb", "short")))
        for name in HOSTILE
    ],
)
def test_a_stranger_s_record_is_refused_in_one_line(trained, name):
    change_record(HOSTILE[name])
    assert f"{FILE}: damaged" in refused(eval.main, "--ckpt", "runs/run")


def test_names_in_a_stranger_s_record_open_no_file_outside_the_data(trained):
    Path("secret.bmp").write_bytes(trained[0].read_bytes())
    change_record(lambda values: values["evaluation"]["names"].__setitem__(0, "../secret.bmp"))
    assert "../secret.bmp (no longer in the data set)" in refused(eval.main, "--ckpt", "runs/run")
    assert evaluated("--bad_images", "skip")[0]["count"] == 5


def test_files_that_changed_class_are_counted_whatever_their_numbers():
    """As in a data set whose labels come from a list."""
    files = Files([str(path) for path in image_folder("data", {"all": 6})], "data")
    splits = [
        replace(whole_split("train", files, labels, "made"), checksums=np.arange(6))
        for labels in ([0, 1, 0, 1, 0, 1], [0, 1, 0, 0, 0, 0], [1, 2, 1, 2, 1, 2])
    ]
    before, changed, renumbered = splits
    record = list_samples(TrainConfig(), ["cat", "dog"], (before, before), (before, before))
    found = match_files(record, record.train, changed, ["cat", "dog"])
    assert found.changes == ["2 of 6 images of 'train' changed class: all/003.png, all/005.png"]
    found = match_files(record, record.train, renumbered, ["ant", "cat", "dog"])
    assert found.changes == [] and found.split.labels.tolist() == [1, 2, 1, 2, 1, 2]
