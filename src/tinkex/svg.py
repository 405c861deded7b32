"""Charts and tables for web pages: the server's console, the HTML report of `run plot`, a notebook's cell.

A page loads nothing from elsewhere and follows the browser's light or dark theme. All text is escaped. This
module does not know what the numbers are; terminals and PNG files are in charts.py.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

from tinkex.charts import Series, bucket_means, finite_range, number

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


def html_page(title: str, body: str) -> str:
    """A whole page. `body` is HTML already."""
    dark = "; ".join(f"--{name}: {dark}" for name, (_, dark) in _COLOURS.items())
    return _PAGE.format(title=html.escape(title), body=body, dark=dark)


def html_table(facts: Mapping[str, str]) -> str:
    """Names and values as a table; "" if there are none."""
    rows = "".join(f"<tr><th>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>\n" for k, v in facts.items())
    return f"<table>\n{rows}</table>" if rows else ""


def svg_chart(series: Series, *, x_label: str = "step", x: Sequence[float] | None = None) -> str:
    """The chart as an SVG element, a panel for each series. A page may set its colours (`--ink`, …)."""
    steps = list(x) if x else list(range(1, max((len(values) for values in series.values()), default=0) + 1))
    low, high = finite_range(steps)
    x_range = (low, high) if low < high else _padded(low, high)
    height = (_TOP + _PANEL) * len(series) + _BOTTOM
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {height}" xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" '
        f'style="background: {_css("paper")}">'
    ]
    for index, (name, values) in enumerate(series.items()):
        parts += _panel(name, steps, values, index, x_range)
    below = (_TOP + _PANEL) * len(series)
    for tick in ticks(*x_range, most=8):
        if tick % 1 == 0:  # there are no fractional steps
            parts.append(_text(_across(tick, x_range), below + 28, number(tick), "faint", "middle"))
    parts += [_text(_WIDTH - _RIGHT, below + 62, x_label, "faint", "end"), "</svg>"]
    return "\n".join(parts)


def _panel(
    name: str, steps: Sequence[float], values: Sequence[float], index: int, x_range: tuple[float, float]
) -> list[str]:
    top, y_range = index * (_TOP + _PANEL) + _TOP, _padded(*finite_range(values))

    def down(value: float) -> float:
        return top + _PANEL * (y_range[1] - value) / (y_range[1] - y_range[0])

    right, bottom = _WIDTH - _RIGHT, top + _PANEL
    parts = [_text(_LEFT, top - 12, name, "ink", "start")]
    for tick in ticks(*y_range):
        parts.append(_line([(_LEFT, down(tick)), (right, down(tick))], "grid", 1.5))
        parts.append(_text(_LEFT - 12, down(tick) + 6, number(tick), "faint", "end"))
    parts.append(_line([(_LEFT, bottom), (right, bottom)], "faint", 1.5))
    for segment in _segments(steps[: len(values)], values):
        points = [(_across(step, x_range), down(value)) for step, value in segment]
        parts.append(_line(points, f"line-{index % _LINES}", 3.5 if len(points) > 1 else 9))
    return parts


def _across(step: float, x_range: tuple[float, float]) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (step - x_range[0]) / (x_range[1] - x_range[0])


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
        steps, values = bucket_means(steps, _WIDTH), bucket_means(values, _WIDTH)
    found: list[list[tuple[float, float]]] = [[]]
    for step, value in zip(steps, values, strict=True):
        if math.isfinite(value):
            found[-1].append((step, value))
        elif found[-1]:
            found.append([])
    return [segment for segment in found if segment]


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
