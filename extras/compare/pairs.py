"""Compare two runs, or two groups of runs with several seeds, by seed and evaluation image."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pandas
from scipy.stats import binomtest, t

from extras.page.analysis import resample
from extras.page.html import number
from extras.page.page import PREDICTIONS, write_page
from utils.config import require
from utils.console import progress
from utils.errors import UserError
from utils.settings.train import read_config
from utils.tasks import Task, make_task


def write_groups(groups: list[list[Path]], out: Path, images: bool) -> None:
    """Write the page of these runs. Two runs, or two groups, are compared; prints the result.

    The rest of the page of two groups is that of their first pair.
    """
    compared = {}
    folders = [run for runs in groups for run in runs]
    if len(groups) == 2:
        one, other = (by_seed(runs, len(folders) > 2) for runs in groups)
        seeds = [seed for seed in one if seed in other]
        folders = [runs[0] for runs in groups]
        if seeds:
            folders = [one[seeds[0]], other[seeds[0]]]
        try:
            pairs = pair_up([one, other], seeds)
        except UserError as error:
            compared = {"lines": [f"not compared: {error}"]}
        else:
            compared = compare_pairs(pairs, sorted(one.keys() ^ other.keys()))
        print(*compared["lines"], sep="\n")
    write_page(folders, out, images, compared)


def by_seed(runs: Sequence[Path], several: bool) -> dict[str, Path]:
    """The runs of a group by the seed in their names; unless `several`, its only run by ""."""
    if not several:
        return {"": runs[0]}
    return {run.name.rpartition("-seed")[2]: run for run in runs}


class Pairs(NamedTuple):
    """The runs of several groups with the same seeds: all of the first group, then of the next."""

    seeds: list[str]
    folders: list[Path]
    runs: list[SimpleNamespace]  # their predictions


def pair_up(groups: Sequence[Mapping[str, Path]], seeds: list[str]) -> Pairs:
    """Read the predictions of the runs with these seeds, which all groups have.

    Raises UserError if there are none, or if they are of different images.
    """
    folders = [group[seed] for group in groups for seed in seeds]
    files = [folder / PREDICTIONS for folder in folders]
    for file in files:
        require(file.is_file(), f"no {file}", "run eval.py --ckpt RUN to write it")
    runs = [SimpleNamespace(**np.load(file)) for file in files]
    origins = [str(run.origin) for run in runs]
    is_same = seeds and origins == origins[: len(seeds)] * len(groups)
    problem = "no seed in common, or evaluated on different images or labels"
    require(is_same, problem, "train or evaluate all in the same way")
    return Pairs(seeds, folders, runs)


def compare_pairs(pairs: Pairs, left: Sequence[str]) -> dict:
    """The values of page.html that compare two groups; `lines` are the result in words.

    `left` has the seeds that are left out, because only one group has them.
    """
    seeds, folders, runs = pairs
    _, task = make_task(read_config(folders[0] / "config.yaml"), runs[0].classes.tolist())
    names = [run.name.removesuffix(f"-seed{seeds[0]}") for run in folders[:: len(seeds)]]
    if names[0] == names[1]:
        names = [f"{names[0]} (1)", f"{names[0]} (2)"]  # as on the page
    one, other = np.split(values_of(runs, task), 2)
    samples = one - other
    if task.higher_is_better:
        samples = -samples
    scale, unit = unit_of(task)
    mean, half, used, needed = compare(samples, len(runs[0].images))
    size, low, high = (number(scale * (abs(mean) + side * half)) for side in (0, -1, 1))
    better = names[1] if mean > 0 else names[0]
    text = f"{better} is better by {size} {unit} (95 % interval {low} to {high})"
    if abs(mean) < half:
        text = f"{used} cannot tell {names[0]} and {names[1]} apart: {text}"
        if mean:
            text += f"; about {needed} would be needed for a difference of this size"
    lines = [text]
    if left:
        lines.append(f"only one of them has the seeds {', '.join(left)}, which are left out")
    if task.metric == "accuracy" and seeds == [""]:
        lines.append(mcnemar(samples, names[1]))
    # images of the first pair on which only one run is right
    flipped = np.flatnonzero(runs[0].values[:, 1:2] != runs[len(seeds)].values[:, 1:2])
    own = dict(zip(seeds, np.nanmean(samples, 1), strict=True))
    drawn = {"mean": mean, "half": half, "scale": scale, "unit": unit, "own": own}
    return drawn | {"lines": lines, "names": names, "flipped": flipped}


def unit_of(task: Task) -> tuple[int, str]:
    """The factor by which a difference of the metric is multiplied to be shown, and its unit."""
    return (100, f"points of {task.metric}") if task.higher_is_better else (1, task.metric)


def mcnemar(samples: np.ndarray, name: str) -> str:
    """McNemar's exact test of two runs in words; `name` is that of the second."""
    wins = np.sum(samples > 0)
    differ = np.count_nonzero(samples)
    chance = number(binomtest(wins, max(1, differ)).pvalue)
    return (
        f"McNemar's exact test: p = {chance}; {name} is right on {wins} of the {differ} "
        "images on which only one of them is; other seeds may give another result"
    )


