"""Curves of a few named numbers: sparklines, braille charts for a terminal, SVG for web pages, PNG files.

A value that is not finite is a gap, never an error. Several series become several panels over one x axis,
each with its own y scale, so that they differ without colour. A web page loads nothing from
elsewhere and follows the browser's light or dark theme; all text in it is escaped. Only `write_png` needs
the extra `tinkex[plot]`. This module does not know what the numbers are.

>>> sparkline([3, 2, 1.5, 1.2, 1.1, 1], 6)
'█▅▃▂▁▁'
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from tinkex.errors import TinkerError

Series = Mapping[str, Sequence[float]]

_BARS = "▁▂▃▄▅▆▇█"
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # braille: rows of (left, right)
_WIDTH, _PANEL, _LEFT, _RIGHT, _TOP, _BOTTOM = 1200, 280, 110, 40, 44, 80  # pixels; _TOP is above each panel
_COLOURS = {  # light, dark; a page overrides them by these names
    "paper": ("#ffffff", "#1c1f26"), "ink": ("#20242c", "#dfe3ea"), "faint": ("#68707c", "#949cab"),
    "grid": ("#e4e7ec", "#343943"), "line-0": ("#2563b9", "#6ea8fe"), "line-1": ("#c8551e", "#f0a06a"),
    "line-2": ("#1c825c", "#6fcf9f"), "line-3": ("#963c96", "#d59be0"), "line-4": ("#786428", "#d6bd6a"),
}  # fmt: skip
_LINES = sum(name.startswith("line-") for name in _COLOURS)
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
@media (prefers-color-scheme: dark) {{ :root {{ --desk: #121419; {dark} }} }}
</style>
<h1>{title}</h1>
{body}
</html>
"""


# -- in a terminal ---------------------------------------------------------------------------------------


def sparkline(values: Sequence[float], width: int = 20) -> str:
    """The shape of `values` in at most `width` characters."""
    points = _bucket_means(values, width)
    low, high = _finite_range(points)
    scale = (len(_BARS) - 1) / (high - low) if low < high else 0
    return "".join(" " if math.isnan(p) else _BARS[round((p - low) * scale) if scale else 3] for p in points)


