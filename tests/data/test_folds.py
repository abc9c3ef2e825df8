"""--fold and --group_by: which samples are evaluated on, and what becomes of their predictions."""

import dataclasses
import re
import shutil
from pathlib import Path

import numpy as np
import pandas
import pytest
from helpers.make_data import image_folder
from helpers.ranks import returned
from helpers.training_runs import refused, train_run, words, working_in
from scipy.stats import binomtest

import eval as evaluation
import train
from extras.folds import join, main
from utils.data.hold_out import group_keys, hold_out
from utils.data.selection import load_data
from utils.data.splits import whole_split
from utils.settings.train import TrainConfig


def split_of(labels: np.ndarray):
    return whole_split("train", np.zeros((len(labels), 1, 1), np.uint8), labels, "made")


def folds_of(labels: np.ndarray, count: int, seed: int, keys=()) -> list[list[int]]:
    """The positions of the samples in each fold. All have each sample once."""
    found = []
    for number in range(1, count + 1):
        parts = hold_out(split_of(labels), 0.1, seed, f"{number}/{count}", keys)
        rest, held = (part.image_index.tolist() for part in parts)
        assert sorted(rest + held) == [*range(len(labels))]
        found.append(held)
    assert sorted(sum(found, [])) == [*range(len(labels))]
    return found


def spread(values: np.ndarray, folds: list[list[int]]) -> int:
    """By how much the number of true values differs between folds."""
    return np.ptp([values[fold].sum() for fold in folds])


@pytest.mark.parametrize("count", [2, 5, 23])
@pytest.mark.parametrize("several", [False, True])
def test_folds_have_each_sample_once_and_the_same_share_of_each_class(count, several):
    kinds = np.random.default_rng(count).integers(4, size=101) ** 2
    labels = np.unpackbits(kinds.astype(np.uint8)[:, None], axis=1) if several else kinds
    found = folds_of(labels, count, 3)
    assert all(spread(kinds == kind, found) <= 1 for kind in (0, 1, 4, 9))
    assert spread(np.ones(101), found) <= 1
    assert found == folds_of(labels, count, 3) != folds_of(labels, count, 4)


def test_groups_are_never_split_whatever_their_sizes():
    random = np.random.default_rng(0)
    for trial in range(60):
        sizes = random.integers(1, random.integers(2, 40), size=random.integers(10, 60))
        sizes[0] = [2, sizes.sum()][trial % 2]  # larger than a fold
        series = random.permutation(np.arange(len(sizes)).repeat(sizes))
        kinds = random.integers(3, size=len(sizes))[series]
        keys = series.astype(str).tolist()
        found = folds_of(kinds, 5, trial, keys)
        held = hold_out(split_of(kinds), 0.3, trial, None, keys)[1]
        assert held.name == f"hold-out of train, {len(sizes)} groups of up to {sizes.max()}"
        for part in (*found, held.image_index):
            assert len(part) == np.isin(series, series[part]).sum()
        for kind in range(3):
            largest = np.bincount(series, kinds == kind).max()
            assert spread(kinds == kind, found) <= largest


@pytest.mark.parametrize("data", ["photos", "list.csv", "list.parquet"])
def test_a_series_of_two_classes_stays_together(data):
    paths = [p for k in "xy" for p in image_folder(f"photos/train/{k}", dict.fromkeys("abcd", 2))]
    image_folder("photos/val", {"x": 1, "y": 1})
    rows = [(str(path), path.parts[2], "abcd".index(path.parts[3])) for path in paths]
    table = pandas.DataFrame(rows, columns=["path", "label", "Patient"])
    table.to_csv("list.csv", index=False)
    images = [{"bytes": path.read_bytes(), "path": None} for path in paths]
    table.assign(path=images).to_parquet("list.parquet")
    by = "folder" if data == "photos" else "Patient"
    split = load_data(TrainConfig(data=data, group_by=by, fold="1/2")).evaluation
    series = table["Patient"].isin(table["Patient"][split.image_index])
    assert split.image_index.tolist() == [*np.flatnonzero(series)] and series.sum() == 8
    left_out = "evaluation is on a part of split train; others are not used"
    assert (left_out in split.notes) == (data == "photos")


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--fold 6/5", "fold 6/5 of train: would have 0 of 16 samples"),
        ("--fold 1/1", "fold 1/1 of train: would have 16 of 16 samples"),
        ("--fold 0/5", "--fold must be K/N, such as 1/5, got 0/5"),
        ("--fold 1/5 --eval_split val", "--eval_split and --fold cannot be used together"),
        (
            "--fold 1/2 --group_by camera",
            "--group_by camera: no such column and no match in file names that two images share",
        ),
        (
            "--fold 1/2 --group_by folder",
            "--group_by folder: no such column and no match in file names that two images share",
        ),
        ("--fold 1/2 --group_by (a", "--group_by (a: missing ), unterminated subpattern"),
        ("--fold 9/9 --group_by 00.", "fold 9/9 of train, 8 groups of up to 2: would have 0 of 16"),
    ],
)
def test_a_fold_that_cannot_be_made_is_refused(flags, problem):
    image_folder("photos", {"x": 8, "y": 8})
    assert f"error: {problem}" in refused(train.main, "--data", "photos", *words(flags))


