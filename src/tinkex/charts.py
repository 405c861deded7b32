"""Curves of a few named numbers over time: a sparkline, a chart for a terminal, a PNG, an HTML page.

Promises: nothing beyond the base install; the same numbers give the same bytes; a value that is not finite
is a gap, never an error. Several series are several panels over one x axis, each on its own scale: they
can be told apart without colour. Knows nothing of runs.

>>> sparkline([3, 2, 1.5, 1.2, 1.1, 1], 6)
'█▅▃▂▁▁'
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Protocol

Point = tuple[float, float]
Colour = tuple[int, int, int]
Series = Mapping[str, Sequence[float]]

_BARS = "▁▂▃▄▅▆▇█"
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # braille: rows of (left, right)


# -- in a terminal ---------------------------------------------------------------------------------------


def sparkline(values: Sequence[float], width: int = 20) -> str:
    """The shape of `values` in at most `width` characters."""
    points = _buckets(values, width)
    low, high = _span(points)
    if low == high:
        return "".join(" " if math.isnan(p) else _BARS[3] for p in points)
    scale = (len(_BARS) - 1) / (high - low)
    return "".join(" " if math.isnan(p) else _BARS[round((p - low) * scale)] for p in points)


def terminal_chart(
    series: Series,
    *,
    width: int = 72,
    height: int = 12,
    title: str = "",
    x: Sequence[float] | None = None,
) -> str:
    """A chart of `width` columns and about `height` lines, in braille dots; a panel for each series.

    >>> print(terminal_chart({"loss": [3, 2, 1]}, width=24, height=3))  # doctest: +SKIP
    """
    lines = [title] if title else []
    rows = max(3, height // max(1, len(series)))
    margin = max((len(number(end)) for values in series.values() for end in _span(values)), default=0)
    for name, values in series.items():
        lines += [name, *_panel(values, max(8, width - margin - 2), rows, margin)]
        lines.append(_x_axis(_ends(x, len(values)), max(8, width - margin - 2), margin))
    return "\n".join(lines)


def _panel(values: Sequence[float], columns: int, rows: int, margin: int) -> list[str]:
    low, high = _span(values)
    labels = {0: number(high), rows - 1: number(low)}
    if low >= high:  # all the same, or nothing at all
        labels = {rows - 1 - rows // 2: number(low)} if math.isfinite(low) else {}
    cells = _braille(values, columns, rows)
    return [f"{labels.get(row, ''):>{margin}} ┤{cells[row]}" for row in range(rows)]


def _x_axis(ends: tuple[str, str], columns: int, margin: int) -> str:
    space = " " * max(1, columns - len(ends[0]) - len(ends[1]))
    return f"{' ' * margin} └{'─' * columns}\n{' ' * margin}  {ends[0]}{space}{ends[1]}"


def _braille(values: Sequence[float], columns: int, rows: int) -> list[str]:
    """`values` as a connected line, two dots to a column and four to a row."""
    wide, tall = columns * 2, rows * 4
    points = _buckets(values, wide) if len(values) > wide else list(values)
    low, high = _span(values)
    cells = [[0] * columns for _ in range(rows)]
    previous: tuple[int, int] | None = None
    for i, value in enumerate(points):
        if not math.isfinite(value):
            previous = None
            continue
        at = round(i * (wide - 1) / max(1, len(points) - 1))
        up = round((value - low) / (high - low) * (tall - 1)) if high > low else rows // 2 * 4 + 2
        for column, row in _between(previous or (at, up), (at, up)):
            cells[rows - 1 - row // 4][column // 2] |= _DOTS[3 - row % 4][column % 2]
        previous = (at, up)
    return ["".join(chr(0x2800 + cell) if cell else " " for cell in row).rstrip() for row in cells]


def _between(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """The dots of a straight line."""
    (x0, y0), (x1, y1) = start, end
    count = max(abs(x1 - x0), abs(y1 - y0), 1)
    return [(round(x0 + (x1 - x0) * i / count), round(y0 + (y1 - y0) * i / count)) for i in range(count + 1)]


# -- numbers ---------------------------------------------------------------------------------------------


def number(value: float) -> str:
    """A value as an axis or a table shows it.

    >>> [number(v) for v in (0, 0.00002, 0.1234567, 12.345, 123456.0)]
    ['0', '2e-05', '0.1235', '12.35', '1.235e+05']
    """
    return f"{value:.4g}"


def _span(values: Sequence[float]) -> tuple[float, float]:
    """The smallest and the largest; (inf, -inf) if there is none."""
    finite = [value for value in values if math.isfinite(value)]
    return min(finite, default=math.inf), max(finite, default=-math.inf)


def _buckets(values: Sequence[float], width: int) -> list[float]:
    """At most `width` values, each the mean of its share; NaN where a share has none."""
    count = min(len(values), max(1, width))
    edges = [len(values) * i // count for i in range(count + 1)] if count else [0]
    shares = [[v for v in values[a:b] if math.isfinite(v)] for a, b in pairwise(edges)]
    return [sum(share) / len(share) if share else math.nan for share in shares]


def _ends(x: Sequence[float] | None, count: int) -> tuple[str, str]:
    """What stands at both ends of the x axis."""
    if x:
        return number(x[0]), number(x[-1])
    return "1", str(max(1, count))


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers from `low` to `high`, at most about `most`.

    >>> ticks(0.2, 3.1)
    [1.0, 2.0, 3.0]
    """
    if not low < high:
        return [low] if math.isfinite(low) else []
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(n * step, 12) for n in range(first, math.floor(high / step + 1e-9) + 1)]


