"""report.html: the page of one or several runs, a single file that loads nothing else.

To add a section, add it to page.html. `read_run` has its values: the log, the settings, and the
numbers of an evaluation (analysis.py).
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path

from tqdm import tqdm

from extras.page.charts import charts
from extras.page.html import render, sheet
from utils.config import read_yaml, require
from utils.files import read_json, write_file
from utils.runs import read_log
from utils.settings.train import OF_THIS_MACHINE, TrainConfig
from utils.tasks import TASKS
from utils.training import FEW_IMAGES

PAGE = "report.html"
ANALYSIS = "report.json"
PREDICTIONS = "predictions.npz"  # of the same evaluation
_TIMES = ("seconds", "time")


def write_page(
    folders: Sequence[Path], out: Path, images: bool = True, compared: Mapping | None = None
) -> None:
    """Write the page of these run folders, with their comparison (pairs.py) if there is one. Raises
    ValueError or OSError if one of them is not the folder of a run.

    Runs with the same --best_metric are sorted by the value of their best checkpoint. If folders
    have the same name, all are numbered.
    """
    runs = [read_run(folder, images) for folder in folders]
    if len({run["name"] for run in runs}) < len(runs):
        for number, run in enumerate(runs, 1):
            run["name"] += f" ({number})"
    if len({run["metric"] for run in runs}) == 1:
        runs.sort(key=itemgetter("rank"))
    words = {name: word for run in runs for name, word in run["shown"].items()}
    rows = {"settings": settings_of(runs), "metrics": metrics_of(runs, words), "few": FEW_IMAGES}
    rows |= {"charts": charts(runs, words), "compared": compared}
    write_file(out, render("page.html", runs=runs, **rows))


def settings_of(runs: Sequence[dict]) -> dict[str, list[str]]:
    """The settings that differ from the defaults, or, with several runs, between them."""
    names = dict.fromkeys(name for run in runs for name in run["settings"])
    rows = {name: [run["settings"].get(name, "default") for run in runs] for name in names}
    if len(runs) > 1:
        rows["input"] = [(run["start"] or [{}])[-1].get("input", "unknown") for run in runs]
        rows = {name: values for name, values in rows.items() if len(set(values)) > 1}
    return rows


def metrics_of(runs: Sequence[dict], words: dict[str, str]) -> dict[str, str]:
    """The metrics of the evaluations of the runs, with their names on the page."""
    pairs = [pair for run in runs for pair in run["evaluation"].items() if pair[0] not in _TIMES]
    found = [name for name, value in pairs if isinstance(value, float | None)]
    names = [*words, *found]
    return {name: words.get(name, name.replace("_", " ")) for name in names if name in found}


def read_run(folder: Path, images: bool = True) -> dict:
    """The values of page.html for a run. Raises ValueError or OSError if this is not the folder of
    a run.

    If `images` is False, pictures are left out. An analysis is left out if training has found a
    better checkpoint since, unless it is that of eval.py, which names its checkpoint.
    """
    kinds: dict[str, list] = {"start": [], "train": [], "eval": [], "head_alone": []}
    for record in read_log(folder):
        kinds.setdefault(record["kind"], []).append(record)
    settings = read_yaml(folder / "config.yaml")
    last = (kinds["train"] or [{}])[-1]
    metric = settings["best_metric"] or ""
    task = TASKS[settings["task"]]
    highest = metric in task.highest_is_best
    best = best_evaluation(kinds["eval"], metric, highest)
    analysis = read_analysis(folder)
    value = best.get(metric)
    rank = math.inf  # runs are sorted by it; one without a value is the last
    if value is not None:
        rank = -value if highest else value
    record = analysis.get("record", {})
    if "checkpoint" not in record and record.get("step") != best.get("step"):
        analysis = {}
    return {
        "name": folder.absolute().name,
        "settings": changed_settings(settings),
        "metric": metric,
        "rank": rank,
        "shown": task.shown,
        "best": best,
        **kinds,
        "last": last,
        "time": tqdm.format_interval(last.get("seconds", 0)),
        "evaluation": analysis.get("record") or best,
        "analysis": analysis,
        "errors": analysis.get("errors", []) if images else [],
        "first_batch": sheet(folder / "first_batch.png") if images else "",
    }


def best_evaluation(records: Sequence[dict], metric: str, highest: bool) -> dict:
    """The evaluation of the best checkpoint by `metric`, the first of equal ones; without values,
    the last evaluation.

    With --ema_decay, that of the averaged weights counts. Its record follows that of the raw
    weights.
    """
    of_step = {record["step"]: record for record in records}
    known = [record for record in of_step.values() if record.get(metric) is not None]
    choose = max if highest else min
    return choose(known, key=itemgetter(metric), default=[{}, *records][-1])


def read_analysis(folder: Path) -> dict:
    """The analysis in report.json; empty if there is none."""
    path = folder / ANALYSIS
    analysis = read_json(path) if path.is_file() else {}
    require(isinstance(analysis, dict), f"{path}: damaged", "delete it")
    return analysis


def changed_settings(values: Mapping) -> dict[str, str]:
    """The settings that differ from their defaults, as text, without those of the machine."""
    usual = asdict(TrainConfig(task="classification"))
    return {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in without_places(values).items()
        if name not in (*OF_THIS_MACHINE, "best_metric") and value != usual.get(name, value)
    }


def without_places(values: Mapping) -> dict:
    """JSON values with absolute paths cut to their last part, so that the page can be shared."""
    return json.loads(re.sub(r'"[/~][^"]*/(?=[^"])', '"', json.dumps(values)))
