"""The coordinates of the lines and ticks of the page's charts; page.html draws them as SVG."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

WIDTH, HEIGHT = 480, 250  # of a chart, in SVG units
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 10, 26  # space around the plot, for the ticks
_MOST = 1000  # points of a line
_FROM_ZERO = ("images/s", "time waiting for data")  # else small changes would look large


class Series(NamedTuple):
    """A line of a chart: its label, its style (a CSS class of page.html), and its points."""

    label: str
    style: str
    points: Sequence[tuple[float, float]]


def line_chart(title: str, series: Sequence[Series], marks: Sequence[int] = (), unit: str = "") -> dict[str, Any]:
    """A chart of values over updates; `marks` are updates with a vertical line. Empty if there are no points.

    NaN and infinite values are left out. The axis of a loss is logarithmic if its values differ by a factor above 50.
    """
    lines = [s._replace(points=_thinned([p for p in s.points if math.isfinite(p[1])])) for s in series]
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
        "columns": [(column(tick), f"{tick:,.0f}") for tick in nice_ticks(0, end) if tick == int(tick)],
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
    return (f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}".replace("e-0", "e-")) + unit
