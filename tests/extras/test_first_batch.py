"""extras/first_batch.py: the picture of a run's first batch shows what the model receives."""

import io
import warnings
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.make_data import image_folder
from helpers.ranks import run_ranks
from helpers.training_runs import train_run, words
from PIL import Image

import train
from extras import first_batch
from extras.first_batch import draw, label_lines

FLAGS = words(
    "--data pictures --eval_fraction 0.2 --model mlp --threads 1 --max_steps 1 "
    "--global_batch_size 16 --mean 0.4 0.5 0.6 --std 0.3 --eval_batch_size 4"
)


@pytest.mark.full
def test_the_picture_has_the_first_microbatch_of_rank_0_with_its_classes():
    paths = image_folder("pictures", {"cat": 10, "dog": 10}, size=(8, 16))
    known = {np.asarray(Image.open(path)).tobytes(): path.parent.name for path in paths}
    train_run(2, "run", *FLAGS)
    found, texts = set(), defaultdict(set)
    for cell in np.split(read("runs/run/first_batch.png"), 8, axis=1):
        pixels = pixels_of(cell, 8, 16)
        found.add(pixels.tobytes())
        texts[known[pixels.tobytes()]].add(cell[70:].tobytes())
    assert len(found) == 8
    assert len(texts["cat"]) == len(texts["dog"]) == 1 and texts["cat"] != texts["dog"]
    Path("runs/run/first_batch.png").unlink()
    train_run(2, "run", *FLAGS, "--resume", "auto", "--max_steps", "2")
    assert not list(Path("runs/run").glob("*first_batch*"))


def test_a_picture_that_cannot_be_written_is_one_line_and_the_run_continues():
    image_folder("pictures", {"cat": 10, "dog": 10})
    Path("runs/run/first_batch.png").mkdir(parents=True)
    (outcome,) = run_ranks(1, train.main, ["--run_name", "run", "--resume", "auto", *FLAGS])
    assert outcome.code == 0 and Path("runs/run/checkpoints/step-00000001").is_dir()
    lines = [line for line in outcome.out.splitlines() if "first_batch" in line]
    assert len(lines) == 1 and "not a regular file" in lines[0]
    assert not list(Path("runs/run").glob("*.partial"))


def test_the_picture_has_at_most_64_images(monkeypatch):
    monkeypatch.setattr(first_batch, "draw", lambda pixels, labels, names: pixels[:, 0, 0, 0])
    run = SimpleNamespace(
        train_batches=SimpleNamespace(dataset=SimpleNamespace(source=None)),
        spec=SimpleNamespace(mean=[0.0], std=[1.0]),
        data=SimpleNamespace(class_names=["cat", "dog"]),
    )
    images = torch.arange(70).view(70, 1, 1, 1) / 255
    batch = SimpleNamespace(images=images, labels=torch.zeros(70))
    assert first_batch.picture(run, batch).tolist() == [*range(64)]


def read(file) -> np.ndarray:
    return np.asarray(Image.open(file).convert("RGB"))


def pixels_of(cell: np.ndarray, height: int, width: int) -> np.ndarray:
    """The pixels of an image that stands at the upper left of a cell, in its first 97 %."""
    scale = 0.97 * cell.shape[1] / width
    rows, columns = (((np.arange(side) + 0.5) * scale).astype(int) for side in (height, width))
    return cell[rows][:, columns]


@pytest.mark.parametrize("name", ["Straße über Łódź", "$x_1$ {", "日本", "a\nb", "d\udcffg"])
def test_names_of_any_letters_are_drawn(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, empty = (
            draw(np.full((1, 9, 9, 3), 99, np.uint8), [1], ["a", text]) for text in (name, "")
        )
    assert found != empty


@pytest.mark.parametrize(("label", "lines"), [
    (1, ["cat"]),
    ([0.3, 0.7, 0.0], ["0.7 cat", "0.3 bird"]),
    ([0.01, 0.98, 0.01], ["cat"]),
    ([1.0, 0.0, 1.0], ["dog", "bird"]),  # several labels
    ([0.0, 0.0, 0.0], []),
])  # fmt: skip
def test_labels_are_classes_or_their_shares(label, lines):
    assert label_lines(label, ["bird", "cat", "dog"]) == lines
    assert label_lines([1.0], ["no", "yes"]) == ["yes"]  # one output


@pytest.mark.full
@pytest.mark.parametrize("shape", [(9, 300, 600, 1), (64, 90, 9, 3), (1, 1, 1, 3)])
def test_pictures_of_any_shape_and_number_are_drawn(shape):
    values = np.random.default_rng(0).integers(0, 200, (shape[0], 1, 1, 1))
    pixels = (values + np.zeros(shape)).astype(np.uint8)
    labels = [[1.0, 1.0], *[[0.0, 1.0]] * (shape[0] - 1)]
    picture = read(io.BytesIO(draw(pixels, labels, ["long " * 60, "b"])))
    cell = picture.shape[1] // 8
    height, rows = cell * 0.97 * shape[1] / shape[2], -(-shape[0] // 8)
    for number, value in enumerate(values.ravel()):
        top, left = number // 8 * picture.shape[0] / rows, number % 8 * cell
        middle = picture[int(top + height / 2), left + cell // 2].astype(int)
        assert abs(middle - value).max() <= 1  # grey levels are rounded
        assert (picture[int(top + height / 2), left + cell - 2] == 255).all()