FLAGS = words("--data photos --model timm/test_resnet --init_from runs/source --freeze backbone")
FLAGS += words("--image_size 32 --threads 1 --num_workers 0 --lr 0.5 --global_batch_size 6")
FLAGS += words("--epochs 4 --eval_every 4 --group_by ^(...)-")
FLAGS += words("--feature_views 2 --flip alternate --min_scale 1")
FOLDS = ["one", "two", "three"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with runs of the three folds of series of photographs."""
    folder = tmp_path_factory.mktemp("folds")
    with working_in(folder):
        flags = words("--data source --model timm/test_resnet --max_steps 2 --report false")
        image_folder("source", {"ant": 8, "bee": 8}, (110, 120))
        train_run(1, "source", *flags, *words("--image_size 32 --threads 1 --num_workers 0"))
        for path in image_folder("photos/train", {"ant": 16, "bee": 18, "cat": 15}, (110, 130)):
            path.rename(path.with_name(f"s{int(path.stem) // 3:02}-{path.name}"))
        for number, name in enumerate(FOLDS, 1):
            train_run(number, name, *FLAGS, "--fold", f"{number}/3")
        train_run(1, "other", *FLAGS, *words("--fold 2/3 --seed 1 --max_steps 1"))
    return folder


@pytest.fixture
def runs(made):
    """In that folder."""
    with working_in(made):
        yield
    for name in ("folds.csv", "review.csv"):
        Path(made, name).unlink(missing_ok=True)


def joined(*names: str) -> pandas.DataFrame:
    returned(1, main, [*(f"runs/{name}" for name in names), "--out", "folds.csv"])
    return pandas.read_csv("folds.csv")


def test_the_folds_together_predict_each_photograph_once_with_the_last_weights(runs):
    table = joined("three", "one", "two")
    columns = "path label predicted fold class_1 probability_1"
    assert [*table.columns][:6] == columns.split()
    root = Path("photos/train").resolve()
    assert sorted(table["path"]) == sorted(map(str, root.glob("*/*.png")))
    for number, name in enumerate(FOLDS, 1):
        last = max(Path("runs", name, "checkpoints").glob("step-*"))
        flags = ["--ckpt", str(last), *words("--predictions one.csv --report false")]
        returned(1, evaluation.main, flags)
        expected = pandas.read_csv("one.csv")
        expected["path"] = f"{root.parent}/" + expected["path"]
        own = table[table["fold"] == number].drop(columns="fold").reset_index(drop=True)
        pandas.testing.assert_frame_equal(own, expected, rtol=1e-4)
    series = table["path"].str.extract("(s..)-")[0]
    assert (table.groupby(series)["fold"].nunique() == 1).all()
    # of all runs: the centres, and the views to train on of each seed
    assert len([*Path("home/.cache/lockstep/features").glob("*")]) == 3


def test_the_help_says_that_the_table_has_no_default(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "Join the predictions of the runs of all folds" in text
    assert "such as folds.csv; required" in text and "report.html" not in text


def refused_join(*flags: str) -> str:
    return refused(main, *flags)


def test_runs_that_are_not_all_folds_of_one_split_are_refused_by_name(runs):
    folds = {"one": "1/3", "two": "2/3", "three": "3/3", "other": "2/3"}
    for chosen in (["one", "two"], ["one", "two", "two"], ["one", "other", "three"]):
        line = refused_join(*(f"runs/{name}" for name in chosen), "--out", "folds.csv")
        assert "not all folds of one split: " in line
        assert all(f"runs/{name} is {folds[name]} of " in line for name in chosen)
    log = Path("runs/three/log.jsonl")
    whole = log.read_text()
    with log.open("a") as file:  # as in a run that goes on
        file.write('{"kind": "train", "step": 999}\n')
    for name in ("source", "three"):
        line = refused_join(*words(f"runs/one runs/two runs/{name} --out folds.csv"))
        assert f"runs/{name}: not a complete run with --fold" in line
    log.write_text(whole)
    assert not Path("folds.csv").exists()


@pytest.mark.full
def test_folds_of_other_labels_and_images_without_a_group():
    flags = words("--model mlp --max_steps 1 --image_size 16 --data photos.csv --seed 3")
    image_folder("made", {"ant": 8, "bee": 8}, (16, 16))
    paths = [*map(str, sorted(Path("made").glob("*/*.png")))]
    labels = [Path(path).parent.name for path in paths]
    for number in (1, 2):
        pandas.DataFrame({"path": paths, "label": labels}).to_csv("photos.csv", index=False)
        returned(1, train.main, [*flags, "--fold", f"{number}/2", "--run_name", f"f{number}"])
        labels[3] = "bee"
    assert "not all folds" in refused_join(*words("runs/f1 runs/f2 --out folds.csv"))
    split = dataclasses.replace(split_of(np.zeros(4, int)), groups=["a", None, float("nan"), "a"])
    keys = group_keys(split, "column", ["0"])
    assert keys[0] == keys[3] and len({*keys}) == 3


def test_the_review_lists_the_least_likely_labels_first_and_goes_back_in(runs):
    table = joined(*FOLDS).sort_values("loss", ascending=False, ignore_index=True)
    labels = table["label"]
    suggestion = table["predicted"].mask(table["predicted"] == labels, "")
    expected = pandas.DataFrame(
        {"path": table["path"], "label": labels, "suggestion": suggestion, "was": labels}
    )
    review = pandas.read_csv("review.csv", keep_default_na=False)
    pandas.testing.assert_frame_equal(review, expected)
    page = Path("folds.html").read_text()
    assert re.findall("<strong>(.+)</strong>", page) == labels[:24].tolist()
    assert page.count('src="data:image') == 24
    review.loc[1, "label"] = {"ant": "bee"}.get(labels[1], "ant")
    review.to_csv("review.csv", index=False)
    notes = load_data(TrainConfig(data="review.csv", fold="1/3")).evaluation.notes
    line = f"{Path('review.csv').resolve()}: 1 labels were changed: {review['path'][1]}"
    assert notes == (line,)


@pytest.mark.full
def test_a_resumed_run_keeps_its_fold_and_refuses_another(runs):
    shutil.copy("photos/train/ant/s00-000.png", "photos/train/ant/s77-999.png")
    shutil.copytree("runs/one", "runs/again")
    Path("runs/again/fold_predictions.json").unlink()
    flags = words("--run_name again --resume auto --epochs 5")
    assert "--fold 1/3, not 2/3" in refused(train.main, *FLAGS, *flags, "--fold", "2/3")
    returned(2, train.main, flags)
    one, again = (pandas.read_json(f"runs/{n}/fold_predictions.json") for n in ("one", "again"))
    shutil.rmtree("runs/again")
    Path("photos/train/ant/s77-999.png").unlink()
    assert again["path"].tolist() == one["path"].tolist()


@pytest.mark.parametrize(("right", "size"), [(34, 1), (34, 5), (40, 5)])
def test_the_interval_is_over_groups(right, size, capsys):
    """Groups whose images are all right or all wrong count like single images."""
    for number in (1, 2):
        rows = pandas.DataFrame({"index": range(number - 1, 40 * size, 2), "label": "a"})
        group = rows["index"] % 40
        predicted = np.where(group < right, "a", "b")
        rows = rows.assign(predicted=predicted, group=group, split=f"{number}/2 of made", step=1)
        Path(f"fold{number}").mkdir()
        Path(f"fold{number}/log.jsonl").write_text('{"kind": "eval", "step": 1}\n')
        rows.to_json(f"fold{number}/fold_predictions.json", orient="records")
    join([Path("fold1"), Path("fold2")], Path("folds.csv"), images=True)
    found = [*map(float, re.findall(r"\d\.\d{4}", capsys.readouterr().out))]
    expected = binomtest(right, 40).proportion_ci(method="wilson")
    assert found == pytest.approx([right / 40, *expected], abs=2e-4)
    for number in (1, 2):  # groups are equally good, which makes no interval smaller
        path = Path(f"fold{number}/fold_predictions.json")
        rows = pandas.read_json(path).assign(group=lambda table: table["index"] // 10)
        rows["predicted"] = np.where(rows["index"] % 10 < 5, "a", "b")
        rows.to_json(path, orient="records")
    join([Path("fold1"), Path("fold2")], Path("folds.csv"), images=True)
    found = [*map(float, re.findall(r"\d\.\d{4}", capsys.readouterr().out))]
    expected = binomtest(20 * size, 40 * size).proportion_ci(method="wilson")
    assert found == pytest.approx([0.5, *expected], abs=2e-4)
