"""--shrink: the pixels of photographs reduced beforehand, on any topology and after kills."""

import resource
import signal
from pathlib import Path

import numpy as np
import pandas
import pytest
from helpers.make_data import image_folder
from helpers.ranks import returned, run_ranks, start_ranks
from helpers.training_runs import (
    full,
    records,
    same_tensors,
    slow_train,
    train_run,
    weights,
    words,
)
from helpers.waiting import until
from PIL import Image

import eval as evaluation
import predict
import train
from utils.data import shrunk
from utils.data.selection import load_data
from utils.data.spec import InputSpec
from utils.settings.train import TrainConfig

SPEC = InputSpec(100, 100, 3, [0.5] * 3, [0.5] * 3)
FLAGS = words("--model timm/test_resnet --image_size 100 --threads 1 --num_workers 0 --lr 0.01")
FLAGS += words(
    "--global_batch_size 8 --microbatches 4 --drop_last --max_steps 6 --save_every 2 --report false"
)
SHRINK = [*FLAGS, *words("--data photos --cache_dir cache --shrink 120")]


@pytest.fixture(autouse=True)
def photos():
    """Photographs of two sizes; those of `small` are smaller than --shrink."""
    for seed, split in enumerate(("train", "val")):
        image_folder(f"photos/{split}", {"a": 8, "b": 8}, (150, 200), seed=seed)
        image_folder(f"photos/{split}", {"small": 4}, (110, 105), seed=seed + 2)


def split_of(name="train"):
    return getattr(load_data(TrainConfig(data="photos")), name)


def pixels_of(split, folder="cache"):
    return shrunk.shrink(split, SPEC, 120, folder).read_ahead(range(len(split)))


def test_the_pixels_are_those_of_pillow_and_small_photographs_stay():
    split = split_of()
    for number, pixels in enumerate(pixels_of(split)):
        image = Image.open(split.describe(number))
        if min(image.size) > 120:
            image = image.resize((160, 120), Image.Resampling.BILINEAR)
        most = 2 if image.size == (160, 120) else 0
        np.testing.assert_allclose(pixels, np.asarray(image, int), atol=most)


def test_cached_pixels_are_read_and_those_that_changed_are_computed(monkeypatch):
    split, decoded = split_of(), []
    decode = shrunk.decode_image
    monkeypatch.setattr(
        shrunk, "decode_image", lambda *a, **k: decoded.append(a[1]) or decode(*a, **k)
    )
    first = pixels_of(split)
    assert len(decoded) == 20 and len(list(Path("cache").iterdir())) == 20
    Path(split.describe(3)).write_bytes(Path(split.describe(4)).read_bytes())
    last = max(Path("cache").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    last.write_bytes(last.read_bytes()[:-1])
    again = pixels_of(split.select(np.arange(20)[::-1]))[::-1]
    assert decoded[20:] == [19, 3]
    for number, pixels in enumerate(again):
        assert (pixels == first[4 if number == 3 else number]).all()


def reduce_beforehand():
    """The photographs of `photos`, as --shrink has them, in `reduced`."""
    for name in ("train", "evaluation"):
        split = split_of(name)
        for number, pixels in enumerate(pixels_of(split, "")):
            path = Path(split.describe(number).replace("photos", "reduced"))
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.numpy()).save(path)


@pytest.mark.full
@pytest.mark.parametrize("processes", [2, full(1), full(3)])
def test_a_killed_and_resumed_run_has_the_bits_of_one_on_reduced_photographs(processes):
    reduce_beforehand()
    train_run(1, "expected", *FLAGS, *words("--data reduced --cache_dir other"))
    launch = start_ranks(processes, slow_train, SHRINK, 0.0, 4)
    until(lambda: len(list(Path().glob("held-*"))) == processes)
    until(Path("runs/run/checkpoints/step-00000004").is_dir)
    launch.kill(signal.SIGKILL)
    launch.finish()
    for path in sorted(Path("cache/shrunk").iterdir())[::2]:  # as if it had been filled half-way
        path.unlink()
    train_run(processes % 3 + 1, "run", "--resume", "auto", *SHRINK)
    assert same_tensors(weights("run"), weights("expected"))
    assert records("run", "start")[0]["shrink"] == 120
    one, other = (records(name, "eval")[-1]["loss"] for name in ("run", "expected"))
    assert one == other


@pytest.mark.full
def test_eval_and_predict_see_the_same_pixels():
    train_run(1, "run", *SHRINK)
    last = records("run", "eval")[-1]
    flags = ["--ckpt", "runs/run/checkpoints/step-00000006", "--threads", "1", "--num_workers", "0"]
    (found,) = returned(
        1, evaluation.main, [*flags, "--cache_dir", "other", "--predictions", "eval.csv"]
    )
    assert (found["loss"], found["accuracy"]) == (last["loss"], last["accuracy"])
    returned(1, predict.main, [*flags, "photos/val", "--out", "predict.csv"])
    one, other = (pandas.read_csv(name) for name in ("eval.csv", "predict.csv"))
    assert one["predicted"].equals(other["predicted"]) and len(one) == 20
    assert one["probability_1"].equals(other["probability_1"])


def train_with_little_space(flags):
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    train.main(flags)


@pytest.mark.full
@pytest.mark.parametrize("workers", [full(0), 1])
def test_a_full_disk_is_one_line(workers):
    outcomes = run_ranks(2, train_with_little_space, [*SHRINK, "--num_workers", str(workers)])
    assert [outcome.code for outcome in outcomes] == [2, 2]
    (line,) = "".join(outcome.err for outcome in outcomes).splitlines()
    assert "cannot be used as a cache (File too large)" in line and "--cache_dir" in line


def test_shrinking_is_suggested_for_large_photographs_that_are_read_often():
    split = split_of()
    split.checksums[:] = 3 * 10**6 << 32
    assert shrunk.suggest_shrink(split, 20 * 10**5)[0].startswith("--shrink SIDE saves about")
    assert not shrunk.suggest_shrink(split, 200)
    split.checksums[:] = 10**5 << 32
    assert not shrunk.suggest_shrink(split, 20 * 10**5)
