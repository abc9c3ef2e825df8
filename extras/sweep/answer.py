"""The result of a sweep: its combinations, the best first, and their differences."""

import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import combinations
from pathlib import Path
from statistics import mean

import numpy as np
from scipy.stats import studentized_range

from extras.compare.pairs import Family, compare, pair_up, unit_of, values_of
from extras.page.page import PAGE, read_run, write_page
from extras.page.report import warned
from extras.sweep.trials import Trial
from extras.sweep.worker import failed_lines
from utils.config import require
from utils.console import join_names, say, table
from utils.errors import UserError
from utils.settings.train import read_config
from utils.tasks import make_task

Groups = Mapping[str, Mapping[str, Path]]  # the run folders of each combination by seed


def print_answer(trials: Sequence[Trial], failed: Mapping[str, str]) -> None:
    """Print the results of the runs that are complete, and write their page.

    `failed` has the names of the others, and why they failed.
    """
    groups: dict[str, dict[str, Path]] = {}
    for trial in trials:
        if trial.name not in failed:
            groups.setdefault(trial.combination, {})[str(trial.seed)] = trial.folder
    lines = failed_lines(failed)
    if not groups:
        say("\n".join(lines))
        return
    rows, found = rank(groups)
    first = next(trial for trial in trials if trial.combination == rows[0][0])
    command = shlex.join([*first.launch, "train.py", *first.flags[:-1]])
    title = f"Sweep {trials[0].sweep}"
    say(table(title, [(name, "  ".join(cells)) for name, *cells in rows]))
    say("\n".join([*lines, *found, f"to train {rows[0][0]} again: {command}"]))
    page = trials[0].sweep / PAGE
    folders = [folder for group in groups.values() for folder in group.values()]
    with warned():
        compared = {"title": title, "lines": found, "rows": rows}
        write_page(folders, page, images=False, compared=compared)
        say(f"page: {page}")


def rank(groups: Groups) -> tuple[list[list[str]], list[str]]:
    """Rows of a table of the combinations, the best first, and lines about their differences.

    If all have some seeds in common, only these decide.
    """
    runs = {
        name: {seed: read_run(folder, images=False) for seed, folder in own.items()}
        for name, own in groups.items()
    }
    every = {seed: None for own in groups.values() for seed in own}
    common = [seed for seed in every if all(seed in own for own in groups.values())]

    def place(name: str) -> float:
        return mean(runs[name][seed]["rank"] for seed in common or runs[name])

    order = sorted(runs, key=place)
    cells = {name: [_describe([*runs[name].values()])] for name in order}
    lines: list[str] = []
    if len(order) > 1:
        try:
            differences, line = compare_all({name: groups[name] for name in order}, common)
            for name, text in differences.items():
                cells[name].append(text)
            lines.append(line)
        except UserError as error:
            lines.append(f"not compared: {error}")
        if left := [seed for seed in every if seed not in common]:
            lines.append(f"some combinations lack the seeds {join_names(left)}, which are left out")
    return [[name, *own] for name, own in cells.items()], lines


def _describe(runs: Sequence[dict]) -> str:
    """The metric of the best checkpoints of the runs of a combination, in words."""
    metric = runs[0]["metric"]
    # NaN if it is undefined, or the log of a run is lost
    values = np.array([run["best"].get(metric) for run in runs], float)
    text = f"{metric} {values.mean():.4f}"
    if len(values) > 1:
        own = " ".join(f"{value:.4f}" for value in values)
        text += f" ± {values.std(ddof=1):.4f} ({own})"
    return text


def compare_all(groups: Groups, seeds: list[str]) -> tuple[dict[str, str], str]:
    """The difference of each combination to the first, in words, and a line about all of them, from
    the runs with these seeds.

    Raises UserError if they were not evaluated on the same images.
    """
    pairs = pair_up([*groups.values()], seeds)
    config = read_config(pairs.folders[0] / "config.yaml")
    _, task = make_task(config, pairs.runs[0].classes.tolist())
    values = values_of(pairs.runs, task).reshape(len(groups), len(seeds), -1)
    scale, unit = unit_of(task)
    means = np.nanmean(values, 2)
    is_finite = np.isfinite(means).all(1)
    texts = dict.fromkeys([*groups][1:], "NaN or infinite")
    names = [name for name, finite in zip(groups, is_finite, strict=True) if finite]
    require(len(names) > 1, "fewer than two combinations have finite results", "lower the rates")
    first, *others = values[is_finite]
    family = family_of(means[is_finite])
    similar = []
    for name, own in zip(names[1:], others, strict=True):
        found, half, used, needed = compare(own - first, len(pairs.runs[0].images), family)
        low, high = (scale * (found + side * half) for side in (-1, 1))
        texts[name] = f"{scale * found:+.3g} {unit} ({low:+.3g} to {high:+.3g})"
        loss = -found if task.higher_is_better else found
        if loss < half:
            similar.append((name, found, needed))
    if not similar:
        return texts, f"{names[0]} is the best: {used} distinguish it from all others"
    line = f"{used} cannot distinguish {names[0]} from {' and '.join(each[0] for each in similar)}"
    name, found, needed = similar[0]
    if name == names[1] and found:
        line += f"; about {needed} would distinguish the first two"
    return texts, line


def family_of(means: np.ndarray) -> Family:
    """What the comparisons of all pairs have in common; `means` is float [K, S], of K combinations
    and S seeds.

    The variance over the seeds is pooled over all combinations. With these quantiles (Tukey), all
    intervals are right at once with a probability of 95 %, so that the best combination may be
    chosen on the same data.
    """
    count, seeds = means.shape
    between = 0.0
    degrees = np.inf
    if seeds > 1:
        pairs = [np.subtract(*pair) for pair in combinations(means, 2)]
        between = np.var(pairs, axis=1, ddof=1).mean() / seeds
        degrees = (count - 1) * (seeds - 1)
    return Family(between, _quantile(count, degrees), _quantile(count, np.inf))


@cache  # takes a tenth of a second
def _quantile(count: int, degrees: float) -> float:
    """The quantile for all pairs of `count` combinations, in standard errors of a difference."""
    return studentized_range.ppf(0.95, count, degrees) / 2**0.5
