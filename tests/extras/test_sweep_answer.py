"""The result of a sweep: its intervals, the order of the combinations, and its words."""

import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas
import pytest
from helpers.training_runs import MLP, train_run, words, working_in
from statsmodels.formula.api import ols
from statsmodels.stats.anova import anova_lm
from statsmodels.stats.libqsturng import qsturng

from extras.compare.pairs import compare
from extras.sweep import answer
from extras.sweep.answer import compare_all, family_of, rank

SETTINGS = 8


def right_answers(random, seeds: int, images: int, gain: float = 0.0) -> np.ndarray:
    """Whether settings are right on each image, [K, S, N]; the first is right more often for a
    `gain` above 0.

    Whether an answer is right depends on the image, on the seed, on the setting for each of both,
    and on chance. One seed is about given models.
    """
    own = 0.15 * (seeds > 1)
    scores = random.normal(2, 2, images) + random.normal(0, own, (seeds, 1))
    scores = scores + random.normal(0, own, (SETTINGS, seeds, 1))
    scores = scores + random.normal(0, 5 * own, (SETTINGS, 1, images))
    scores = scores + random.normal(0, 1, (SETTINGS, seeds, images))
    scores[0] += gain
    return (scores > 0).astype(float)


def told_apart(values: np.ndarray) -> np.ndarray:
    """For each pair, 1 or -1 if the first or the second is said to be better, else 0."""
    family = family_of(values.mean(2))
    pairs = (compare(a - b, values.shape[2], family) for a, b in combinations(values, 2))
    return np.array([np.sign(mean) * (abs(mean) > half) for mean, half, *_ in pairs])


@pytest.mark.parametrize("seeds, images", [(1, 300), (3, 200)])
def test_in_1000_sweeps_of_equal_settings_a_difference_is_claimed_in_about_5_percent(seeds, images):
    random = np.random.default_rng(seeds)
    found = [told_apart(right_answers(random, seeds, images)).any() for _ in range(1000)]
    assert np.mean(found) <= 0.064  # 5 %, and two standard errors of 1,000 draws


def test_a_setting_that_is_better_by_three_points_wins_most_sweeps_and_never_loses():
    random = np.random.default_rng(0)
    draws = [right_answers(random, 5, 1000, 0.25) for _ in range(200)]
    points = np.mean([values[0].mean() - values[1:].mean() for values in draws])
    assert 0.025 < points < 0.035
    assert np.mean([values.mean((1, 2)).argmax() == 0 for values in draws]) > 0.85
    said = np.array([told_apart(values)[: SETTINGS - 1] for values in draws])
    assert (said > 0).mean() > 0.08 and not (said < 0).any()


def test_the_intervals_are_those_of_tukey_for_settings_and_seeds_without_noise_of_images():
    means = np.random.default_rng(1).normal(0, 1, (4, 5)) + np.arange(5)
    rows = pandas.DataFrame(means).stack().rename_axis(["setting", "seed"]).rename("y")
    fit = ols("y ~ C(setting) + C(seed)", rows.reset_index()).fit()
    error = anova_lm(fit)["mean_sq"]["Residual"]
    expected = qsturng(0.95, 4, 12) * (error / 5) ** 0.5
    for one, other in combinations(means, 2):
        samples = np.repeat((one - other)[:, None], 30, 1)
        mean, half, used, _ = compare(samples, 30, family_of(means))
        assert (mean, half) == pytest.approx(((one - other).mean(), expected), rel=1e-3)
        assert used == "5 seeds"


def test_the_intervals_of_one_seed_are_those_of_tukey_over_the_images():
    values = np.random.default_rng(2).normal(size=(3, 1, 400))
    for one, other in combinations(values, 2):
        _, half, used, _ = compare(one - other, 400, family_of(values.mean(2)))
        expected = qsturng(0.95, 3, np.inf) / 2**0.5 * (one - other).std(ddof=1) / 20
        assert half == pytest.approx(expected, rel=1e-3) and used == "400 images"


# -- runs


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    """The runs of three settings, of which the last two are equal, with two seeds each."""
    with working_in(tmp_path_factory.mktemp("answer")):
        for name, lr in (("slow", 1e-4), ("fast", 1e-2), ("same", 1e-2)):
            for seed in ("0", "1"):
                flags = [*MLP, *words("--report true --max_steps 12 --seed"), seed]
                train_run(1, f"{name}-seed{seed}", *flags, "--lr", str(lr))
        runs = Path("runs").absolute()
    names = ("slow", "fast", "same")
    return {name: {seed: runs / f"{name}-seed{seed}" for seed in "01"} for name in names}


def test_settings_are_listed_by_their_results_and_those_that_are_alike_are_named(groups):
    rows, (line,) = rank(groups)
    assert [row[0] for row in rows] == ["fast", "same", "slow"]
    assert len(rows[0]) == 2 and rows[1][2].startswith("+0 points of accuracy (-")
    assert rows[0][1] == rows[1][1]
    mean, std, first, second = map(float, re.findall(r"0\.\d+", rows[0][1]))
    assert (mean, std) == pytest.approx(
        ((first + second) / 2, abs(first - second) / 2**0.5), abs=1e-4
    )
    # the runs are equal, so more seeds would not help
    assert line == "2 seeds cannot distinguish fast from same"


def test_seeds_that_a_setting_lacks_are_left_out(groups):
    rows, lines = rank({"slow": {"1": groups["slow"]["1"]}, "fast": groups["fast"]})
    alone, line = rank({name: {"1": groups[name]["1"]} for name in ("fast", "slow")})
    assert rows[1] == alone[1] and lines[0] == line[0]
    assert lines[1] == "some combinations lack the seeds 0, which are left out"


def test_a_combination_is_the_best_only_if_the_others_are_worse(groups):
    """By its own seeds, `good` would be the first; by the common one, it is worse."""
    good, bad = groups["fast"], groups["slow"]
    best = max(good, key=lambda seed: rank({"a": {"0": good[seed]}})[0][0][1])
    mixed = {"good": {"0": bad["0"], "1": good[best]}, "bad": {"0": good["0"]}}
    rows, _ = rank(mixed)
    assert rows[0][0] == "bad" and rows[1][2].startswith("-"), rows


def test_a_loss_that_is_not_finite_hides_no_difference_of_the_others(groups, monkeypatch):
    names = ("fast", "same", "slow")
    three = {name: groups[name] for name in names}
    expected = compare_all({name: groups[name] for name in names[:2]}, ["0", "1"])[0]["same"]
    read = answer.values_of

    def with_inf(runs, task):
        values = read(runs, task)
        values[4:, 0] = np.inf  # the runs of `slow`
        return values

    monkeypatch.setattr(answer, "values_of", with_inf)
    texts, line = compare_all(three, ["0", "1"])
    assert texts == {"same": expected, "slow": "NaN or infinite"}
    assert line == "2 seeds cannot distinguish fast from same"


def test_runs_without_predictions_are_listed_but_not_compared(groups):
    (groups["slow"]["0"] / "predictions.npz").rename("kept.npz")
    try:
        rows, (line,) = rank(groups)
        assert len(rows) == 3 and line.startswith("not compared: no ")
    finally:
        Path("kept.npz").rename(groups["slow"]["0"] / "predictions.npz")
