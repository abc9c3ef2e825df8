"""--fold and --group_by: which samples are evaluated on; python -m utils.folds: what becomes of their
predictions.
"""

import re
import shutil
from pathlib import Path

import numpy as np
import pandas
import pytest
from helpers.make_data import image_folder, pictures
from helpers.ranks import returned
from helpers.training_runs import refused, train_run, words, working_in
from PIL import Image
from scipy.stats import binomtest

import eval as evaluation
import train
from utils.config.settings import TrainConfig
from utils.data.folds import hold_out
from utils.data.selection import load_data
from utils.data.splits import whole_split
from utils.folds import join
from utils.report.__main__ import main


def split_of(labels: np.ndarray):
    return whole_split("train", np.zeros((len(labels), 1, 1), np.uint8), labels, "made")


def folds_of(labels: np.ndarray, count: int, seed: int, keys=()) -> list[np.ndarray]:
    """The positions of the samples in each fold; the rest has the others, in order."""
    found = []
    for number in range(1, count + 1):
        rest, held = hold_out(split_of(labels), 0.1, seed, f"{number}/{count}", keys)
        assert sorted([*rest.image_index, *held.image_index]) == list(range(len(labels)))
        found.append(held.image_index)
    assert sorted(np.concatenate(found)) == list(range(len(labels)))
    return found


@pytest.mark.parametrize("count", [2, 5, 23])
@pytest.mark.parametrize("several", [False, True])
def test_folds_have_each_sample_once_and_the_same_share_of_each_class(count, several):
    random = np.random.default_rng(count)
    labels = random.integers(4, size=101) ** 2 % 7
    kinds = labels
    if several:
        labels = np.unpackbits(labels.astype(np.uint8)[:, None], axis=1)
    found = folds_of(labels, count, 3)
    for kind in np.unique(kinds):
        counts = [(kinds[fold] == kind).sum() for fold in found]
        assert max(counts) - min(counts) <= 1
    sizes = [*map(len, found)]
    assert max(sizes) - min(sizes) <= 1
    assert all(map(np.array_equal, found, folds_of(labels, count, 3)))
    assert not all(map(np.array_equal, found, folds_of(labels, count, 4)))


def test_groups_are_never_split_whatever_their_sizes():
    random = np.random.default_rng(0)
    for trial in range(60):
        sizes = random.integers(1, random.integers(2, 40), size=random.integers(10, 60))
        sizes[0] = [2, sizes.sum()][trial % 2]  # larger than a fold
        keys = [f"series {n}" for n, size in enumerate(sizes) for _ in range(size)]
        order = random.permutation(len(keys))
        keys = [keys[n] for n in order]
        kinds = np.repeat(random.integers(3, size=len(sizes)), sizes)[order]  # a series has one
        found = folds_of(kinds, 5, trial, keys)
        held = hold_out(split_of(kinds), 0.3, trial, None, keys)[1]
        assert f", {len(set(keys))} groups of up to {sizes.max()}" in held.name
        for part in (*found, held.image_index):
            own = {keys[n] for n in part}
            assert len(part) == sum(key in own for key in keys)
        for kind in range(3):
            counts = [(kinds[fold] == kind).sum() for fold in found]
            own = np.asarray(keys)[kinds == kind].tolist()
            assert max(counts) - min(counts) <= max(map(own.count, own), default=0)


def files(*paths: str) -> None:
    for path, pixels in zip(paths, pictures(len(paths)), strict=True):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)


SERIES = {f"{kind}{series}{n}.png": series for kind in "xy" for series in "abcd" for n in (1, 2)}


