"""python -m extras.compare A B: interval, power and words of the difference of two runs."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pandas
import pytest
from helpers.training_runs import MLP, full, records, train_run, words, working_in
from scipy.stats import bootstrap, t, ttest_1samp
from sklearn.metrics import f1_score
from statsmodels.formula.api import ols
from statsmodels.stats.anova import anova_lm
from statsmodels.stats.contingency_tables import mcnemar
from statsmodels.stats.power import TTestPower

from extras.compare.__main__ import main
from extras.compare.pairs import compare


def of_right_answers(random, seeds: int, images: int) -> np.ndarray:
    """Differences of two models that are right equally often, [S, N]. Whether an answer is right
    depends on the image, on the seed, on the model for each of both, and on chance. One seed is
    about two given models.
    """
    own = float(seeds > 1)
    scores = random.normal(2, 2, images) + random.normal(0, own, (2, 1, images))
    scores = scores + random.normal(0, 0.2, (seeds, 1)) + random.normal(0, 0.2 * own, (2, seeds, 1))
    return np.subtract(*(scores + random.normal(0, 1, (2, seeds, images)) > 0).astype(float))


def normal(random, seeds: int, images: int, mean: float, scales: tuple, exact=False) -> np.ndarray:
    """Differences with effects of seeds, images and both, of these scales; of `exact` moments."""
    seed, image = random.normal(size=(seeds, 1)), random.normal(size=images)
    both = random.normal(size=(seeds, images))
    if exact:
        seed, image = ((each - each.mean()) / each.std(ddof=1) for each in (seed, image))
        both += both.mean() - both.mean(0) - both.mean(1, keepdims=True)
    return mean + scales[0] * seed + scales[1] * image + scales[2] * both


def is_found(samples: np.ndarray) -> bool:
    mean, half, *_ = compare(samples, samples.shape[1])
    return abs(mean) > half


@pytest.mark.parametrize(("seeds", "images"), [(1, 300), full(1, 3000), (5, 150), full(5, 1000)])
def test_in_3_to_7_percent_of_1000_pairs_without_a_difference_one_is_found(seeds, images):
    random = np.random.default_rng(seeds + images)
    share = np.mean([is_found(of_right_answers(random, seeds, images)) for _ in range(1000)])
    assert 0.03 <= share <= 0.07


@pytest.mark.full
@pytest.mark.parametrize(
    ("seeds", "mean", "scales"),
    [(6, 1, (1, 0.1, 1)), (2, 0.1, (0.02, 1, 0)), full(6, 0.5, (1, 1, 1)), full(6, 0.5, (1, 3, 1))],
)
def test_with_the_number_that_is_said_80_percent_are_found(seeds, mean, scales):
    random = np.random.default_rng(0)
    *_, needed = compare(normal(random, seeds, 400, mean, scales, exact=True), 400)
    number, unit = int(needed.split()[0].replace(",", "")), needed.split()[1]
    assert (unit == "images") == (scales[0] < 0.1)
    size = (number, 400) if unit == "seeds" else (30, number)
    runs = [is_found(normal(random, *size, mean, scales)) for _ in range(1000)]
    assert 0.75 <= np.mean(runs) <= 0.85
    if scales[1] < 1:  # of seeds alone, as for a paired t test
        power = TTestPower().solve_power(mean / scales[0], power=0.8, alpha=0.05)
        assert number == pytest.approx(power, abs=1)


def test_the_variance_is_that_of_an_analysis_of_variance_of_two_random_factors():
    samples = normal(np.random.default_rng(0), 4, 50, 0.3, (1, 2, 1))
    rows = pandas.DataFrame(samples).stack().rename_axis(["seed", "image"]).rename("d")
    squares = anova_lm(ols("d ~ C(seed) + C(image)", rows.reset_index()).fit())["mean_sq"]
    of_seeds, of_images = squares["C(seed)"], squares["C(image)"] - squares["Residual"]
    expected = (of_seeds * t.ppf(0.975, 3) + of_images * 1.96) / (
        200 * (of_seeds + of_images)
    ) ** 0.5
    assert compare(samples, 50)[:2] == pytest.approx((samples.mean(), expected))


def test_seeds_with_other_images_are_independent():
    samples = np.full((3, 90), np.nan)
    for seed in range(3):
        own = np.random.default_rng(seed).normal(seed, size=30)
        samples[seed, 30 * seed : 30 * seed + 30] = own
    low, high = ttest_1samp(np.nanmean(samples, 1), 0).confidence_interval()
    assert compare(samples, 30)[1] == pytest.approx((high - low) / 2)


def test_one_seed_has_the_interval_of_agresti_and_min_also_if_nothing_differs():
    for more, less, count in ((30, 12, 500), (0, 0, 100)):
        samples = np.repeat([1.0, -1.0, 0.0], [more, less, count - more - less])[None]
        b, c, n = more + 0.5, less + 0.5, count + 2
        expected = 1.96 * ((b + c - (b - c) ** 2 / n) / n**2) ** 0.5
        mean, half, used, _ = compare(samples, count)
        assert (mean, used) == ((more - less) / count, f"{count} images")
        assert half == pytest.approx(expected, rel=0.03)


# -- runs


FLAGS = [*MLP, *words("--report true --max_steps 12")]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with runs of two learning rates and several seeds, and others."""
    folder = tmp_path_factory.mktemp("compare")
    with working_in(folder):
        for seed in "01":
            train_run(1, f"a-seed{seed}", *FLAGS, "--seed", seed)
            train_run(1, f"b-seed{seed}", *FLAGS, "--seed", seed, "--lr", "0.003")
        for name, copied in (("a-seed7", "a-seed0"), ("f1", "a-seed0"), ("f2", "b-seed0")):
            shutil.copytree(f"runs/{copied}", f"runs/{name}")
            config = Path(f"runs/{name}/config.yaml")
            metric = "macro_f1" if name[0] == "f" else "accuracy"
            config.write_text(
                re.sub("best_metric: .*", f"best_metric: {metric}", config.read_text())
            )
        shutil.copytree("runs/a-seed7", "runs/a-seed7-more")  # not a seed of a
        shutil.copytree("runs/b-seed0", "again/a-seed0")
        shutil.copytree("runs/b-seed1", "runs/d-seed1")
        shutil.copytree("runs/f1", "runs/none")
        Path("runs/none/predictions.npz").unlink()
    return folder


