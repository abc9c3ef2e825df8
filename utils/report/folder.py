"""What the page shows of a run folder: its settings, log and pictures, and the analysis of its best
checkpoint.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from typing import Any

from tqdm import tqdm

from utils.config.bounds import require
from utils.config.settings import OF_THIS_MACHINE, TrainConfig
from utils.config.yaml_text import read_yaml
from utils.files import read_json
from utils.report.html import sheet
from utils.runs.log import read_log
from utils.tasks.table import TASKS

ANALYSIS = "report.json"


def read_run(folder: Path, images: bool = True) -> dict[str, Any]:
    """The values of page.html for a run. Raises ValueError or OSError if this is not the folder of
    a run.

    If `images` is False, pictures are left out. An analysis is left out if training has found a
    better checkpoint since, unless it is that of eval.py, which names its checkpoint.
    """
    kinds: dict[str, list] = {"start": [], "train": [], "eval": []}
    for record in read_log(folder):
        kinds.setdefault(record["kind"], []).append(record)
    settings, last = read_yaml(folder / "config.yaml"), (kinds["train"] or [{}])[-1]
    metric, task = settings["best_metric"] or "", TASKS[settings["task"]]
    highest = metric in task.highest_is_best
    best = best_evaluation(kinds["eval"], metric, highest)
    analysis, value = read_analysis(folder), best.get(metric)
    record = analysis.get("record", {})
    if "checkpoint" not in record and record.get("step") != best.get("step"):
        analysis = {}
    return {
        "name": folder.absolute().name,
        "settings": changed_settings(settings),
        "metric": metric,
        "rank": math.inf if value is None else -value if highest else value,
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


def best_evaluation(
    records: Sequence[dict[str, Any]], metric: str, highest: bool
) -> dict[str, Any]:
    """The evaluation of the best checkpoint by `metric`, the first of equal ones; without values,
    the last evaluation.

    With --ema_decay, that of the averaged weights counts. Its record follows that of the raw
    weights.
    """
    of_step = {record["step"]: record for record in records}
    known = [record for record in of_step.values() if record.get(metric) is not None]
    choose, last = max if highest else min, records[-1] if records else {}
    return choose(known, key=itemgetter(metric), default=last)


def read_analysis(folder: Path) -> dict[str, Any]:
    """The analysis in report.json; empty if there is none."""
    path = folder / ANALYSIS
    analysis = read_json(path) if path.is_file() else {}
    require(isinstance(analysis, dict), f"{path}: is damaged", "delete it")
    return analysis


def changed_settings(values: Mapping[str, Any]) -> dict[str, str]:
    """The settings that differ from their defaults, as text, without those of the machine."""
    usual = asdict(TrainConfig(task="classification"))
    return {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in without_places(values).items()
        if name not in (*OF_THIS_MACHINE, "best_metric") and value != usual.get(name, value)
    }


def without_places(values: Mapping[str, Any]) -> dict[str, Any]:
    """JSON values with each absolute path reduced to its last part, so that the page can be shared."""
    return json.loads(re.sub(r'"[/~][^"]*/(?=[^"])', '"', json.dumps(values)))
