"""The charts of a page: curves of runs as SVG paths."""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

LEFT, RIGHT, TOP, BOTTOM = 52, 468, 10, 224  # of the plot in a chart, as in page.html
# The styles of lines by their labels: CSS classes of page.html.
_STYLES = {
    "training": "train",
    "evaluation": "eval",
    "evaluation raw": "raw",
    "evaluation ema": "eval",
}
_MOST = 1000  # points of a line
# Charts by the name of their values: title, factor and unit.
_OTHERS = {
    "lr": ("learning rate", 1, ""),
    "images_per_second": ("images/s", 1, ""),
    "data_wait": ("time waiting for data", 100, "%"),
    "gpu_memory": ("GPU memory", 1e-9, " GB"),
    "skipped": ("updates skipped in fp16", 1, ""),
}
_FROM_ZERO = ("images_per_second", "data_wait", "gpu_memory")  # else small changes would look large


def charts(runs: Sequence[dict], words: dict[str, str]) -> list[dict]:
    """The charts over updates of all runs, without empty ones.

    The updates from which a single run was resumed are marked.
    """
    shown = {name: (word, 1, "") for name, word in ({"loss": "loss"} | words).items()}
    shown.pop("top5", None)
    marks = [start["step"] for start in runs[0]["start"] if start["step"] and len(runs) == 1]
    made = [
        line_chart(name, title, lines_of(runs, name, factor), marks, unit)
        for name, (title, factor, unit) in (shown | _OTHERS).items()
    ]
    return [chart for chart in made if chart]


def lines_of(runs: Sequence[dict], name: str, factor: float) -> list[dict]:
    """The values of one name in the train and eval records of each run: label, CSS classes and
    points, without infinite values and at most about a thousand.

    Averaged weights have a line of their own.
    """
    lines = []
    several = len(runs) > 1
    for number, run in enumerate(runs):
        groups = defaultdict(list)
        for record in [*run["train"], *run["eval"]]:
            value = record.get(name)
            if value is not None and math.isfinite(value):
                word = "training" if record["kind"] == "train" else "evaluation"
                label = f"{word} {record.get('weights', '')}".strip()
                groups[label].append((record["step"], factor * value))
        for label, points in groups.items():
            colour = number if several else list(_STYLES).index(label)
            lines.append(
                {
                    "label": f"{run['name']}, {label}" if several else label,
                    "style": f"c{colour % 8} {_STYLES[label]}",
                    "points": [*points[: -1 : len(points) // _MOST + 1], *points[-1:]],
                }
            )
    return lines


def line_chart(name: str, title: str, lines: list[dict], marks: Sequence[int], unit: str) -> dict:
    """A chart of values over updates; `marks` are updates with a vertical line. Empty if there are
    no lines.

    The axis of a loss is logarithmic if its values differ by a factor above 50.
    """
    from matplotlib.ticker import MaxNLocator  # takes long to import

    if not lines:
        return {}
    steps, values = zip(*(point for line in lines for point in line["points"]), strict=True)
    low = min(values)
    high = max(values)
    end = max(steps) or 1
    low = min(0, low) if name in _FROM_ZERO else low
    logarithmic = name == "loss" and 0 < 50 * low < high
    if low == high:
        low = 0
        high = 2 * high or 1
    scale = np.log10 if logarithmic else np.asarray

    def ticks(low: float, high: float, whole: bool) -> np.ndarray:
        steps = (1, 2, 5, 10)
        return np.asarray(MaxNLocator(6, steps=steps, integer=whole).tick_values(low, high))

    low, high = scale([low, high]).tolist()
    rows = ticks(low, high, logarithmic)
    columns = ticks(0, end, True)
    columns = columns[columns <= end]

    def across(steps: Any) -> list[float]:
        return np.interp(steps, (0, end), (LEFT, RIGHT)).round(1).tolist()

    def down(scaled: np.ndarray) -> list[float]:
        return np.interp(scaled, rows[[0, -1]], (BOTTOM, TOP)).round(1).tolist()

    for line in lines:
        own, values = zip(*line["points"], strict=True)
        line["places"] = [*zip(across(own), down(scale(values)), strict=True)]
    return {
        "title": f"{title} (logarithmic)" if logarithmic else title,
        "unit": unit,
        "lines": lines,
        "rows": [*zip(down(rows), 10**rows if logarithmic else rows, strict=True)],
        "columns": [*zip(across(columns), columns, strict=True)],
        "marks": [*zip(across(marks), marks, strict=True)],
    }
