"""report.html: the page of one or several runs, a single file that loads nothing else.

To add a section, add it to page.html. `read_run` (folder.py) has its values: the log, the settings,
and the numbers of an evaluation (analysis.py).
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from utils.files import write_file
from utils.report.folder import read_run
from utils.report.html import render
from utils.tasks.table import TASKS
from utils.training.summary import FEW

WIDTH, HEIGHT = 480, 250  # of a chart, in SVG units
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 10, 26  # space around the plot, for the ticks
_MOST = 1000  # points of a line
# else small changes would look large
_FROM_ZERO = ("images/s", "time waiting for data", "GPU memory")


class Series(NamedTuple):
    """A line of a chart: its label, its style (a CSS class of page.html), and its points."""

    label: str
    style: str
    points: Sequence[tuple[float, float]]


def line_chart(
    title: str, series: Sequence[Series], marks: Sequence[int] = (), unit: str = ""
) -> dict[str, Any]:
    """A chart of values over updates; `marks` are updates with a vertical line. Empty if there are
    no points.

    NaN and infinite values are left out. The axis of a loss is logarithmic if its values differ by
    a factor above 50.
    """
    lines = [
        s._replace(points=_thinned([p for p in s.points if math.isfinite(p[1])])) for s in series
    ]
    lines = [s for s in lines if s.points]
    values = [value for s in lines for _, value in s.points]
    if not values:
        return {}
    values += [0.0] * (title in _FROM_ZERO)
    end = max(x for s in lines for x, _ in s.points) or 1
    logarithmic = title == "loss" and min(values) > 0 and max(values) > 50 * min(values)
    ticks = (log_ticks if logarithmic else nice_ticks)(min(values), max(values))
    scale = math.log if logarithmic else float
    low, high = (scale(bound) for bound in (min(*values, ticks[0]), max(*values, ticks[-1])))
    if low == high:
        low, high = low - 1, high + 1

    def column(x: float) -> float:
        return round(LEFT + x / end * (WIDTH - LEFT - RIGHT), 1)

    def row(y: float) -> float:
        return round(TOP + (high - scale(y)) / (high - low) * (HEIGHT - TOP - BOTTOM), 1)

    return {
        "title": f"{title} (logarithmic)" if logarithmic else title,
        "lines": [
            {
                "label": s.label,
                "style": s.style,
                "path": "M" + "L".join(f"{column(x)} {row(y)}" for x, y in s.points),
                "dots": [(column(x), row(y)) for x, y in s.points]
                if "train" not in s.style and len(s.points) <= 40
                else [],
                "last": _number(s.points[-1][1], unit),
            }
            for s in lines
        ],
        "rows": [(row(tick), _number(tick, unit, 6)) for tick in ticks],
        "columns": [
            (column(tick), f"{tick:,.0f}") for tick in nice_ticks(0, end) if tick == int(tick)
        ],
        "marks": [(column(mark), mark) for mark in marks if mark <= end],
    }


def nice_ticks(low: float, high: float) -> list[float]:
    """Three to seven round numbers that span low..high, in steps of 1, 2 or 5 times a power of ten."""
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        return [low]
    rough = (high - low) / 5
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{number * step:.12g}") for number in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten from `low`, rounded down, to about `high`; at most ten."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return [10.0**power for power in range(first, last + 1, max(1, (last - first) // 5))]


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most about a thousand points: every second, third, ... one, and the last one."""
    last = len(points) - 1
    every = last // _MOST + 1
    return [point for place, point in enumerate(points) if place % every == 0 or place == last]


def _number(value: float, unit: str, digits: int = 3) -> str:
    return (
        f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}".replace("e-0", "e-")
    ) + unit


PAGE = "report.html"