# -- as files --------------------------------------------------------------------------------------------


def write_png(
    path: str | Path,
    series: Series,
    *,
    title: str = "",
    x_label: str = "step",
    y_label: str = "",
    x: Sequence[float] | None = None,
) -> None:
    """Write the chart as a PNG, 1200 pixels wide; `y_label` stands in for a single series' own name."""
    from tinkex.drawing import Canvas

    canvas = Canvas(_WIDE, _height(series, titled=bool(title)))
    _draw(canvas, _named(series, y_label), title, x_label, x)
    canvas.write_png(path)


def write_html(
    path: str | Path,
    series: Series,
    *,
    title: str = "",
    x_label: str = "step",
    y_label: str = "",
    x: Sequence[float] | None = None,
    facts: Mapping[str, str] | None = None,
) -> None:
    """Write the chart as one HTML file that needs nothing else; `facts` become a table above it."""
    chart = svg_chart(_named(series, y_label), x_label=x_label, x=x)
    page = html_page(title, f"{html_table(facts or {})}\n{chart}")
    Path(path).write_text(page, encoding="utf-8")


def html_page(title: str, body: str) -> str:
    """A page that needs nothing else, by day and by night; its `body` is HTML already."""
    night = "; ".join(f"--{name}: {colour}" for name, colour in _BY_NIGHT.items())
    return _PAGE.format(title=_safe(title), body=body, night=night)


def html_table(facts: Mapping[str, str]) -> str:
    """Names and what they are, as a table; "" if there are none."""
    rows = "".join(f"<tr><th>{_safe(k)}</th><td>{_safe(v)}</td></tr>\n" for k, v in facts.items())
    return f"<table>\n{rows}</table>" if rows else ""


def svg_chart(series: Series, *, x_label: str = "step", x: Sequence[float] | None = None) -> str:
    """The chart as an SVG element: for a notebook, or for a page, which may set its colours (`--ink`, …)."""
    svg = _Svg(_WIDE, _height(series, titled=False))
    _draw(svg, series, "", x_label, x)
    return svg.markup()


_WIDE, _MARGIN = 1200, (110, 40)  # left and right of a panel
_TITLE, _NAME, _PANEL = 52, 52, 300  # heights: of the title, of the first panel's name, of a panel
_GAP, _AXIS = 64, 80  # between two panels, below the last
_PAPER, _INK, _FAINT, _GRID = (255, 255, 255), (32, 36, 44), (104, 112, 124), (228, 231, 236)
_LINES = ((37, 99, 185), (200, 85, 30), (28, 130, 92), (150, 60, 150), (120, 100, 40))
_BY_NIGHT = {  # the same for a dark page, by the names that a chart asks for
    "paper": "#1c1f26", "ink": "#dfe3ea", "faint": "#949cab", "grid": "#343943",
    "line-0": "#6ea8fe", "line-1": "#f0a06a", "line-2": "#6fcf9f", "line-3": "#d59be0", "line-4": "#d6bd6a",
}  # fmt: skip
_NAMES = {_PAPER: "paper", _INK: "ink", _FAINT: "faint", _GRID: "grid"} | {
    colour: f"line-{i}" for i, colour in enumerate(_LINES)
}
_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: var(--ink, #20242c); background: var(--desk, #f6f7f9);
       margin: 2rem auto; max-width: 1000px; padding: 0 1rem }}
