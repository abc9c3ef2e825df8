"""The runs of a launch with --seeds, one after the other, and the table of their results."""

from collections.abc import Iterator

import numpy as np

from extras.dry_run import trial
from extras.page.page import read_run
from utils.console import say, table
from utils.files import expand
from utils.ranks import Ranks, Stopping, leave_run
from utils.settings.train import TrainConfig


def in_turn(config: TrainConfig, ranks: Ranks, stopping: Stopping) -> Iterator[TrainConfig]:
    """The settings of each run of a launch with --seeds, or of its dry run; collective.

    Frees the memory of each run, and prints their results at the end.
    """
    for number, each in enumerate(config.runs):
        if number:
            stopping.begin_run()
            leave_run()
        yield trial(each)
    ranks.from_main(lambda: say(results(config)))


def results(config: TrainConfig) -> str:
    """A table of the best and the last evaluation of each run, with their mean and standard
    deviation.
    """
    runs = [read_run(expand(f"{each.output_dir}/{each.run_name}"), False) for each in config.runs]
    metric = runs[0]["metric"]
    found = [[run["best"].get(metric), (run["eval"] or [{}])[-1].get(metric)] for run in runs]
    values = np.array(found, float)  # NaN if a metric is undefined, or the log of a run is lost
    rows = *values, values.mean(0), values.std(0, ddof=1)
    names = *(f"seed {each.seed}" for each in config.runs), "mean", "standard deviation"
    texts = ["best {:.4f}, last {:.4f}".format(*row) for row in rows]
    return table(f"{metric} of {len(runs)} seeds", [*zip(names, texts, strict=True)])
