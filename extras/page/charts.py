"""The charts of a page: curves of runs over the updates, as SVG that matplotlib draws."""

import io
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from extras.page.html import number
from utils.console import join_names

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST = 1000  # points of a line
_GREY = "#808080"  # of axes and numbers; this and the colours can be read on white and on black
_COLOURS = ("#3b82f6", "#e8651a", "#1f9d55", "#a45ee5", "#b8860b", "#1593ac", "#d94a93", "#847b75")
# The colour of each label on the page of a single run, as a place in _COLOURS.
_LABELS = ("training", "evaluation", "evaluation raw", "evaluation ema")
# Charts by the name of their values: title, factor and unit.
_OTHERS = {
    "lr": ("learning rate", 1, ""),
    "images_per_second": ("images/s", 1, ""),
    "data_wait": ("time waiting for data", 100, "%"),
    "gpu_memory": ("GPU memory", 1e-9, " GB"),
    "skipped": ("updates skipped in fp16", 1, ""),
}
_FROM_ZERO = ("images_per_second", "data_wait", "gpu_memory")  # else small changes would look large


class Line(NamedTuple):
    """A line of a chart. That of a training loss is thin, that of raw weights dashed."""

    label: str
    kind: str  # one of _LABELS
    colour: str
    points: list[tuple[int, float]]  # update and value

    @property
    def style(self) -> str:
        return "dashed" if self.kind == "evaluation raw" else "solid"


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
        lines = lines_of(runs, name, factor)
        if lines:
            figure = draw(name, lines, marks, unit)
            scale = figure.axes[0].get_yscale()
            chart: dict[str, Any] = {"lines": lines, "unit": unit, "svg": svg(figure)}
            chart["title"] = title if scale == "linear" else f"{title} (logarithmic)"
            chart["resumed"] = join_names(marks)
            made.append(chart)
    return made


def lines_of(runs: Sequence[dict], name: str, factor: float) -> list[Line]:
    """The values of one name in the train and eval records of each run, without infinite values and
    at most about a thousand.

    Averaged weights have a line of their own.
    """
    lines = []
    several = len(runs) > 1
    for place, run in enumerate(runs):
        groups = defaultdict(list)
        for record in [*run["train"], *run["eval"]]:
            value = record.get(name)
            if value is not None and math.isfinite(value):
                word = "training" if record["kind"] == "train" else "evaluation"
                kind = f"{word} {record.get('weights', '')}".strip()
                groups[kind].append((record["step"], factor * value))
        for kind, points in groups.items():
            label = f"{run['name']}, {kind}" if several else kind
            colour = _COLOURS[(place if several else _LABELS.index(kind)) % len(_COLOURS)]
            some = [*points[: -1 : len(points) // _MOST + 1], points[-1]]
            lines.append(Line(label, kind, colour, some))
    return lines


def draw(name: str, lines: Sequence[Line], marks: Sequence[int], unit: str) -> "Figure":
    """A chart of the values called `name` over updates; `marks` are updates with a vertical line.

    The axis of a loss is logarithmic if its values differ by a factor above 50.
    """
    from matplotlib.figure import Figure  # these take long to import
    from matplotlib.ticker import MaxNLocator, NullFormatter

    figure = Figure((4.8, 2.5))
    axes = figure.add_axes((0.13, 0.1, 0.82, 0.86), facecolor="none")
    for line in lines:
        is_training = line.kind == "training"
        few = len(line.points) <= 40 and not is_training
        axes.plot(
            *zip(*line.points, strict=True),
            color=line.colour,
            linestyle=line.style,
            linewidth=1 if is_training else 1.5,
            alpha=0.75 if is_training else 1,
            marker="o" if few else "",
            markersize=3,
            clip_on=False,
        )
    for mark in marks:
        axes.axvline(mark, color=_GREY, linestyle="dashed", linewidth=1)
    values = [value for line in lines for _, value in line.points]
    low = min(values)
    high = max(values)
    if name == "loss" and 0 < 50 * low < high:
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(6, steps=(1, 2, 5, 10)))
        if low == high:
            axes.set_ylim(0, 2 * high or 1)
        elif name in _FROM_ZERO:
            axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=(1, 2, 5, 10), integer=True))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter(lambda value, _: number(value, 6) + unit)
    axes.set_xlim(0, max(step for line in lines for step, _ in line.points) or 1)
    axes.grid(axis="y", color=_GREY, alpha=0.3)
    axes.tick_params(which="both", length=0, labelcolor=_GREY, labelsize=8)
    axes.spines[:].set_visible(False)
    return figure


def svg(figure: "Figure") -> str:
    """The figure as an SVG element without a background, the same for the same values."""
    from matplotlib import rc_context

    file = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "Lockstep"}):
        figure.savefig(
            file,
            format="svg",
            transparent=True,
            metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")),
        )
    text = file.getvalue()
    return text[text.index("<svg") :]
