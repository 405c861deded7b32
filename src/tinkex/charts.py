"""Curves of a few named numbers: sparklines, braille charts for a terminal, pictures as PNG and SVG.

A value that is not finite is a gap, never an error. Several series become several panels over one x axis,
each with its own y scale, so that they differ without colour. Pictures need the extra `tinkex[plot]`. This
module does not know what the numbers are.

>>> sparkline([3, 2, 1.5, 1.2, 1.1, 1], 6)
'█▅▃▂▁▁'
"""

from __future__ import annotations

import html
import io
import math
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

from tinkex.errors import TinkerError

Series = Mapping[str, Sequence[float]]

_BARS = "▁▂▃▄▅▆▇█"
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # braille: rows of (left, right)
_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1000px; padding: 0 1rem }}
h1 {{ font-size: 1.3rem }}
h1, td {{ overflow-wrap: anywhere }}
th, td {{ text-align: left; padding-right: 1.5rem; font-weight: normal; vertical-align: top }}
svg {{ width: 100%; height: auto }}
</style>
<h1>{title}</h1>
<table>
{rows}</table>
{chart}
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


def show_curves(
    say: Callable[[str], object], series: Series, png: Path, *, height: int, title: str = ""
) -> None:
    """Say a chart, and write it as a picture, where matplotlib is installed."""
    say(terminal_chart(series, width=72, height=height))
    png.parent.mkdir(parents=True, exist_ok=True)
    try:
        write_png(png, series, title=title)
    except TinkerError as error:  # matplotlib is an optional extra
        say(f"No picture was written. {error}")
    else:
        say(f"As a picture: {png}")


# -- pictures, by matplotlib -----------------------------------------------------------------------------


def write_png(path: str | Path, series: Series, *, title: str = "", x: Sequence[float] | None = None) -> None:
    """Write the chart as a PNG, 1200 pixels wide. Needs matplotlib: `pip install 'tinkex[plot]'`."""
    _figure(series, title, x).savefig(path, format="png", metadata={"Software": None})


def svg_chart(series: Series, *, x: Sequence[float] | None = None) -> str:
    """The chart as an SVG element. Needs matplotlib, too."""
    figure, out = _figure(series, "", x), io.StringIO()
    matplotlib: Any = import_module("matplotlib")
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text
        figure.savefig(out, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = out.getvalue()
    return text[text.index("<svg") :]


def _figure(series: Series, title: str, x: Sequence[float] | None) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise TinkerError("pictures of charts need matplotlib: pip install 'tinkex[plot]'") from None
    count = max(1, len(series))
    figure: Any = Figure(figsize=(12, 1 + 3 * count), dpi=100, layout="constrained")
    panels = figure.subplots(count, 1, sharex=True, squeeze=False)[:, 0]
    if title:
        figure.suptitle(title)
    for index, (axes, (name, values)) in enumerate(zip(panels, series.items(), strict=False)):
        steps = x or range(1, len(values) + 1)
        finite = [value if math.isfinite(value) else math.nan for value in values]
        axes.plot(steps[: len(finite)], finite, f"C{index}", marker="o" if len(finite) < 3 else None)
        axes.set_ylabel(name, parse_math=False)
        axes.grid(alpha=0.3)
    panels[-1].set_xlabel("step")
    return figure


def html_page(title: str, facts: Mapping[str, str], chart: str) -> str:
    """A page of names, values and a chart; it loads nothing from elsewhere."""
    rows = "".join(f"<tr><th>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>\n" for k, v in facts.items())
    return _PAGE.format(title=html.escape(title), rows=rows, chart=chart)


# -- numbers ---------------------------------------------------------------------------------------------


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