h1 {{ font-size: 1.3rem; overflow-wrap: anywhere }}
table {{ border-collapse: collapse; margin: 1rem 0 }}
th, td {{ text-align: left; padding: .15rem 1.5rem .15rem 0; font-weight: normal; overflow-wrap: anywhere }}
th {{ color: var(--faint, #68707c); white-space: nowrap; vertical-align: top }}
svg {{ width: 100%; height: auto; border-radius: 6px; font-family: inherit }}
@media (max-width: 640px) {{ svg text {{ font-size: 26px }} }}
@media (prefers-color-scheme: dark) {{ :root {{ --desk: #121419; {night} }} }}
</style>
<h1>{title}</h1>
{body}
</html>
"""


class _Pen(Protocol):
    """What a chart is drawn with: a canvas, or a list of SVG's elements."""

    def line(self, points: Sequence[Point], colour: Colour, width: float = 1.0) -> None: ...

    def text(
        self, at: Point, words: str, colour: Colour, size: float = 14.0, *, anchor: str = "start"
    ) -> None: ...


class _Svg:
    def __init__(self, width: int, height: int) -> None:
        self._parts = [
            f'<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" '
            f'font-family="sans-serif" style="background: {_css(_PAPER)}">'
        ]

    def line(self, points: Sequence[Point], colour: Colour, width: float = 1.0) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (points if len(points) > 1 else [*points] * 2))
        self._parts.append(
            f'<polyline points="{path}" style="stroke: {_css(colour)}" stroke-width="{width:g}" fill="none" '
            'stroke-linejoin="round" stroke-linecap="round"/>'
        )

    def text(
        self, at: Point, words: str, colour: Colour, size: float = 14.0, *, anchor: str = "start"
    ) -> None:
        self._parts.append(  # a font's size is its line's, about 1.4 times that of a capital
            f'<text x="{at[0]:.1f}" y="{at[1]:.1f}" font-size="{size * 1.4:g}" text-anchor="{anchor}" '
            f'style="fill: {_css(colour)}">{_safe(words)}</text>'
        )

    def markup(self) -> str:
        return "\n".join([*self._parts, "</svg>"])


def _css(colour: Colour) -> str:
    """A colour that a page may set, and what it is where none does."""
    return f"var(--{_NAMES[colour]}, rgb{colour})"


def _draw(pen: _Pen, series: Series, title: str, x_label: str, x: Sequence[float] | None) -> None:
    if title:
        pen.text((_MARGIN[0], 48), title, _INK, 17)
    steps = list(x) if x else list(range(1, max((len(values) for values in series.values()), default=0) + 1))
    across = _span(steps) if len(set(steps)) > 1 else _padded(*_span(steps))
    top = _top(titled=bool(title))
    for index, (name, values) in enumerate(series.items()):
        box = _Box(_MARGIN[0], top, _WIDE - sum(_MARGIN), _PANEL, across, _padded(*_span(values)))
        _draw_axes(pen, box, name, last=index == len(series) - 1)
        for stretch in _stretches(steps[: len(values)], values):
            points = [box.place(*point) for point in stretch]
            pen.line(points, _LINES[index % len(_LINES)], 3.5 if len(points) > 1 else 9)
        top += _PANEL + _GAP
    pen.text((_WIDE - _MARGIN[1], top - _GAP + 62), x_label, _FAINT, 13, anchor="end")


def _draw_axes(pen: _Pen, box: _Box, name: str, *, last: bool) -> None:
    pen.text((box.left, box.top - 12), name, _INK, 13)
    for value in ticks(*box.y):
        _, at = box.place(box.x[0], value)
        pen.line([(box.left, at), (box.left + box.width, at)], _GRID, 1.5)
        pen.text((box.left - 12, at + 6), number(value), _FAINT, 12, anchor="end")
    for value in ticks(*box.x, most=8) if last else ():
        if value % 1:
            continue  # there is no half a step
        at, _ = box.place(value, box.y[0])
        pen.text((at, box.top + box.height + 28), number(value), _FAINT, 12, anchor="middle")
    below = box.top + box.height
    pen.line([(box.left, below), (box.left + box.width, below)], _FAINT, 1.5)


class _Box(NamedTuple):
    """A panel: where it is, and which values its edges stand for."""

    left: float
    top: float
    width: float
    height: float
    x: tuple[float, float]
    y: tuple[float, float]

    def place(self, x: float, y: float) -> Point:
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return self.left + across * self.width, self.top + (1 - up) * self.height


def _padded(low: float, high: float) -> tuple[float, float]:
    """An axis that its values fit on: never empty, with a little room where they would touch its edge."""
    if not low <= high:
        return 0.0, 1.0
    room = (high - low) * 0.04 or abs(low) * 0.1 or 1.0
    return low - room, high + room


def _stretches(steps: Sequence[float], values: Sequence[float]) -> list[list[Point]]:
    """The points between two gaps; thinned to what a picture can show."""
    if len(values) > 2 * _WIDE:
        steps, values = _buckets(steps, _WIDE), _buckets(values, _WIDE)
    found: list[list[Point]] = [[]]
    for step, value in zip(steps, values, strict=True):
        if math.isfinite(value):
            found[-1].append((step, value))
        elif found[-1]:
            found.append([])
    return [stretch for stretch in found if stretch]


def _top(*, titled: bool) -> int:
    return _TITLE * titled + _NAME


def _height(series: Series, *, titled: bool) -> int:
    return _top(titled=titled) + _PANEL * len(series) + _GAP * (len(series) - 1) + _AXIS


def _named(series: Series, y_label: str) -> Series:
    return dict(zip([y_label], series.values(), strict=True)) if y_label and len(series) == 1 else series


_safe = html.escape
