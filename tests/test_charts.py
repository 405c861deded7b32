"""Curves: read back from what was drawn."""

from __future__ import annotations

import json
import math
import re
import struct
import xml.etree.ElementTree as xml
import zlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.charts import number, sparkline, svg_chart, terminal_chart, ticks, write_html, write_png
from tinkex.client.history import History
from tinkex.drawing import Canvas

NAN = math.nan
numbers = st.floats(allow_nan=True, allow_infinity=True, width=32)


def read_png(path: Path) -> np.ndarray:
    """The pixels of an unfiltered RGB PNG, by the format's own rules."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(data):
        length, name = struct.unpack(">I4s", data[at : at + 8])
        body = data[at + 8 : at + 8 + length]
        assert struct.unpack(">I", data[at + 8 + length : at + 12 + length])[0] == zlib.crc32(name + body)
        chunks[name] = body
        at += 12 + length
    width, height = struct.unpack(">II", chunks[b"IHDR"][:8])
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + 3 * width)
    return rows[:, 1:].reshape(height, width, 3)


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


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3.7, 12.2), (1e-5, 9e-5), (-1e9, 1e9), (0.999, 1.001)])
def test_ticks_are_few_round_and_within(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 2 <= len(found) <= 7
    assert all(low <= tick <= high for tick in found)
    step = found[1] - found[0]
    assert round(step / 10 ** math.floor(math.log10(step) + 1e-9), 6) in (1, 2, 5)


def test_numbers_are_short() -> None:
    assert [number(v) for v in (0, 1e-5, 0.123456, 99.99999, 1234567)] == [
        "0", "1e-05", "0.1235", "100", "1.235e+06"
    ]  # fmt: skip


def test_the_line_of_a_picture_goes_where_its_values_are(tmp_path: Path) -> None:
    values = [0.0, 10.0, 0.0, NAN, 5.0, 5.0]
    write_png(tmp_path / "a.png", {"loss": values}, title="A run")
    pixels = read_png(tmp_path / "a.png")
    assert pixels.shape[1] == 1200
    blue = (np.abs(pixels.astype(int) - (37, 99, 185)).sum(axis=2)) < 30
    columns = np.flatnonzero(blue.any(axis=0))
    left, right = columns[0], columns[-1]
    height = lambda x: np.flatnonzero(blue[:, x]).mean()  # noqa: E731  # from the top
    across = lambda i: round(left + (right - left) * i / (len(values) - 1))  # noqa: E731
    low, high = height(left + 2), height(across(1))
    assert high < low - 200
    assert height(across(4.5)) == pytest.approx((low + high) / 2, abs=8)
    assert not blue[:, across(2) + 8 : across(4) - 8].any()  # the gap


def test_the_same_numbers_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_png(tmp_path / name, {"loss": [3.0, 1.0], "rate": []}, y_label="ignored with two")
        write_html(tmp_path / f"{name}.html", {"loss": [3.0, 1.0]}, y_label="nats")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()
    assert ">nats<" in (tmp_path / "a.html").read_text()


def test_a_report_is_well_formed_whatever_is_in_it(tmp_path: Path) -> None:
    nasty = '<script>alert("&")</script>'
    write_html(tmp_path / "r.html", {nasty: [1.0, 2.0]}, title=nasty, facts={nasty: nasty})
    page = (tmp_path / "r.html").read_text()
    assert "<script" not in page
    svg = xml.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
    assert nasty in [element.text for element in svg.iter()]


def test_every_colour_of_a_chart_has_one_for_the_night(tmp_path: Path) -> None:
    series = {name: [1.0, 2.0] for name in "abcdef"}
    write_html(tmp_path / "r.html", series)
    page = (tmp_path / "r.html").read_text()
    night = set(re.findall(r"--([\w-]+):", page[page.index("prefers-color-scheme: dark") :]))
    used = set(re.findall(r"var\(--([\w-]+),", page))
    assert len(used) >= 8
    assert used <= night


def test_a_history_is_a_list_a_line_and_a_chart() -> None:
    steps = [{"step": n, "time": 1.0 * n, "loss": 4.0 - n, "extra": 1.0} for n in range(1, 4)]
    history = History(steps)
    assert history == steps
    assert json.loads(json.dumps(history)) == steps
    assert repr(history) == "History(3 steps, loss 3 █▅▁ 1)"
    assert history.metrics() == ["loss", "extra"]
    page = history._repr_html_()
    assert page is not None
    svg = xml.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
    names = [element.text for element in svg.iter()]
    assert "loss" in names
    assert "extra" not in names  # only what it was asked for, or what every run has
    assert "var(--line-0, rgb(37, 99, 185))" in svg_chart(history.curves(["extra"]))


def test_a_history_of_two_thousand_steps_is_still_a_line() -> None:
    assert len(repr(History({"step": n, "loss": 1.0 * n} for n in range(2000)))) < 80
    assert repr(History()) == "History(0 steps)"
    assert History()._repr_html_() is None


def test_letters_are_drawn_and_told_apart() -> None:
    drawn = {}
    for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789.,:-+/()%_=#é":
        canvas = Canvas(40, 40)
        canvas.text((8, 28), letter, (0, 0, 0), 18)
        assert canvas._pixels.min() < 100, letter
        drawn[canvas._pixels.tobytes()] = letter
    assert len(drawn) == 75
    assert Canvas(1, 1).text_width("wide", 18) > Canvas(1, 1).text_width("ill", 18)


def test_drawing_outside_of_the_canvas_is_nothing(tmp_path: Path) -> None:
    canvas = Canvas(10, 10)
    canvas.line([(-50, -50), (-20, -30)], (0, 0, 0), 3)
    canvas.line([], (0, 0, 0))
    canvas.write_png(tmp_path / "blank.png")
    assert (read_png(tmp_path / "blank.png") == 255).all()
