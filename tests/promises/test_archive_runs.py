"""Runs on archives have the bits of the folder: tar, zip, archives of classes, WebDataset."""

from pathlib import Path

import pytest
from helpers.loading import evaluated
from helpers.make_data import image_folder
from helpers.pack import pack_all
from helpers.ranks import run_ranks
from helpers.training_runs import (
    codes,
    full,
    kept_in,
    kill_myself,
    refused,
    restore,
    train_run,
    train_watched,
    words,
)

import predict
import train
from utils.runs.manifest import checkpoints_of, sha256_of

FLAGS = ["--model_args", "{hidden: 8}"]
FLAGS += words("--model mlp --threads 1 --lr 0.01 --global_batch_size 12 --microbatches 4")
FLAGS += words(
    "--log_every 3 --eval_every 9 --save_every 3 --report false --mixup 0.2 --max_steps 9"
)
PHOTOS = ["--model", "timm/test_resnet", *words("--image_size 100 --num_workers 2 --threads 1")]
PHOTOS += words("--global_batch_size 12 --microbatches 4 --max_steps 3 --report false --lr 0.01")
PLACES = {
    "folder": "folder",
    "tar": "packed/all.tar",
    "zip": "packed/all.zip",
    "splits": "packed/splits",
    "classes": "packed/classes",
    "WebDataset": "packed/web",
}


def digest(name: str) -> str:
    """The SHA-256 of a run's last weights."""
    checkpoint = checkpoints_of(Path("runs") / name / "checkpoints")[-1]
    return sha256_of(checkpoint / "model.safetensors")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run on a folder, with the same images in archives."""
    folder = tmp_path_factory.mktemp("archives") / "work"
    with kept_in(folder):
        image_folder("folder", {"train/ant": 20, "train/bee": 16, "val/ant": 6, "val/bee": 5})
        pack_all("folder", "packed", PLACES)
        train_run(1, "folder", "--data", "folder", *FLAGS)
    return folder


@pytest.fixture
def trained(own_folders, finished, monkeypatch):
    monkeypatch.chdir(restore(finished))


@pytest.mark.parametrize(
    "kind, processes",
    [
        ("tar", 2),
        ("classes", 3),
        ("WebDataset", 2),
        *(full(kind, 1) for kind in PLACES if kind != "folder"),
        *(full(kind, number) for kind in ("zip", "splits") for number in (2, 3)),
        *(full("folder", number) for number in (2, 3)),
        full("tar", 3),
        full("classes", 2),
        full("WebDataset", 3),
    ],
)
def test_a_run_on_any_number_of_processes_has_the_bits_of_the_folder(trained, kind, processes):
    train_run(processes, "other", "--data", PLACES[kind], *FLAGS)
    assert digest("other") == digest("folder")


@pytest.mark.parametrize(
    "kinds",
    [
        words("folder tar zip"),
        full(words("classes folder splits")),
        full(words("tar tar tar")),
        full(["WebDataset"] * 3),
    ],
    ids="-".join,
)
def test_a_killed_run_goes_on_in_another_container_with_the_same_bits(trained, kinds):
    def killed(data: str, step: int) -> None:
        flags = ["--data", data, *FLAGS, "--resume", "auto"]
        train_watched(flags, lambda run: run.state.step == step and kill_myself())

    for processes, (kind, step) in enumerate(zip(kinds, (4, 7), strict=False), 1):
        assert codes(run_ranks(processes, killed, PLACES[kind], step)) == [-9] * processes
    train_run(2, "run", "--data", PLACES[kinds[2]], *FLAGS, "--resume", "auto")
    assert digest("run") == digest("folder")


@pytest.mark.full
def test_photographs_in_archives_are_read_by_loader_processes_with_the_same_bits(own_folders):
    counts = {"train/ant": 20, "train/bee": 16, "val/ant": 6, "val/bee": 5}
    image_folder("folder", counts, size=(120, 130), kind="jpg")
    pack_all("folder", "packed", ("tar", "zip"))
    for kind, processes in (("folder", 1), ("tar", 2), ("zip", 1)):
        train_run(processes, kind, "--data", PLACES[kind], *PHOTOS)
        assert digest(kind) == digest("folder")


def test_evaluations_and_predictions_are_those_of_the_folder(trained):
    found = {}
    for kind in ("folder", "tar"):
        record, out = evaluated("--ckpt", "runs/folder", "--data", PLACES[kind])
        found[kind] = {key: record[key] for key in ("loss", "accuracy")}
        assert kind == "folder" or "held-out samples" not in out
    assert found["tar"] == found["folder"]
    for name, given in (("one", "folder/val"), ("two", "packed/classes/val/bee.tar")):
        flags = ["--ckpt", "runs/folder", given, "--out", f"{name}.csv", *words("--threads 1")]
        assert codes(run_ranks(1, predict.main, flags)) == [0]
    first, second = (Path(f"{name}.csv").read_text().splitlines() for name in ("one", "two"))
    assert len(second) == 6 and second[0] == first[0]
    folder = [line.replace("folder/val/bee/", "packed/classes/val/bee.tar/") for line in first]
    assert second[1:] == [line for line in folder if "bee.tar" in line]


def test_a_run_on_a_web_dataset_is_resumed_on_its_shards_only(trained):
    train_run(1, "run", "--data", PLACES["WebDataset"], *FLAGS, "--max_steps", "6")
    again = words("--run_name run --resume auto")
    for kind in ("folder", "tar"):
        line = refused(train.main, "--data", PLACES[kind], *FLAGS, *again)
        assert "47 of 47 images are missing: train" in line
    train_run(1, "run", "--data", PLACES["WebDataset"], *FLAGS, "--resume", "auto")


def test_a_run_on_a_damaged_archive_ends_with_one_line(trained):
    data = Path("packed/all.tar").read_bytes()
    Path("packed/all.tar").write_bytes(data[: len(data) // 2])
    line = refused(train.main, "--data", "packed/all.tar", "--run_name", "x", *FLAGS, processes=2)
    assert "packed/all.tar: is damaged or not complete (" in line
