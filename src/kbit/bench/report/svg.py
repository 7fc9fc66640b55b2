"""Line and point charts as inline SVG: text stays text, colours follow the page's light or dark scheme."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from kbit.bench.report.markup import escape

WIDTH, HEIGHT = 500, 310
LEFT, RIGHT, TOP, BOTTOM = 54, 22, 12, 44
_MARK = 3.6
_TICKS = 6


@dataclass(frozen=True)
class Series:
    """Points joined by a line or not. `style` is a CSS class that sets the colour, `shape` the marker's."""

    name: str
    points: Sequence[tuple[float, float]]
    style: str
    shape: int = 0
    line: bool = True
    dash: str = ""
    mark: bool = True


@dataclass(frozen=True)
class Axis:
    """Range and ticks; without `ticks`, round ones that enclose the data."""

    label: str
    log: bool = False
    ticks: Sequence[float] = ()
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Chart:
    """A chart. `levels` are horizontal and `marks` vertical lines with a text, `shade` a rectangle (x0, x1,
    y0, y1) in the colour of losses.
    """

    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    levels: Sequence[tuple[float, str]] = ()
    marks: Sequence[tuple[float, str]] = ()
    shade: tuple[float, float, float, float] | None = None


@dataclass
class _Scale:
    """From values to places on the page."""

    low: float
    high: float
    start: float
    end: float
    log: bool
    ticks: list[float] = field(default_factory=list)

    def __call__(self, value: float) -> float:
        low, high, value = (
            (math.log(self.low), math.log(self.high), math.log(value))
            if self.log
            else (self.low, self.high, value)
        )
        part = (value - low) / (high - low) if high > low else 0.5
        return round(self.start + part * (self.end - self.start), 1)


def nice_ticks(low: float, high: float) -> list[float]:
    """About `_TICKS` round numbers, from at most `low` to at least `high`."""
    span = (high - low) or abs(high) or 1.0
    rough = span / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten from at most `low` to at least `high`; with their 2 and 5 where there are few."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1, 2, 5) if last - first <= 2 else (1,)
    ticks = [step * 10.0**power for power in range(first, last + 1) for step in steps]
    inner = [tick for tick in ticks if low <= tick <= high]
    below = [tick for tick in ticks if tick < low][-1:]
    above = [tick for tick in ticks if tick > high][:1]
    return [*below, *inner, *above]


def _scale(axis: Axis, values: Sequence[float], start: float, end: float) -> _Scale:
    low = axis.low if axis.low is not None else min(values)
    high = axis.high if axis.high is not None else max(values)
    ticks = list(axis.ticks) or (log_ticks(low, high) if axis.log else nice_ticks(low, high))
    return _Scale(min(low, ticks[0]), max(high, ticks[-1]), start, end, axis.log, ticks)


def draw(chart: Chart) -> str:
    """A figure with the chart and its legend.

    Raises:
        ValueError: there is no point.
    """
    points = [point for series in chart.series for point in series.points]
    if not points:
        raise ValueError(f"bench report: chart {chart.title!r} has no points.")
    x = _scale(chart.x, [*(x for x, _ in points), *(at for at, _ in chart.marks)], LEFT, WIDTH - RIGHT)
    heights = [*(y for _, y in points), *(at for at, _ in chart.levels)]
    y = _scale(chart.y, heights, HEIGHT - BOTTOM, TOP)
    content = [
        *_frame(chart, x, y),
        *_references(chart, x, y),
        *(part for series in chart.series for part in _series(series, x, y)),
    ]
    legend = "".join(_legend(series) for series in chart.series)
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(_summary(chart))}">'
        + "".join(content)
        + f'</svg><figcaption><strong>{escape(chart.title)}</strong><ul class="legend">{legend}</ul>'
        "</figcaption></figure>"
    )


def _summary(chart: Chart) -> str:
    names = ", ".join(series.name for series in chart.series)
    return f"{chart.title}. {chart.y.label} over {chart.x.label}: {names}."


def _number(value: float) -> str:
    return f"{value:g}" if abs(value) < 1e4 else f"{value / 1e3:g}k"


