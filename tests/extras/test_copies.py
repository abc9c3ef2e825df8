"""extras/copies.py: planted copies across splits and classes are found, and nothing else."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from datasets import ClassLabel
from helpers.make_data import encoded, parquet, pictures, table
from helpers.ranks import run_ranks
from helpers.training_runs import records, words
from PIL import Image

import train
from extras.copies import find_duplicates
from utils.data.selection import load_data
from utils.settings.train import TrainConfig

FLAGS = words(
    "--data photos --model timm/test_resnet --freeze backbone --image_size 100 --threads 1"
)
FLAGS += words("--num_workers 0 --max_steps 2")


def plant(same_class, same_split, source, target, quality=0, scale=1.0) -> list:
    """Copy a photograph: the file, or, with a quality, re-encoded and resized."""
    target, source = f"photos/{target}", f"photos/{source}"
    shutil.copy(source, target)
    if quality:
        image = Image.open(source)
        image.resize([round(side * scale) for side in image.size]).save(target, quality=quality)
    return [same_class, same_split, target, "~" if quality else "=", source]


@pytest.mark.full
def test_planted_copies_are_named_at_the_start_and_on_the_page_and_nothing_else_is():
    coarse = iter(pictures(48, (9, 12)))
    for path in [f"{s}/{c}/{n:02}.jpg" for s in ("train", "val") for c in "ab" for n in range(12)]:
        Path("photos", path).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(next(coarse)).resize((160, 120)).save(f"photos/{path}")
    planted = [
        plant(False, False, "train/a/01.jpg", "val/b/x.jpg"),
        plant(False, False, "train/b/02.jpg", "val/a/y.jpg", 90),
        plant(False, True, "train/a/03.jpg", "train/b/z.jpg"),
        plant(True, False, "train/a/04.jpg", "val/a/x.jpg"),
        plant(True, False, "train/a/05.jpg", "val/a/q.jpg", 30),
        plant(True, False, "train/b/06.jpg", "val/b/r.jpg", 60, 0.5),
        plant(True, False, "train/b/07.jpg", "val/b/s.jpg", 60, 2.3),
    ]
    plant(True, True, "train/a/09.jpg", "train/a/same.jpg")  # of no matter
    line = "6 evaluation images are also in training, 3 images have two classes: photos/val/a/y.jpg"
    runs = (
        ("first", "", "centre, computed"),
        ("again", "", "centre, found"),
        ("shrunk", "--shrink 110", "centre, computed"),
        (
            "mirrored",
            "--feature_views 2 --flip alternate --min_scale 1",
            "augmented views: 2, computed",
        ),
    )
    for name, more, origin in runs:
        outcomes = run_ranks(2, train.main, [*FLAGS, *words(f"--run_name {name} {more}")])
        assert [outcome.out.count(line) for outcome in outcomes] == [1, 0], outcomes
        assert f"{origin} in" in outcomes[0].out
        assert records(name, "start")[0]["copies"] == sorted(planted)
        page = Path("runs", name, "report.html").read_text()
        assert "val/b/x.jpg = train/a/01.jpg (two classes)" in page
        assert "val/b/s.jpg ~ train/b/07.jpg<" in page


def test_files_that_differ_only_in_the_middle_are_no_copies_also_in_a_table():
    scans, names = [], ClassLabel(names=["a", "b"])
    for number in range(24):
        scan = np.full((60, 100, 3), 255, np.uint8)
        scan[30, 30] = number
        scans.append({"bytes": encoded(scan, "BMP"), "path": None})
    parts = {"train": scans[:16], "test": [*scans[16:], scans[8]]}
    parquet(
        "tables", **{k: table([n % 2 for n in range(len(v))], names, v) for k, v in parts.items()}
    )
    data = load_data(TrainConfig(data="tables"))
    pair = "image 8 of split 'test'", "=", "image 8 of split 'train'"
    assert find_duplicates(data, None, None) == [(True, False, *pair)]
