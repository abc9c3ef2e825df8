"""The picture of a run's first batch shows what the model receives."""

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.make_data import image_folder
from helpers.ranks import run_ranks
from helpers.training_runs import train_run
from PIL import Image

import train
from utils.training.first_batch import drawable, grid, label_lines

FLAGS = ("--data", "pictures", "--eval_fraction", "0.2", "--model", "mlp", "--threads", "1", "--max_steps", "1")
FLAGS += ("--global_batch_size", "16", "--mean", "0.4", "0.5", "0.6", "--std", "0.3", "--eval_batch_size", "4")


def test_the_picture_has_the_images_of_the_first_microbatch_of_rank_0_with_their_classes():
    paths = image_folder("pictures", {"cat": 10, "dog": 10}, size=(32, 64))
    known = {np.asarray(Image.open(path)).tobytes(): path.parent.name for path in paths}
    train_run(2, "run", *FLAGS)
    picture = np.asarray(Image.open("runs/run/first_batch.png"))
    height, width = 2 * 32 + 8 + 15, 2 * 64 + 8  # a cell: the enlarged image, its margin, and a line
    assert picture.shape == (height, 8 * width, 3)
    found, texts = set(), defaultdict(set)
    for cell in np.split(picture, 8, axis=1):
        enlarged = cell[4 : 4 + 64, 4 : 4 + 128]
        pixels = enlarged[::2, ::2]
        assert np.array_equal(pixels.repeat(2, 0).repeat(2, 1), enlarged)
        found.add(pixels.tobytes())
        texts[known[pixels.tobytes()]].add(cell[4 + 64 :].tobytes())
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
    assert len(lines) == 1 and lines[0].endswith("not a regular file); the run continues without it")
    assert not list(Path("runs/run").glob("*.partial"))


@pytest.mark.parametrize(("name", "text"), [
    ("Crème brûlée", "Creme brulee"),
    ("a\nb", "a b"),
    ("日本", "class 3"),
    ("d\udcffg", "d?g"),  # bytes that are not UTF-8
    ("Łódź", "class 3"),  # the stroke of Ł is not an accent
])  # fmt: skip
def test_names_are_drawn_without_accents_and_as_numbers_if_the_font_lacks_a_letter(name, text):
    assert drawable(name, 3) == text


@pytest.mark.parametrize(("label", "lines"), [
    (1, ["cat"]),
    ([0.3, 0.7, 0.0], ["cat 0.7", "bird 0.3"]),
    ([0.01, 0.98, 0.01], ["cat"]),
    ([1.0, 0.0, 1.0], ["dog", "bird"]),  # several labels
    ([0.0, 0.0, 0.0], []),
])  # fmt: skip
def test_labels_are_classes_or_their_shares(label, lines):
    assert label_lines(label, ["bird", "cat", "dog"]) == lines
    assert label_lines([1.0], ["no", "yes"]) == ["yes"]  # one output


def test_pictures_of_any_shape_and_number_are_drawn():
    pixels = torch.full((9, 1, 300, 600), 7, dtype=torch.uint8)
    picture = np.asarray(grid(pixels, [["a", "long " * 60], *[["b"]] * 8]))
    assert picture.shape == (2 * (128 + 8 + 2 * 15), 8 * (256 + 8), 3)
    assert (picture[4:132, 4:260] == 7).all() and (picture[:, 261:267] == 255).all()
    assert picture[166 + 4, 4, 0] == 7 and (picture[166:, 264:] == 255).all()
