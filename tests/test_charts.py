"""Charts: sparklines, terminal charts, PNG files and SVG, read back from what was written."""

from __future__ import annotations

import json
import math
import sys
import xml.etree.ElementTree as xml
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.charts import (
    html_page,
    number,
    sparkline,
    svg_chart,
    terminal_chart,
    write_png,
)
from tinkex.client.rest_results import StepMetrics
from tinkex.errors import TinkerError

NAN = math.nan
numbers = st.floats(allow_nan=True, allow_infinity=True, width=32)


def read_png(path: Path) -> np.ndarray:
    from matplotlib.image import imread

    return imread(path)


def test_a_sparkline_has_the_shape_of_its_values() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([7, 0], 8) == "█▁"
    assert sparkline([1] * 50 + [9] * 50, 4) == "▁▁██"
    assert sparkline([5, 5, 5], 8) == "▄▄▄"
    assert sparkline([1, NAN, 2], 8) == "▁ █"
    assert sparkline([], 8) == ""


@given(st.lists(numbers, max_size=50), st.integers(1, 30))
def test_no_values_are_too_odd(values: list[float], width: int) -> None:
    assert len(sparkline(values, width)) == min(width, len(values))
    lines = terminal_chart({"a": values}, width=40, height=4).splitlines()
    assert max(map(len, lines)) <= 40


def test_a_chart_in_the_terminal() -> None:
    chart = terminal_chart(
        {"loss": [4, 3, 2, 1, 0]}, width=24, height=4, title="A run", x=[10, 11, 12, 13, 50]
    )
    title, name, *rows, axis, ends = chart.splitlines()
    assert (title, name) == ("A run", "loss")
    assert [row.split(" ┤")[0] for row in rows] == ["4", " ", " ", "0"]
    assert axis == "  └" + "─" * 21
    assert ends.split() == ["10", "50"]
    filled = [[i for i, c in enumerate(row.split("┤")[1]) if c != " "] for row in rows]
    assert filled[0][0] == 0  # it falls from the top left …
    assert max(filled[-1]) >= 19  # … to the bottom right
    assert all(max(upper) <= min(lower) + 1 for upper, lower in pairwise(filled))


def test_several_series_are_panels_on_one_axis() -> None:
    lines = terminal_chart({"loss": [100, 1], "rate": [0.5, 0.5]}, width=40, height=8).splitlines()
    assert [line for line in lines if line in ("loss", "rate")] == ["loss", "rate"]
    assert len({line.index("┤") for line in lines if "┤" in line}) == 1


def test_numbers_are_short() -> None:
    assert [number(v) for v in (0, 1e-5, 0.123456, 99.99999, 1234567)] == [
        "0", "1e-05", "0.1235", "100", "1.235e+06"
    ]  # fmt: skip


@pytest.mark.slow
def test_the_line_of_a_png_goes_where_its_values_are(tmp_path: Path) -> None:
    values = [0.0, 10.0, 0.0, NAN, 5.0, 5.0]
    write_png(tmp_path / "a.png", {"loss": values}, title="A run")
    pixels = read_png(tmp_path / "a.png")[:, :, :3] * 255
    assert pixels.shape[1] == 1200
    blue = (np.abs(pixels - (31, 119, 180)).sum(axis=2)) < 30  # matplotlib's first colour
    columns = np.flatnonzero(blue.any(axis=0))
    left, right = columns[0], columns[-1]
    height = lambda x: np.flatnonzero(blue[:, x]).mean()  # noqa: E731  # from the top
    across = lambda i: round(left + (right - left) * i / (len(values) - 1))  # noqa: E731
    low, high = height(left + 2), height(across(1))
    assert high < low - 150
    assert height(across(4.5)) == pytest.approx((low + high) / 2, abs=8)
    assert not blue[:, across(2) + 8 : across(4) - 8].any()  # the gap


@pytest.mark.slow
@pytest.mark.parametrize(
    "series", [{}, {"loss": []}, {"loss": [1.0]}, {"loss": [math.inf, 1.0], "rate": [NAN]}]
)
def test_a_png_of_odd_series_is_written(tmp_path: Path, series: dict[str, list[float]]) -> None:
    write_png(tmp_path / "a.png", series, x=[5.0, 6.0])
    assert read_png(tmp_path / "a.png").shape[1] == 1200


def test_without_matplotlib_a_png_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(TinkerError, match=r"pip install 'tinkex\[plot\]'"):
        write_png(tmp_path / "a.png", {"loss": [1.0]})
    assert not (tmp_path / "a.png").exists()


@pytest.mark.slow
def test_a_page_is_well_formed_whatever_is_in_it() -> None:
    nasty = '<script>alert("&$x$")</script>'
    page = html_page(nasty, {nasty: nasty}, svg_chart({nasty: [1.0, NAN, 2.0, 2.0]}))
    assert "<script" not in page
    svg = xml.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
    assert nasty in [element.text for element in svg.iter()]


@pytest.mark.slow
def test_a_history_is_a_list_a_line_and_a_chart(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [{"step": n, "time": 1.0 * n, "loss": 4.0 - n, "extra": 1.0} for n in range(1, 4)]
    history = StepMetrics(steps)
    assert history == steps
    assert json.loads(json.dumps(history)) == steps
    assert repr(history) == "StepMetrics(3 steps, loss 3 █▅▁ 1)"
    assert history.metrics() == ["loss", "extra"]
    page = history._repr_html_()
    assert page is not None
    svg = xml.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
    names = [element.text for element in svg.iter()]
    assert "loss" in names
    assert "extra" not in names  # only what it was asked for, or what every run has
    assert "extra" in svg_chart(history.curves(["extra"]))
    monkeypatch.setattr("tinkex.client.rest_results.find_spec", lambda name: None)
    assert history._repr_html_() is None  # a notebook shows __repr__ where matplotlib is not installed


def test_a_history_of_two_thousand_steps_is_still_a_line() -> None:
    assert len(repr(StepMetrics({"step": n, "loss": 1.0 * n} for n in range(2000)))) < 80
    assert repr(StepMetrics()) == "StepMetrics(0 steps)"
    assert StepMetrics()._repr_html_() is None
