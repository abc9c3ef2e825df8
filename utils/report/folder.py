"""What the page shows of a run folder: its settings, log and pictures, and the analysis of its best
checkpoint.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
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
# saved in place of the default, which means the same
_LIKE_DEFAULT = {"task": "classification", "grad_accum": 1}


def read_run(folder: Path, images: bool = True) -> dict[str, Any]:
    """The values of page.html for a run. Raises ValueError or OSError if this is not the folder of
    a run.

    If `images` is False, pictures are left out.
    """
    require(
        (folder / "config.yaml").is_file(),
        f"{folder}: has no config.yaml",
        "name a run folder, such as runs/NAME",
    )
    records = read_log(folder)
    kinds = {
        kind: [r for r in records if r.get("kind") == kind] for kind in ("start", "train", "eval")
    }
    settings, last = read_yaml(folder / "config.yaml"), (kinds["train"] or [{}])[-1]
    metric = settings["best_metric"] or ""
    highest = metric in TASKS[settings["task"]].highest_is_best
    best = best_evaluation(kinds["eval"], metric, highest)
    analysis = _analysis(folder, best)
    return {
        "name": folder.absolute().name,
        "settings": changed_settings(settings),
        "metric": metric,
        "highest_is_best": highest,
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
    choose = max if highest else min
    return choose(known, key=lambda record: record[metric], default=records[-1] if records else {})


def read_analysis(folder: Path) -> dict[str, Any]:
    """The analysis in report.json; empty if there is none."""
    path = folder / ANALYSIS
    analysis = read_json(path) if path.is_file() else {}
    require(isinstance(analysis, dict), f"{path}: is damaged", "delete it")
    return analysis


def _analysis(folder: Path, best: Mapping[str, Any]) -> dict[str, Any]:
    """The analysis in report.json, unless training has found a better checkpoint since.

    An evaluation of eval.py, which names its checkpoint, is kept.
    """
    analysis = read_analysis(folder)
    record = analysis.get("record", {})
    return analysis if "checkpoint" in record or record.get("step") == best.get("step") else {}


def changed_settings(values: Mapping[str, Any]) -> dict[str, str]:
    """The settings that differ from their defaults, as text, without those of the machine."""
    usual = asdict(TrainConfig()) | {"best_metric": values.get("best_metric")}
    own = {
        *OF_THIS_MACHINE,
        *(name for name, value in _LIKE_DEFAULT.items() if values.get(name) == value),
    }
    kept = {name: value for name, value in values.items() if name not in own}
    return {
        name: _text(value)
        for name, value in without_places(kept).items()
        if value != usual.get(name, value)
    }


def without_places(value: Any) -> Any:
    """The value with each absolute path reduced to its last part, so that the page can be shared."""
    if isinstance(value, dict):
        return {name: without_places(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [without_places(inner) for inner in value]
    return Path(value).name if isinstance(value, str) and value.startswith(("/", "~")) else value


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