@pytest.mark.parametrize("by", ["folder", r"^.([a-d])\d()", "[a-d]", "Patient", "patient"])
def test_a_series_of_two_classes_stays_together(by):
    files(*(f"photos/train/{name[0]}/{own}/{name}" for name, own in SERIES.items()))
    files("photos/val/x/0.png", "photos/val/y/1.png")
    rows = [[f"photos/train/{n[0]}/{own}/{n}", n[0], own] for n, own in SERIES.items()]
    table = pandas.DataFrame(rows, columns=["path", "label", "Patient"])
    table.to_csv("list.csv", index=False)
    bytes_of = [{"bytes": Path(path).read_bytes(), "path": path} for path in table["path"]]
    table.assign(path=bytes_of).to_parquet("list.parquet")
    data = {"Patient": "list.parquet", "patient": "list.csv"}.get(by, "photos")
    for flags in ({"fold": "1/2"}, {"eval_fraction": 0.5}):
        split = load_data(TrainConfig(data=data, group_by=by, **flags)).evaluation
        names = {str(table["path"][n].rsplit("/")[-1]) for n in split.image_index}
        series = {SERIES[name] for name in names}
        assert names == {name for name in SERIES if SERIES[name] in series} and len(series) == 2
        assert ("evaluation is on a part of split train; others are not used" in split.notes) == (
            data == "photos"
        )


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--fold 6/5", "fold 6/5 of train: would have 0 of 16 samples"),
        ("--fold 1/1", "fold 1/1 of train: would have 16 of 16 samples"),
        ("--fold 0/5", "--fold must be K/N, such as 1/5, got 0/5"),
        ("--fold 1/5 --eval_split val", "--eval_split and --fold cannot be used together"),
        ("--fold 1/2 --group_by camera", "fold 1/2 of train, 16 groups of up to 1: would have 8"),
        ("--fold 1/2 --group_by folder", "fold 1/2 of train, 16 groups of up to 1: would have 8"),
        ("--fold 1/2 --group_by (a", "--group_by (a: missing ), unterminated subpattern"),
        ("--fold 9/9 --group_by ^..", "fold 9/9 of train, 8 groups of up to 2: would have 0 of 16"),
    ],
)
def test_a_fold_that_cannot_be_made_is_refused(flags, problem):
    files(*(f"photos/{name[0]}/{name}" for name in SERIES))
    assert f"error: {problem}" in refused(train.main, "--data", "photos", *words(flags))