def values_of(runs: list, task: Task) -> np.ndarray:
    """The metric of each image, float [runs, N]. It is NaN where a run lacks an image.

    For a metric that is not a mean over images: one value for each resample of the bootstrap,
    scaled so that the means of the runs have the covariance of the bootstrap.
    """
    if task.metric in task.evaluation:
        column = [*task.evaluation].index(task.metric)
        columns = [pandas.Series(run.values[:, column], run.images) for run in runs]
        return pandas.concat(columns, axis=1).to_numpy(float).T
    drawn = [resample(run, task, True)[task.metric] for run in progress("resampling")(runs)]
    whole, parts = np.split(np.array(drawn), [1], 1)
    return whole + parts.shape[1] ** 0.5 * (parts - parts.mean(1, keepdims=True))


class Family(NamedTuple):
    """What the comparisons of all pairs of several groups have in common.

    `between` is the variance of a mean difference over the seeds. `of_seeds` and `of_images` are
    half widths of an interval in standard errors, over the seeds and over the images.
    """

    between: float
    of_seeds: float
    of_images: float


def compare(
    samples: np.ndarray, images: int, family: Family | None = None
) -> tuple[float, float, str, str]:
    """Compare two groups of runs by their differences, float [S, N], of S seeds on N images, or on
    N resamples of `images` images; NaN where a seed lacks an image.

    With the `family` of several groups, the intervals of all pairs are simultaneous.

    Returns the mean difference, half of its 95 % interval, how many seeds or images were used, and
    with how many a difference of this size would be found with a chance of 80 %.

    With several seeds, both seeds and images are random, as in an analysis of variance with two
    crossed random factors. What two seeds have in common is due to the images. The variance is at
    least that over the images alone. If all values are -1, 0 or 1, each seed gets one more image,
    half for each run, so that the variance is above 0: with one seed, this is the interval of
    Agresti and Min (2005).
    """
    counts = np.isfinite(samples).sum(1)
    means = np.nanmean(samples, 1)
    centred = np.nan_to_num(samples.T - means) / (counts * (counts - 1)) ** 0.5
    covariance = centred.T @ centred
    if np.isin(np.nan_to_num(samples), (-1, 0, 1)).all():
        covariance += np.diag(1 / counts**2)
    seeds, mean, alone = len(means), means.mean(), covariance.mean()
    if family is None:
        degrees = max(1, seeds - 1)
        between = means.var(ddof=seeds > 1) / seeds
        family = Family(between, t.ppf(0.975, degrees), 1.96)
    between, of_seeds, of_images = family
    # the variance at which this difference would be found with a power of 80 %
    wanted = max((mean / (of_images + 0.84)) ** 2, 1e-30)
    half = of_images * alone**0.5
    if seeds == 1:
        return mean, half, f"{images:,} images", f"{images * alone / wanted:,.0f} images"
    shared = max(0.0, (seeds * alone - covariance.diagonal().mean()) / (seeds - 1))
    # Each part has its own quantile (Cochran, 1964). With the degrees of freedom of Satterthwaite,
    # the intervals of two or three seeds were too short.
    own = (between * of_seeds + shared * of_images) / (between + shared + 1e-30) ** 0.5
    needed = f"{images * shared / wanted:,.0f} images"
    if wanted > shared:  # two seeds more, as the variance is not known
        needed = f"{seeds * between / (wanted - shared) + 2:,.0f} seeds"
    return mean, max(half, own), f"{seeds} seeds", needed