@pytest.fixture
def said(made, capsys, monkeypatch):
    """A function that compares two runs; it returns the lines that are printed."""
    monkeypatch.chdir(made)

    def say(one: str, other: str) -> list[str]:
        main([f"runs/{one}", f"runs/{other}", "--out", "page.html"])
        *lines, path = capsys.readouterr().out.splitlines()
        page = Path("page.html").read_text().replace("&#39;", "'")
        assert path == "page.html" and all(f"<p>{line}</p>" in page for line in lines)
        return lines

    return say


def accuracy(name: str) -> float:
    return records(name, "eval")[-1]["accuracy"]


def test_groups_are_paired_by_seed_though_each_seed_has_other_images(said):
    text, left = said("a", "b")
    gaps = [accuracy(f"b-seed{seed}") - accuracy(f"a-seed{seed}") for seed in range(2)]
    best = "b" if np.mean(gaps) > 0 else "a"
    assert f"{best} is better by {abs(100 * np.mean(gaps)):.3g} points of accuracy (95 %" in text
    assert left == "only one of them has the seeds 7, which are left out"
    page = Path("page.html").read_text()
    assert re.findall(r"<title>seed (\d): (\S+) points", page) == [
        (str(seed), f"{100 * gap:.3g}") for seed, gap in enumerate(gaps)
    ]


def test_one_pair_has_the_exact_test_of_mcnemar_and_images_that_one_run_gets_wrong(said):
    _, test = said("a-seed0", "b-seed0")
    kept = [np.load(f"runs/{name}-seed0/predictions.npz") for name in "ab"]
    right = [each["top"][:, 0] == each["labels"] for each in kept]
    table = pandas.crosstab(*right)
    expected = mcnemar(table, exact=True)
    chance = re.match(r"McNemar's exact test: p = (\S+); b-seed0 is right on", test)[1]
    assert float(chance) == pytest.approx(expected.pvalue, rel=0.005)
    assert f"is right on {table.loc[False, True]} of the {(right[0] != right[1]).sum()}" in test
    page = Path("page.html").read_text()
    assert "confident errors where the other run is right</h2>" in page
    for name, other in (("a-seed0", right[1]), ("b-seed0", right[0])):
        part = page.split(f"<h2>{name}: confident errors where the other run is right</h2>")[1:]
        shown = json.loads(Path(f"runs/{name}/report.json").read_text())["errors"]
        expected = sum(other[error["index"]] for error in shown)
        assert sum(each.split("</section>")[0].count("<figure>") for each in part) == expected


def test_two_runs_of_one_name_are_numbered(said):
    line, _ = said("a-seed0", "../again/a-seed0")
    gap = accuracy("../again/a-seed0") - accuracy("a-seed0")
    assert f"a-seed0 ({1 + (gap > 0)}) is better by" in line
    assert all(
        f"{name}</" in Path("page.html").read_text() for name in ("a-seed0 (1)", "a-seed0 (2)")
    )


def test_the_page_of_two_groups_shows_their_first_pair(said):
    said("a", "d")
    page = Path("page.html").read_text()
    assert "a-seed1: Most confident errors" in page and "a-seed0" not in page


@pytest.mark.full
def test_other_metrics_have_the_interval_of_a_paired_bootstrap(said):
    (text,) = said("f1", "f2")
    one, other = (np.load(f"runs/{name}/predictions.npz") for name in ("f1", "f2"))

    def gap(labels, first, second):
        return np.subtract(*(f1_score(labels, each, average="macro") for each in (first, second)))

    data = one["labels"], one["top"][:, 0], other["top"][:, 0]
    result = bootstrap(data, gap, paired=True, vectorized=False, n_resamples=400, rng=0)
    size, low, high = map(float, re.search(r"by (\S+) .*interval (\S+) to (\S+)\)", text).groups())
    assert size == pytest.approx(100 * abs(gap(*data)), rel=0.01)
    assert (high - low) / 2 == pytest.approx(196 * result.standard_error, rel=0.25)


@pytest.mark.parametrize(
    ("one", "other", "problem"),
    [
        ("a-seed0", "a-seed1", "no seed in common, or evaluated on different images or labels"),
        ("f1", "none", "no runs/none/predictions.npz; run eval.py --ckpt RUN to write it"),
        ("a", "f1", "no seed in common, or evaluated on different images or labels"),
    ],
)
def test_what_is_not_comparable_is_not_compared_but_shown(said, one, other, problem):
    (line,) = said(one, other)
    assert line.startswith(f"not compared: {problem}")
    assert "Over the updates" in Path("page.html").read_text()
