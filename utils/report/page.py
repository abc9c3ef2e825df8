"""report.html: the page of one or several runs, a single file that loads nothing else."""

import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from utils.files import write_output
from utils.report.charts import Series, line_chart
from utils.report.folder import read_run
from utils.tasks.table import TASKS

PAGE = "report.html"


def write_page(folders: Sequence[Path], out: Path, images: bool = True) -> None:
    """Write the page of these run folders. Raises ValueError or OSError if one of them is not the folder of a run.

    If folders have the same name, all are numbered.
    """
    runs = [read_run(folder, images) for folder in folders]
    if len({run["name"] for run in runs}) < len(runs):
        for number, run in enumerate(runs, 1):
            run["name"] += f" ({number})"
    rows = {"settings": settings_rows(runs), "metrics": metrics_rows(runs)}
    write_output(out, render("page.html", runs=runs, charts=charts(runs), **rows))


@cache
def template(name: str) -> Template:
    """A template of this folder, compiled; it escapes all values."""
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["date"] = lambda seconds: time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
    return environment.get_template(name)


def render(name: str, **values: Any) -> str:
    """The text of a template with these values. Characters of names that are not UTF-8 are escaped."""
    return template(name).render(values).encode(errors="backslashreplace").decode()


def charts(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The charts over updates of all runs, without empty ones."""
    shown = {name: word for run in runs for name, word in _metrics_of(run).items() if name != "top5"}
    titles = {"loss": "loss"} | shown | {"lr": "learning rate", "images_per_second": "images/s"}
    made = [line_chart(title, _lines(runs, name), _marks(runs)) for name, title in titles.items()]
    made.append(line_chart("time waiting for data", _lines(runs, "data_wait", 100), _marks(runs), "%"))
    return [chart for chart in made if chart]


def _metrics_of(run: dict[str, Any]) -> dict[str, str]:
    """The metrics that a run's task shows, with their names on the page."""
    return dict(TASKS[run["settings"].get("task", "classification")].shown)


def _marks(runs: Sequence[dict[str, Any]]) -> list[int]:
    """The updates from which a single run was resumed."""
    return [start["step"] for start in runs[0]["start"] if start["step"]] if len(runs) == 1 else []


def _lines(runs: Sequence[dict[str, Any]], name: str, factor: int = 1) -> list[Series]:
    """The values of one name in the train and eval records of each run. Averaged weights have a line of their own."""
    lines = []
    for number, run in enumerate(runs):
        groups = {"training": run["train"]}
        for record in run["eval"]:
            groups.setdefault(f"evaluation {record.get('weights', '')}".strip(), []).append(record)
        for place, (group, records) in enumerate(groups.items()):
            points = [(record["step"], factor * record[name]) for record in records if record.get(name) is not None]
            label = group if len(runs) == 1 else f"{run['name']}, {group}"
            colour = place if len(runs) == 1 else number
            kind = "train" if not place else "raw" if group.endswith("raw") else "eval"
            lines.append(Series(label, f"c{colour % 8} {kind}", points))
    return lines


def settings_rows(runs: Sequence[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """The settings that differ from the defaults, or, with several runs, between them."""
    names = dict.fromkeys(name for run in runs for name in run["settings"])
    rows = [(name, [run["settings"].get(name, "default") for run in runs]) for name in names]
    return [(name, values) for name, values in rows if len(runs) == 1 or len(set(values)) > 1]


def metrics_rows(runs: Sequence[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """The metrics of each run's last evaluation, with their intervals; a cell without a value has no interval."""
    words = {name: word for run in runs for name, word in _metrics_of(run).items()}
    found = {
        name: name.replace("_", " ")
        for run in runs
        for name, value in run["evaluation"].items()
        if (value is None or isinstance(value, float)) and name not in ("seconds", "time")
    }
    rows = []
    for name in [name for name in words | found if name in found]:
        pairs = [(run["evaluation"].get(name), run["analysis"].get("intervals", {}).get(name)) for run in runs]
        cells = [{"value": value, "interval": None if value is None else bounds} for value, bounds in pairs]
        rows.append((words.get(name, found[name]), cells))
    return rows