def terminal_chart(
    series: Series, *, width: int = 72, height: int = 12, title: str = "", x: Sequence[float] | None = None
) -> str:
    """A chart of `width` columns and about `height` lines, in braille dots; a panel for each series.

    >>> print(terminal_chart({"loss": [3, 2, 1]}, width=24, height=3))  # doctest: +SKIP
    """
    lines = [title] if title else []
    rows = max(3, height // max(1, len(series)))
    margin = max((len(number(end)) for values in series.values() for end in _finite_range(values)), default=0)
    columns = max(8, width - margin - 2)
    for name, values in series.items():
        low, high = _finite_range(values)
        labels = {0: number(high), rows - 1: number(low)}
        if low >= high:  # all values are equal, or there is none
            labels = {rows - 1 - rows // 2: number(low)} if math.isfinite(low) else {}
        panel = enumerate(_braille(values, columns, rows))
        lines += [name, *(f"{labels.get(row, ''):>{margin}} ┤{cells}" for row, cells in panel)]
        first, last = (number(x[0]), number(x[-1])) if x else ("1", str(max(1, len(values))))
        space = " " * max(1, columns - len(first) - len(last))
        lines += [f"{' ' * margin} └{'─' * columns}", f"{' ' * margin}  {first}{space}{last}"]
    return "\n".join(lines)


def _braille(values: Sequence[float], columns: int, rows: int) -> list[str]:
    """`values` as a connected line, two dots to a column and four to a row."""
    wide, tall = columns * 2, rows * 4
    points = _bucket_means(values, wide) if len(values) > wide else values
    low, high = _finite_range(values)
    cells = [[0] * columns for _ in range(rows)]
    previous: tuple[int, int] | None = None
    for i, value in enumerate(points):
        if not math.isfinite(value):
            previous = None
            continue
        x1 = round(i * (wide - 1) / max(1, len(points) - 1))
        y1 = round((value - low) / (high - low) * (tall - 1)) if high > low else rows // 2 * 4 + 2
        x0, y0 = previous or (x1, y1)
        count = max(abs(x1 - x0), abs(y1 - y0), 1)
        for dot in range(count + 1):  # of a straight line from the point before
            column, row = round(x0 + (x1 - x0) * dot / count), round(y0 + (y1 - y0) * dot / count)
            cells[rows - 1 - row // 4][column // 2] |= _DOTS[3 - row % 4][column % 2]
        previous = (x1, y1)
    return ["".join(chr(0x2800 + cell) if cell else " " for cell in row).rstrip() for row in cells]


# -- files and pages -------------------------------------------------------------------------------------


def write_png(path: str | Path, series: Series, *, title: str = "", x: Sequence[float] | None = None) -> None:
    """Write the chart as a PNG, 1200 pixels wide. Needs matplotlib: `pip install 'tinkex[plot]'`."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise TinkerError("PNG charts need matplotlib: pip install 'tinkex[plot]'") from None
    count = max(1, len(series))
    figure: Any = Figure(figsize=(12, 1 + 3 * count), dpi=100, layout="constrained")
    panels = figure.subplots(count, 1, sharex=True, squeeze=False)[:, 0]
    if title:
        figure.suptitle(title)
    for index, (axes, (name, values)) in enumerate(zip(panels, series.items(), strict=False)):
        steps = x or range(1, len(values) + 1)
        finite = [value if math.isfinite(value) else math.nan for value in values]
        axes.plot(steps[: len(finite)], finite, f"C{index}", marker="o" if len(finite) < 3 else None)
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
    panels[-1].set_xlabel("step")
    figure.savefig(path, format="png", metadata={"Software": None})


def html_page(title: str, body: str) -> str:
    """A whole page. `body` is HTML already."""
    dark = "; ".join(f"--{name}: {dark}" for name, (_, dark) in _COLOURS.items())
    return _PAGE.format(title=html.escape(title), body=body, dark=dark)


def html_table(facts: Mapping[str, str]) -> str:
    """Names and values as a table; "" if there are none."""
    rows = "".join(f"<tr><th>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>\n" for k, v in facts.items())
    return f"<table>\n{rows}</table>" if rows else ""


def svg_chart(series: Series, *, x: Sequence[float] | None = None) -> str:
    """The chart as an SVG element, a panel for each series. A page may set its colours (`--ink`, …)."""
    steps = list(x) if x else list(range(1, max(map(len, series.values()), default=0) + 1))
    first, last = _finite_range(steps)
    first, last = (first, last) if first < last else _padded(first, last)
    right, height = _WIDTH - _RIGHT, (_TOP + _PANEL) * len(series)

    def across(step: float) -> float:
        return _LEFT + (right - _LEFT) * (step - first) / (last - first)

    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {height + _BOTTOM}" xmlns="http://www.w3.org/2000/svg" '
        f'font-family="sans-serif" style="background: {_css("paper")}">'
    ]
    for index, (name, values) in enumerate(series.items()):
        bottom, (low, high) = (_TOP + _PANEL) * (index + 1), _padded(*_finite_range(values))
        pixels = _PANEL / (high - low)  # of a unit
        parts.append(_text(_LEFT, bottom - _PANEL - 12, name, "ink", "start"))
        for tick in ticks(low, high):
            y = bottom - (tick - low) * pixels
            parts.append(_line([(_LEFT, y), (right, y)], "grid", 1.5))
            parts.append(_text(_LEFT - 12, y + 6, number(tick), "faint", "end"))
        parts.append(_line([(_LEFT, bottom), (right, bottom)], "faint", 1.5))
        for segment in _segments(steps[: len(values)], values):
            points = [(across(step), bottom - (value - low) * pixels) for step, value in segment]
            parts.append(_line(points, f"line-{index % _LINES}", 3.5 if len(points) > 1 else 9))
    for tick in ticks(first, last, most=8):
        if tick % 1 == 0:  # there are no fractional steps
            parts.append(_text(across(tick), height + 28, number(tick), "faint", "middle"))
    return "\n".join([*parts, _text(right, height + 62, "step", "faint", "end"), "</svg>"])


def _css(colour: str) -> str:
    return f"var(--{colour}, {_COLOURS[colour][0]})"


def _line(points: Sequence[tuple[float, float]], colour: str, width: float) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (points if len(points) > 1 else [*points] * 2))
    return (
        f'<polyline points="{path}" style="stroke: {_css(colour)}" stroke-width="{width:g}" fill="none" '
        'stroke-linejoin="round" stroke-linecap="round"/>'
    )


def _text(x: float, y: float, words: str, colour: str, anchor: str) -> str:
    style = f'font-size="18" text-anchor="{anchor}" style="fill: {_css(colour)}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{html.escape(words)}</text>'


def _padded(low: float, high: float) -> tuple[float, float]:
    """An axis that is never empty and keeps values off its edges."""
    if not low <= high:
        return 0.0, 1.0
    room = (high - low) * 0.04 or abs(low) * 0.1 or 1.0
    return low - room, high + room


def _segments(steps: Sequence[float], values: Sequence[float]) -> list[list[tuple[float, float]]]:
    """The points between two gaps, thinned to the picture's resolution."""
    if len(values) > 2 * _WIDTH:
        steps, values = _bucket_means(steps, _WIDTH), _bucket_means(values, _WIDTH)
    points = zip(steps, values, strict=True)
    runs = groupby(points, key=lambda point: math.isfinite(point[1]))
    return [list(run) for finite, run in runs if finite]


# -- numbers ---------------------------------------------------------------------------------------------


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers from `low` to `high`, at most about `most`.

    >>> ticks(0.2, 3.1)
    [1.0, 2.0, 3.0]
    """
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(n * step, 12) for n in range(first, math.floor(high / step + 1e-9) + 1)]


def number(value: float) -> str:
    """A value as an axis or a table shows it.

    >>> [number(v) for v in (0, 0.00002, 0.1234567, 12.345, 123456.0)]
    ['0', '2e-05', '0.1235', '12.35', '1.235e+05']
    """
    return f"{value:.4g}"


def _finite_range(values: Sequence[float]) -> tuple[float, float]:
    """The smallest and the largest finite value; (inf, -inf) if there is none."""
    finite = [value for value in values if math.isfinite(value)]
    return min(finite, default=math.inf), max(finite, default=-math.inf)


def _bucket_means(values: Sequence[float], width: int) -> list[float]:
    """At most `width` values, each the mean of its bucket; NaN for a bucket without a finite value."""
    count = min(len(values), max(1, width))
    edges = [len(values) * i // count for i in range(count + 1)] if count else [0]
    shares = [[v for v in values[a:b] if math.isfinite(v)] for a, b in pairwise(edges)]
    return [sum(share) / len(share) if share else math.nan for share in shares]
