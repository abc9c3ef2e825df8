"""--bad_images: all found at the start, left out only on request, equally on any topology."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from datasets import ClassLabel
from helpers.loading import RUN, error_of, load
from helpers.make_data import encoded, heic, image_folder, parquet, pictures, smooth, table
from helpers.ranks import run_ranks
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
from PIL import Image

import eval
import train
from utils.data.check import check_images
from utils.data.order import permutation
from utils.data.splits import Files, whole_split
from utils.settings.train import TrainConfig

SIDE = 100  # photographs begin above 96 pixels
FLAGS = ["--data", "data", *RUN, "--image_size", str(SIDE)]
FLAGS += words("--lr 0.001 --save_every 2 --max_steps 6 --num_workers 1 --flip false")
SKIP = [*FLAGS, "--bad_images", "skip"]
RESUME = words("--run_name run --resume auto")


def photographs(kind="png"):
    return image_folder("data", {"cat": 30, "dog": 30}, size=(SIDE, SIDE), kind=kind)


def cut(path):
    path.write_bytes(path.read_bytes()[:-300])


def spoil(path):
    """Damage the middle of a PNG file, which a check of its ends does not find."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 400] = bytes(400)
    path.write_bytes(data)


def losses(name):
    return [record["loss"] for record in records(name, "train")]


def bad_images(name):
    return json.loads(Path(f"runs/{name}/bad_images.json").read_text())


def checked(paths, full=False):
    split = whole_split("train", Files([str(path) for path in paths]), [0] * len(paths), "test")
    return check_images(split, full, "cache")