def write_page(folders: Sequence[Path], out: Path, images: bool = True) -> None:
    """Write the page of these run folders. Raises ValueError or OSError if one of them is not the
    folder of a run.

    The runs are in the order of `best_first`. If folders have the same name, all are numbered.
    """
    runs = [read_run(folder, images) for folder in folders]
    if len({run["name"] for run in runs}) < len(runs):
        for number, run in enumerate(runs, 1):
            run["name"] += f" ({number})"
    runs = best_first(runs)
    rows = {"settings": settings_rows(runs), "metrics": metrics_rows(runs), "few": FEW}
    write_file(out, render("page.html", runs=runs, charts=charts(runs), **rows))


def best_first(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs sorted by the value of their best checkpoint, or in the given order if metrics
    differ; None last.
    """
    metrics = {run["metric"] for run in runs}
    sign = 0 if len(metrics) > 1 else -1 if runs[0]["highest_is_best"] else 1

    def rank(run: dict[str, Any]) -> float:
        value = run["best"].get(run["metric"])
        return math.inf if value is None else sign * value

    return sorted(runs, key=rank)


def charts(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The charts over updates of all runs, without empty ones."""
    shown = {
        name: word for run in runs for name, word in _metrics_of(run).items() if name != "top5"
    }
    titles = {"loss": "loss"} | shown | {"lr": "learning rate", "images_per_second": "images/s"}
    made = [line_chart(title, _lines(runs, name), _marks(runs)) for name, title in titles.items()]
    others = (
        ("time waiting for data", "data_wait", 100, "%"),
        ("GPU memory", "gpu_memory", 1e-9, " GB"),
    )
    for title, name, factor, unit in (*others, ("updates skipped in fp16", "skipped", 1, "")):
        made.append(line_chart(title, _lines(runs, name, factor), _marks(runs), unit))
    return [chart for chart in made if chart]


def _metrics_of(run: dict[str, Any]) -> dict[str, str]:
    """The metrics that a run's task shows, with their names on the page."""
    return dict(TASKS[run["settings"].get("task", "classification")].shown)


def _marks(runs: Sequence[dict[str, Any]]) -> list[int]:
    """The updates from which a single run was resumed."""
    return [start["step"] for start in runs[0]["start"] if start["step"]] if len(runs) == 1 else []


def _lines(runs: Sequence[dict[str, Any]], name: str, factor: float = 1) -> list[Series]:
    """The values of one name in the train and eval records of each run.

    Averaged weights have a line of their own.
    """
    lines = []
    for number, run in enumerate(runs):
        groups = {"training": run["train"]}
        for record in run["eval"]:
            groups.setdefault(f"evaluation {record.get('weights', '')}".strip(), []).append(record)
        for place, (group, records) in enumerate(groups.items()):
            points = [
                (record["step"], factor * record[name])
                for record in records
                if record.get(name) is not None
            ]
            label = group if len(runs) == 1 else f"{run['name']}, {group}"
            colour = place if len(runs) == 1 else number
            kind = "train" if not place else "raw" if group.endswith("raw") else "eval"
            lines.append(Series(label, f"c{colour % 8} {kind}", points))
    return lines


def settings_rows(runs: Sequence[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """The settings that differ from the defaults, or, with several runs, between them."""
    names = dict.fromkeys(name for run in runs for name in run["settings"])
    rows = [(name, [run["settings"].get(name, "default") for run in runs]) for name in names]
    if len(runs) == 1:
        return rows
    rows.append(("input", [(run["start"] or [{}])[-1].get("input", "unknown") for run in runs]))
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def metrics_rows(runs: Sequence[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """The metrics of the evaluation of each run, with their intervals; a cell without a value has
    no interval.
    """
    words = {name: word for run in runs for name, word in _metrics_of(run).items()}
    found = {
        name: name.replace("_", " ")
        for run in runs
        for name, value in run["evaluation"].items()
        if (value is None or isinstance(value, float)) and name not in ("seconds", "time")
    }
    rows = []
    for name in [name for name in words | found if name in found]:
        pairs = [
            (run["evaluation"].get(name), run["analysis"].get("intervals", {}).get(name))
            for run in runs
        ]
        cells = [
            {"value": value, "interval": None if value is None else bounds}
            for value, bounds in pairs
        ]
        rows.append((words.get(name, found[name]), cells))
    return rows
