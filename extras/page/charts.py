"""The charts of a page: curves of runs over the updates, as SVG that matplotlib draws."""

import io
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from extras.page.html import number
from utils.console import join_names

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST = 1000  # points of a line
_GREY = "#808080"  # of axes and numbers; this and the colours can be read on white and on black
_COLOURS = ("#3b82f6", "#e8651a", "#1f9d55", "#a45ee5", "#b8860b", "#1593ac", "#d94a93", "#847b75")
_STYLES: dict[str, dict] = {
    "training": {"linewidth": 1, "alpha": 0.75},
    "evaluation": {"marker": "."},
    "evaluation raw": {"marker": ".", "linestyle": "dashed"},
    "evaluation ema": {"marker": "."},
}
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
    marks = []
    if len(runs) == 1:
        marks = [start["step"] for start in runs[0]["start"] if start["step"]]
    made = []
    for name, (title, factor, unit) in (shown | _OTHERS).items():
        figure = draw(runs, name, factor, unit)
        (axes,) = figure.axes
        if axes.lines:
            chart = {"title": title, "unit": unit, "lines": [*axes.lines]}
            if axes.get_yscale() == "log":
                chart["title"] = f"{title} (logarithmic)"
            for mark in marks:
                axes.axvline(mark, color=_GREY, linestyle="dashed", linewidth=1)
            made.append(chart | {"svg": _svg(figure), "resumed": join_names(marks)})
    return made


def draw(runs: Sequence[dict], name: str, factor: float, unit: str) -> "Figure":
    """A chart with the lines of all runs for the values called `name`, multiplied by `factor`.

    The axis of a loss is logarithmic if its values differ by a factor above 50.
    """
    from matplotlib.figure import Figure  # these take long to import
    from matplotlib.ticker import MaxNLocator

    figure = Figure((4.8, 2.5))
    axes = figure.add_axes((0.13, 0.1, 0.84, 0.86))
    values = []
    for place, run in enumerate(runs):
        for kind, points in points_of(run, name).items():
            label = kind
            colour = [*_STYLES].index(kind)
            if len(runs) > 1:
                label = f"{run['name']}, {kind}"
                colour = place % len(_COLOURS)
            steps, own = zip(*points, strict=True)
            scaled = [factor * value for value in own]
            axes.plot(steps, scaled, label=label, color=_COLOURS[colour], **_STYLES[kind])
            values += scaled
    if name == "loss" and values and 0 < 50 * min(values) < max(values):
        axes.set_yscale("log")
    if name in _FROM_ZERO:
        axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter(lambda value, _: number(value, 6) + unit)
    axes.grid(axis="y", color=_GREY, alpha=0.3)
    axes.tick_params(which="both", length=0, labelcolor=_GREY, labelsize=8)
    axes.spines[:].set_visible(False)
    return figure


def points_of(run: dict, name: str) -> dict[str, list[tuple[int, float]]]:
    """The updates and values of one name in the train and eval records of a run, by the kind of
    line, without NaN and infinite values, and at most about a thousand.

    Averaged weights have a line of their own.
    """
    lines = defaultdict(list)
    for record in [*run["train"], *run["eval"]]:
        value = record.get(name)
        if value is not None and math.isfinite(value):
            word = "training" if record["kind"] == "train" else "evaluation"
            lines[f"{word} {record.get('weights', '')}".strip()].append((record["step"], value))
    return {
        kind: [*points[: -1 : len(points) // _MOST + 1], points[-1]]
        for kind, points in lines.items()
    }


def _svg(figure: "Figure") -> str:
    """The figure as an SVG element without a background, the same for the same values."""
    from matplotlib import rc_context

    file = io.StringIO()
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "Lockstep"}):
        figure.savefig(file, format="svg", transparent=True, metadata=metadata)
    text = file.getvalue()
    return text[text.index("<svg") :]