# -- what a check finds
# ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["jpeg", "png", "gif", "webp", "bmp", "tiff", "ppm", "avif", "heic"]
)
def test_a_whole_image_passes_and_one_without_its_end_does_not(kind):
    data = heic() if kind == "heic" else encoded(smooth(64, 48), kind)
    contents = data, data[: len(data) // 2], b"", b"no image"
    for name, content in enumerate(contents):
        Path(str(name)).write_bytes(content)
    assert sorted(checked(range(4)).errors) == [1, 2, 3]


def test_a_file_with_bytes_after_its_end_passes():
    """Some cameras write such files; only a decoder can tell."""
    kinds = "jpeg", "png", "webp"
    for kind in kinds:
        Path(kind).write_bytes(encoded(smooth(64, 48), kind) + b"\1" * 9000)
    assert checked(kinds).errors == {}


def test_only_a_full_check_decodes_what_looks_whole():
    paths = image_folder("data", {"cat": 40}, size=(SIDE, SIDE))
    spoil(paths[39])  # the first ones are decoded, because images stored in colour may be grey
    assert checked(paths).errors == {} and list(checked(paths, full=True).errors) == [39]


def test_special_files_are_found_without_being_opened():
    image_folder("data", {"cat": 3})
    os.mkfifo("data/cat/pipe.png")
    os.symlink("/dev/zero", "data/cat/device.png")
    os.symlink("nothing", "data/cat/link.png")
    paths = sorted(Path("data/cat").iterdir())
    assert {paths[row].name: reason for row, reason in checked(paths).errors.items()} == {
        "pipe.png": "not a regular file",
        "device.png": "not a regular file",
        "link.png": "No such file or directory",
    }


def test_a_check_is_made_once_until_a_file_changes():
    paths = image_folder("data", {"cat": 4})
    first = checked(paths)
    (kept,) = Path("cache/checked").iterdir()
    before = kept.stat().st_mtime_ns
    assert (checked(paths).checksums == first.checksums).all() and kept.stat().st_mtime_ns == before
    kept.write_text('[[1, ""]]')  # a damaged result is replaced
    assert (checked(paths).checksums == first.checksums).all()
    status = paths[2].stat()
    Image.fromarray(pictures(1, seed=9)[0]).save(paths[2])
    os.utime(paths[2], ns=(status.st_atime_ns, status.st_mtime_ns))
    again = checked(paths)
    assert len(list(Path("cache/checked").iterdir())) == 2
    assert np.flatnonzero(again.checksums != first.checksums).tolist() == [2]


def test_many_images_are_checked_by_several_processes_with_the_same_result():
    paths = image_folder("data", {"cat": 40})
    cut(paths[33])
    many = [path for _ in range(300) for path in paths]
    few, all_of_them = checked(paths), checked(many)
    assert (all_of_them.checksums == np.tile(few.checksums, 300)).all()
    assert sorted(all_of_them.errors) == [33 + 40 * n for n in range(300)]


# -- refuse
# ----------------------------------------------------------------------


def test_all_bad_files_are_listed_before_training():
    paths = photographs("jpg")
    bad = paths[3], paths[44], paths[59]
    for path in bad:
        cut(path)
    line = refused(train.main, *FLAGS, processes=2)
    assert "3 of 60 images of split 'train' cannot be read" in line and "--bad_images skip" in line
    assert all(str(path) in line for path in bad) and not Path("runs").exists()


# as in the table of a Hub data set made from an image folder
@pytest.mark.parametrize("by_path", [False, True])
def test_rows_of_a_table_are_checked_too(by_path):
    paths = [path.absolute() for path in image_folder("data", {"cat": 20, "dog": 20})]
    cut(paths[7])
    images = [{"path": str(p)} if by_path else {"bytes": p.read_bytes()} for p in paths]
    named = ClassLabel(names=["cat", "dog"])
    parquet("tables", train=table([i // 20 for i in range(40)], named, images))
    line = "1 of 40 images of split 'train' cannot be read: image 7 of split 'train'"
    assert error_of("tables").startswith(line)
    data = load("tables", bad_images="skip")
    assert data.train.readable.sum() + data.evaluation.readable.sum() == 39


def test_a_photograph_that_fails_in_training_ends_the_run_with_the_fixes():
    paths = photographs()
    spoil(paths[40])  # the check decodes the first ones
    line = refused(train.main, *FLAGS, "--run_name", "run")
    assert f"{paths[40]}: not a readable image" in line and "--bad_images skip" in line


# -- skip
# ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def skipping(tmp_path_factory):
    """Runs on photographs of which two are cut short and three only look whole, on one to three
    processes.

    All five are found at the start.
    """
    folder = tmp_path_factory.mktemp("skipping") / "work"
    with kept_in(folder):
        paths = photographs()
        for path in (paths[0], paths[31]):
            cut(path)
        data = load("data", bad_images="skip")
        for name in (data.train.describe(3), data.train.describe(20), data.evaluation.describe(1)):
            spoil(Path(name))
        for processes in (1, 2, 3):
            train_run(processes, f"on{processes}", *SKIP)
    return folder


@pytest.fixture
def skipped(own_folders, skipping, monkeypatch):
    monkeypatch.chdir(restore(skipping))


def test_without_bad_images_numbers_are_the_same_on_any_number_of_processes(skipped):
    (one,) = records("on1", "eval")
    assert one["count"] == 6 and len(bad_images("on1")) == 5
    for name in ("on2", "on3"):
        assert bad_images(name) == bad_images("on1")
        assert losses(name) == pytest.approx(losses("on1"), rel=1e-5)
        assert records(name, "eval")[0]["accuracy"] == one["accuracy"]


@pytest.mark.full
def test_losses_are_those_of_a_run_without_the_files_that_cannot_be_read(skipped):
    for name in bad_images("on1"):
        Path(name).unlink()
    train_run(1, "run", *FLAGS)
    assert losses("run") == losses("on1")


@pytest.mark.full
def test_a_resume_with_bad_images_left_out_ends_in_the_same_bits(skipped):
    train_run(2, "run", *SKIP, "--max_steps", "3")
    train_run(2, "run", *SKIP, "--resume", "auto")
    assert losses("run") == losses("on2")
    assert same_tensors(weights("run"), weights("on2"))


def test_in_a_resumed_run_another_image_of_its_class_replaces_a_deleted_one(skipped):
    train_run(1, "run", *SKIP, "--max_steps", "4")
    data = load("data", bad_images="skip")
    gone = data.train.describe(permutation(49, TrainConfig.seed, 0)[48])  # drawn next
    for name in (gone, data.evaluation.describe(1)):
        Path(name).unlink()
    line = refused(train.main, *FLAGS, *RESUME, "--bad_images", "error")
    assert "2 of 55 images are missing: " in line and "--bad_images skip" in line
    shutil.copytree("runs/run", "runs/two")
    for processes, name in ((1, "run"), (2, "two")):
        outcome, *_ = run_ranks(processes, train.main, [*SKIP, *RESUME, "--run_name", name])
        line = "1 of 49 images of split 'train' cannot be used and other images of their classes"
        assert outcome.out.count(f"{line} replace them: {gone} (") == 1
        assert records(name, "eval")[-1]["count"] == 5
    assert losses("run") == pytest.approx(losses("two"), rel=1e-5) and len(losses("run")) == 6
    assert losses("run")[:4] == losses("on1")[:4] and losses("run")[4:] != losses("on1")[4:]


def test_the_image_in_a_place_stays_the_same_when_another_one_goes_too():
    labels = np.eye(2, dtype=np.uint8)[np.arange(40) % 2]
    split = whole_split("train", np.zeros((40, 2, 2), np.uint8), labels, "")

    def replaced(bad):
        return replace(split, errors=dict.fromkeys(bad)).replace_unreadable().image_index

    first = replaced(range(10))
    assert (first[:10] % 2 == np.arange(10) % 2).all() and (first[10:] == np.arange(10, 40)).all()
    assert len(set(first[:10])) > 5
    also = next(row for row in range(10, 40) if row not in first[:10])
    second = replaced([*range(10), also])
    assert np.flatnonzero(first != second).tolist() == [also]


@pytest.mark.full
def test_an_evaluation_leaves_out_and_names_what_can_no_longer_be_read(skipped):
    name = load("data", bad_images="skip").evaluation.describe(1)
    spoil(Path(name))
    line = refused(eval.main, "--ckpt", "runs/on1", "--bad_images", "error")
    assert "cannot be read" in line and "--bad_images skip" in line
    flags = words("--ckpt runs/on1 --eval_batch_size 2")
    one, two = (run_ranks(processes, eval.main, flags)[0] for processes in (1, 2))
    assert one.value["count"] == 5
    assert two.value | {"seconds": 0} == one.value | {"seconds": 0}
    line = "1 of 6 images of split 'hold-out of train' cannot be used and will be left out"
    assert line in one.out and f"{name} (" in one.out


@pytest.mark.full
def test_a_data_folder_that_goes_away_ends_the_run_and_costs_no_image(skipped):
    flags = words("--run_name run --log_every 2")
    line = refused(_train_and_lose_the_data, *SKIP, *flags, processes=2)
    assert "No such file or directory" in line and "resume" in line
    os.rename("away", "data")
    train_run(2, "run", *SKIP, "--resume", "auto")
    assert losses("run")[-1] == losses("on2")[-1]


def _train_and_lose_the_data(flags):
    update = train.train_update

    def lost(run, batches):
        if run.state.step == 4 and Path("data").exists() and run.ranks.is_main:
            os.rename("data", "away")
        update(run, batches)

    train.train_update = lost
    train.main(flags)


def test_a_data_set_without_a_readable_image_is_refused():
    for path in image_folder("data", {"cat": 5, "dog": 5}):
        path.write_bytes(b"no image")
    line = "no image of split 'train' can be used (10 checked)"
    assert error_of("data", bad_images="skip").startswith(line)


def test_a_small_data_set_with_bad_images_is_decoded_without_them():
    paths = image_folder("data", {"cat": 30, "dog": 30}, size=(20, 20))
    cut(paths[4])
    spoil(paths[50])
    train_run(1, "run", "--data", "data", *RUN, "--max_steps", "3", "--bad_images", "skip")
    assert set(bad_images("run")) == {str(paths[4]), str(paths[50])}