def _frame(chart: Chart, x: _Scale, y: _Scale) -> list[str]:
    """Grid, tick labels and axis labels."""
    parts = []
    for tick in y.ticks:
        place = y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{place}" y2="{place}"/>')
        parts.append(f'<text x="{LEFT - 7}" y="{place + 4}" text-anchor="end">{_number(tick)}</text>')
    for tick in x.ticks:
        place = x(tick)
        parts.append(f'<line class="grid" x1="{place}" x2="{place}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(
            f'<text x="{place}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle">{_number(tick)}</text>'
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<text class="axis" x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">'
        f"{escape(chart.x.label)}</text>"
    )
    center = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text class="axis" transform="translate(14 {center}) rotate(-90)" text-anchor="middle">'
        f"{escape(chart.y.label)}</text>"
    )
    return parts


def _references(chart: Chart, x: _Scale, y: _Scale) -> list[str]:
    parts = []
    if chart.shade is not None:
        x0, x1, y0, y1 = chart.shade
        parts.append(
            f'<rect class="loss" x="{x(x0)}" y="{y(y1)}" width="{round(x(x1) - x(x0), 1)}" '
            f'height="{round(y(y0) - y(y1), 1)}"/>'
        )
    for level, text in chart.levels:
        place = y(level)
        parts.append(f'<line class="level" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{place}" y2="{place}"/>')
        parts.append(f'<text class="note" x="{LEFT + 5}" y="{place - 5}">{escape(text)}</text>')
    for mark, text in chart.marks:
        place = x(mark)
        parts.append(f'<line class="mark" x1="{place}" x2="{place}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        # On the side of the line with more room.
        right = place < (LEFT + WIDTH - RIGHT) / 2
        anchor, left = ("start", place + 6) if right else ("end", place - 6)
        for index, line in enumerate(text.split("\n")):
            height = HEIGHT - BOTTOM - 24 + 15 * index
            parts.append(
                f'<text class="lost" x="{left}" y="{height}" text-anchor="{anchor}">{escape(line)}</text>'
            )
    return parts


def _series(series: Series, x: _Scale, y: _Scale) -> list[str]:
    places = [(x(a), y(b)) for a, b in series.points]
    parts = []
    if series.line:
        path = " ".join(f"{a},{b}" for a, b in places)
        dash = f' stroke-dasharray="{series.dash}"' if series.dash else ""
        parts.append(f'<polyline class="line {series.style}" points="{path}"{dash}/>')
    for (a, b), (left, up) in zip(series.points, places, strict=True) if series.mark else ():
        title = f"<title>{escape(series.name)}: {_number(a)}, {b:.4g}</title>"
        parts.append(f'<g class="{series.style}">{_marker(series.shape, left, up)}{title}</g>')
    return parts


def _marker(shape: int, x: float, y: float) -> str:
    """A circle, square, triangle or diamond: colour is not all that tells series apart."""
    r = _MARK
    if shape % 4 == 0:
        return f'<circle cx="{x}" cy="{y}" r="{r}"/>'
    corners = {
        1: [(-r, -r), (r, -r), (r, r), (-r, r)],
        2: [(0, -1.3 * r), (1.2 * r, r), (-1.2 * r, r)],
        3: [(0, -1.4 * r), (1.4 * r, 0), (0, 1.4 * r), (-1.4 * r, 0)],
    }[shape % 4]
    points = " ".join(f"{round(x + dx, 1)},{round(y + dy, 1)}" for dx, dy in corners)
    return f'<polygon points="{points}"/>'


def _legend(series: Series) -> str:
    dash = f' stroke-dasharray="{series.dash}"' if series.dash else ""
    line = f'<polyline class="line {series.style}" points="1,7 25,7"{dash}/>' if series.line else ""
    mark = f'<g class="{series.style}">{_marker(series.shape, 13, 7)}</g>' if series.mark else ""
    return f'<li><svg viewBox="0 0 26 14" aria-hidden="true">{line}{mark}</svg>{escape(series.name)}</li>'