FLAGS = words("--data photos --model timm/test_resnet --init_from runs/source --freeze backbone")
FLAGS += words("--image_size 32 --threads 1 --num_workers 0 --lr 0.5 --global_batch_size 6")
FLAGS += words("--epochs 4 --group_by ^(...)-")
FOLDS = ["one", "two", "three"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with runs of the three folds of series of photographs, which show their classes."""
    folder = tmp_path_factory.mktemp("folds")
    with working_in(folder):
        flags = words("--data source --model timm/test_resnet --max_steps 2 --report false")
        image_folder("source", {"ant": 8, "bee": 8}, (110, 120))
        train_run(1, "source", *flags, *words("--image_size 32 --threads 1 --num_workers 0"))
        for path in image_folder("photos/train", {"ant": 16, "bee": 18, "cat": 15}, (110, 130)):
            pixels = np.array(Image.open(path))
            pixels[:, :40] //= 1 + 4 * "abc".index(path.parent.name[0])
            Image.fromarray(pixels).save(path.with_name(f"s{int(path.stem) // 3:02}-{path.name}"))
            path.unlink()
        for number, name in enumerate(FOLDS, 1):
            train_run(number, name, *FLAGS, "--fold", f"{number}/3")
        train_run(1, "other", *FLAGS, "--fold", "2/3", "--seed", "1")
        train_run(1, "whole", *FLAGS, "--max_steps", "2")
    return folder


@pytest.fixture
def runs(made):
    """A copy of `made`, at the same path."""
    with working_in(made):
        yield
    for path in (*made.glob("folds.*"), *made.glob("review.csv")):
        path.unlink()


def joined(*names: str) -> pandas.DataFrame:
    returned(1, main, [*(f"runs/{name}" for name in names), "--out", "folds.csv"], join, "folds")
    return pandas.read_csv("folds.csv")


def last_of(name: str) -> Path:
    checkpoints = Path("runs", name, "checkpoints")
    return checkpoints / (checkpoints / "latest").read_text().strip()


def test_the_folds_together_have_one_prediction_of_the_last_weights_for_each_photograph(runs):
    table = joined("three", "one", "two")
    assert [*table.columns][:6] == [
        "path",
        "label",
        "predicted",
        "fold",
        "class_1",
        "probability_1",
    ]
    names = [str(path.resolve()) for path in Path("photos/train").glob("*/*.png")]
    assert sorted(table["path"]) == sorted(names)
    for number, name in enumerate(FOLDS, 1):
        flags = ["--ckpt", str(last_of(name)), *words("--predictions one.csv --report false")]
        returned(1, evaluation.main, [*flags, "--cpu"])
        expected = pandas.read_csv("one.csv")
        expected["path"] = [str(Path("photos/train", path).resolve()) for path in expected["path"]]
        own = table[table["fold"] == number].drop(columns="fold").reset_index(drop=True)
        pandas.testing.assert_frame_equal(own, expected, rtol=1e-4)
    series = table["path"].str.extract("(s..)-")[0]
    assert (table.groupby(series)["fold"].nunique() == 1).all()
    assert len([*Path("home/.cache/lockstep/features").glob("*")]) == 3  # folds share one


def refused_join(*flags: str) -> str:
    return refused(lambda given: main(given, join, "folds"), *flags)


def test_runs_that_are_not_all_folds_of_one_split_are_refused_by_name(runs):
    folds = {"one": "1/3", "two": "2/3", "three": "3/3", "other": "2/3"}
    for chosen in (["one", "two"], ["one", "two", "two"], ["one", "other", "three"]):
        line = refused_join(*(f"runs/{name}" for name in chosen), "--out", "folds.csv")
        assert "not all folds of one split: " in line
        assert all(f"runs/{name} is {folds[name]} of " in line for name in chosen)
    line = refused_join(*words("runs/one runs/whole runs/three --out folds.csv"))
    assert "runs/whole/fold_predictions.json: No such file" in line
    assert "must end in .csv" in refused_join(*words("runs/one --out folds.txt"))
    assert not Path("folds.csv").exists() and not Path("review.csv").exists()


def test_the_review_lists_the_least_likely_labels_first_and_goes_back_in(runs):
    table = joined(*FOLDS).sort_values("loss", ascending=False, ignore_index=True)
    review = pandas.read_csv("review.csv", keep_default_na=False)
    assert [*review.columns] == ["path", "label", "suggestion", "was"]
    assert (review["path"] == table["path"]).all() and (review["label"] == table["label"]).all()
    other = table["predicted"] != table["label"]
    assert (review["suggestion"] == table["predicted"].where(other, "")).all() and other.any()
    page = Path("folds.html").read_text()
    assert re.findall("<strong>(.+)</strong>", page) == [*table["label"][:24]]
    assert len(re.findall('src="data:image', page)) == 24
    review.loc[1, "label"] = "cat" if review["label"][1] == "ant" else "ant"
    review.to_csv("reviewed.csv", index=False)
    data = load_data(TrainConfig(data="reviewed.csv", fold="1/3"))
    (line,) = [note for note in data.evaluation.notes if "labels were changed" in note]
    assert line.endswith(f"reviewed.csv: 1 labels were changed: {review['path'][1]}")
    assert load_data(TrainConfig(data="review.csv", fold="1/3")).evaluation.notes == ()


def test_a_resumed_run_keeps_its_fold_and_refuses_another(runs):
    shutil.copy("photos/train/ant/s00-000.png", "photos/train/ant/s77-999.png")
    shutil.copytree("runs/one", "runs/again")
    Path("runs/again/fold_predictions.json").unlink()
    flags = words("--run_name again --resume auto --epochs 5")
    assert "--fold 1/3, not 2/3" in refused(train.main, *FLAGS, *flags, "--fold", "2/3")
    returned(2, train.main, flags)
    one, again = (pandas.read_json(f"runs/{n}/fold_predictions.json") for n in ("one", "again"))
    Path("photos/train/ant/s77-999.png").unlink()
    shutil.rmtree("runs/again")
    assert again["path"].tolist() == one["path"].tolist()


def accuracy_of(rows: pandas.DataFrame, capsys) -> list[float]:
    """The accuracy and its interval that two folds with these rows print."""
    for number in (1, 2):
        own = rows[number - 1 :: 2].assign(split=f"{number}/2 of cafe")
        Path(f"fold{number}").mkdir(exist_ok=True)
        own.to_json(f"fold{number}/fold_predictions.json", orient="records")
    join([Path("fold1"), Path("fold2")], Path("folds.csv"), images=True)
    return [*map(float, re.findall(r"\d\.\d{4}", capsys.readouterr().out))]


def test_the_interval_is_over_groups(capsys):
    random = np.random.default_rng(0)
    group = random.integers(60, size=600)
    chance = np.where(random.random(60) < 0.3, 0.6, 0.98)[group]  # some series are hard
    right = random.random(600) < chance
    rows = pandas.DataFrame({"index": range(600), "label": "a"})
    rows["predicted"] = np.where(right, "a", "b")
    alone = accuracy_of(rows.assign(group=rows["index"]), capsys)
    expected = binomtest(right.sum(), 600).proportion_ci(method="wilson")
    assert alone == pytest.approx([right.mean(), *expected], abs=2e-4)
    found = accuracy_of(rows.assign(group=group), capsys)
    sums = np.stack([np.bincount(group, right), np.bincount(group)])
    hits, counts = sums[:, random.integers(60, size=(4000, 60))].sum(2)
    assert found[1:] == pytest.approx(np.percentile(hits / counts, (2.5, 97.5)), abs=0.012)
    assert found[2] - found[1] > 1.3 * (alone[2] - alone[1])
    surely = accuracy_of(rows.assign(group=group, predicted="a"), capsys)
    assert surely == pytest.approx([1, 60 / (60 + 1.96**2), 1], abs=2e-4)
