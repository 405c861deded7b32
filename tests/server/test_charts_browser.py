"""Charts in a real browser: what smoothing, logarithmic axes and zoom do to curves that are known."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import orjson
import pytest
from playwright.sync_api import expect

from tests.server.browser import Tab
from tests.server.conftest import MODEL, Running
from tinkex import ServiceClient, TrainingClient
from tinkex.service import run_series

pytestmark = [pytest.mark.slow, pytest.mark.browser]

KEY = "tml-alice"
SHOTS = os.environ.get("TINKEX_SCREENSHOTS")  # where pictures for the documentation go, if anywhere
STEPS = range(101)
CURVE = [10 ** (step / 25) for step in STEPS]  # 1 to 10,000; 100 in the middle


@pytest.fixture(scope="module")
def runs(server: Running) -> Iterator[list[TrainingClient]]:
    """Ten runs; the first has a curve over a hundred steps, and a point at step 0."""
    service = ServiceClient(base_url=server.url, api_key=KEY)
    made = [
        service.create_lora_training_client(MODEL, rank=4, name=f"run {n} with a long name", timeout=60)
        for n in range(10)
    ]
    for step in STEPS:
        made[0].log({"curve": CURVE[step]}, step=step).result(20)
    for number, run in enumerate(made):
        run.log({"reward": float(number), "apples": 1.0}, step=0).result(20)
        run.log({"reward": float(number), "apples": 1.0}, step=100).result(20)
    made[1].log({"once": 3.0, "sunk": -1.0}, step=0).result(20)
    yield made
    service.close().result(20)


@pytest.fixture(params=["wide"])
def tab(request: pytest.FixtureRequest, browser: Any, server: Running) -> Iterator[Tab]:
    opened = Tab(browser, server.url, request.param)
    opened.log_in(KEY)
    yield opened
    opened.page.context.close()


def figure(page: Any, title: str) -> Any:
    return page.locator("figure", has=page.locator("figcaption", has_text=re.compile(rf"^\s*{title}")))


def point(page: Any, chart: Any, share: float) -> tuple[float, float]:
    """Point at a place of a chart: the x that it tells, and how high its curve is there, from 0 to 1."""
    chart.scroll_into_view_if_needed()
    box = chart.locator(".u-over").bounding_box()
    page.mouse.move(box["x"] + 1, box["y"] + 5)
    page.mouse.move(box["x"] + share * (box["width"] - 1), box["y"] + 20, steps=3)
    told = re.search(r" at ([\d.]+)", chart.locator("figcaption").inner_text())
    dot = chart.locator(".u-cursor-pt").last.bounding_box()
    assert told
    return float(told[1]), 1 - (dot["y"] + dot["height"] / 2 - box["y"]) / box["height"]


def edges(page: Any, chart: Any) -> tuple[float, float]:
    return point(page, chart, 0.0)[0], point(page, chart, 1.0)[0]


def opened(tab: Tab, run: TrainingClient, options: str = "") -> Any:
    page = tab.go(f"/console/runs/{run.model_id}{options}")
    page.wait_for_selector("figure canvas")
    return figure(page, "curve")


def test_a_logarithmic_axis_gives_every_tenfold_the_same_room(tab: Tab, runs: list[TrainingClient]) -> None:
    chart, page = opened(tab, runs[0]), tab.page
    at, height = point(page, chart, 0.5)
    assert (at, height < 0.15) == (50, True), "100 of 10,000, and a tenth of room below"
    page.check("#log-y")
    at, height = point(page, chart, 0.5)
    assert (at, 0.4 < height < 0.6) == (50, True)
    page.uncheck("#log-y")
    page.check("#log-x")  # a point at step 0 has no place there
    low, high = edges(page, chart)
    assert (low, high > 95) == (1, True)
    assert 9 <= point(page, chart, 0.5)[0] <= 11
    page.goto(page.url.replace(runs[0].model_id, runs[1].model_id))
    expect(figure(page, "reward")).to_be_visible()
    expect(figure(page, "once")).to_have_count(0)  # all it has is at step 0
    page.uncheck("#log-x")
    expect(figure(page, "once")).to_be_visible()
    page.check("#log-y")  # what is below 0 has no place there
    expect(figure(page, "sunk").locator("figcaption")).to_contain_text("-1")
    expect(figure(page, "once").locator("canvas")).to_be_visible()
    tab.check()


def test_smoothing_shows_a_moving_mean_beside_the_values(tab: Tab, runs: list[TrainingClient]) -> None:
    chart, page = opened(tab, runs[0]), tab.page
    expect(chart.locator("figcaption")).to_contain_text(re.compile(r"1\.00e\+4|10000"))
    drawn = chart.locator("canvas").evaluate("one => one.toDataURL()")
    page.locator("#smoothing").fill("0.8")
    mean = norm = 0.0
    for value in CURVE:
        mean, norm = 0.8 * mean + 0.2 * value, 0.8 * norm + 0.2
    expect(chart.locator("figcaption")).to_contain_text(f"smoothed {mean / norm:.4g}")
    assert chart.locator("canvas").evaluate("one => one.toDataURL()") != drawn
    tab.check()


def test_a_part_is_shown_by_dragging_and_by_buttons(tab: Tab, runs: list[TrainingClient]) -> None:
    chart, page = opened(tab, runs[0]), tab.page
    assert edges(page, chart) == (0, 100)
    box = chart.locator(".u-over").bounding_box()
    with page.expect_response(lambda r: "low=" in r.url and r.status == 200):
        page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 50)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 60, steps=5)
        page.mouse.up()
    low, high = edges(page, chart)
    assert (29 <= low <= 31, 69 <= high <= 71) == (True, True)
    with page.expect_response(lambda r: "/curves" in r.url and "low=" not in r.url):
        page.click("#reset-zoom")
    assert edges(page, chart) == (0, 100)
    for name, shown in (
        ("Zoom in", (25, 75)),
        ("Later", (50, 100)),
        ("Earlier", (25, 75)),
        ("Zoom out", (0, 100)),
    ):
        button = page.get_by_role("button", name=name)
        button.focus()
        with page.expect_response(lambda r: "/curves" in r.url):
            page.keyboard.press("Enter")
        assert edges(page, chart) == shown, name
    tab.check()


def test_a_link_to_charts_shows_them_in_the_same_way(tab: Tab, runs: list[TrainingClient]) -> None:
    chart, page = opened(tab, runs[0]), tab.page
    page.locator("#smoothing").fill("0.5")
    page.check("#log-y")
    with page.expect_response(lambda r: "low=" in r.url):
        page.get_by_role("button", name="Zoom in").click()
    asked = parse_qs(urlsplit(page.url).query)
    assert asked == {"smoothing": ["0.5"], "log-y": ["true"], "low": ["25"], "high": ["75"]}
    link = page.url
    page.goto("about:blank")
    page.goto(link)
    page.wait_for_selector("figure canvas")
    assert edges(page, chart) == (25, 75)
    assert page.is_checked("#log-y")
    assert page.input_value("#smoothing") == "0.5"
    with page.expect_response(lambda r: "x=time" in r.url and "/curves" in r.url):
        page.select_option("#x-axis", "time")
    assert parse_qs(urlsplit(page.url).query) == {"smoothing": ["0.5"], "log-y": ["true"], "x": ["time"]}
    page.reload()
    expect(page.locator("#x-axis")).to_have_value("time")
    page.wait_for_selector("figure canvas")
    chart.locator(".u-over").hover()
    expect(chart.locator("figcaption")).to_contain_text(re.compile(r" at \d+:\d\d:\d\d"))
    tab.check()


@pytest.mark.parametrize("tab", ["wide", "narrow"], indirect=True)
def test_ten_runs_are_told_apart_and_each_has_its_value(tab: Tab, runs: list[TrainingClient]) -> None:
    page = tab.go(f"/console/compare?{urlencode([('run', run.model_id) for run in runs])}")
    chart = figure(page, "reward")
    values = chart.locator(".legend > span")
    expect(values).to_have_count(10)
    assert values.locator("b").all_inner_texts() == [str(n) for n in range(10)]
    looks = values.evaluate_all("all => all.map((one) => one.className)")
    assert len(set(looks)) == 10, "after eight colours come dashes"
    over = page.locator(".compared > span")
    assert over.evaluate_all("all => all.map((one) => one.className)") == looks
    assert over.all_inner_texts() == [f"run {n} with a long name" for n in range(10)]
    chart.locator(".u-over").hover()
    expect(chart.locator("figcaption")).to_contain_text(" at ")
    assert values.locator("b").all_inner_texts() == [str(n) for n in range(10)]
    last = page.locator("[aria-label='Final metrics'] tbody th").all_inner_texts()
    assert last.index("reward") < last.index("apples"), "what is wanted first"
    tab.check()


@pytest.fixture(scope="module")
def many(server: Running) -> Iterator[list[str]]:
    """Two hundred runs of a sweep, of different lengths; the loss of each falls to its number."""
    service = ServiceClient(base_url=server.url, api_key=KEY)
    first = service.create_lora_training_client(MODEL, rank=4, name="sweep 0", tags=["sweep"], timeout=60)
    ledger, home = server.server.service.ledger, server.server.service.home
    row = ledger.run(first.model_id)
    assert row is not None
    ids = [first.model_id] + [f"{row.session_id}:train:{n}" for n in range(1, 200)]
    with ledger.transaction():
        for n, run_id in enumerate(ids[1:], 1):
            metadata = {"seed": n, "kind": "even" if n % 2 == 0 else "odd"}
            named = replace(row, run_id=run_id, model_seq_id=n, name=f"sweep {n}", user_metadata=metadata)
            ledger.add_run(replace(named, created_at=row.created_at + n))
    for n, run_id in enumerate(ids):
        home.run_dir(run_id).mkdir(parents=True, exist_ok=True)
        lines = [
            {"step": step, "time": row.created_at + n + 3.7 * step, "loss": n + 100 / step, "grad_norm": 1.0}
            for step in range(1, 300 + 5 * n)
        ]
        written = b"".join(orjson.dumps(line) + b"\n" for line in lines)
        (home.run_dir(run_id) / run_series.STEPS).write_bytes(written)
    yield ids
    service.close().result(20)


def test_two_hundred_runs_are_overlaid_and_told_apart_by_the_pointer(
    browser: Any, server: Running, many: list[str]
) -> None:
    tab = Tab(browser, server.url)
    tab.log_in(KEY)
    page = tab.go("/console/runs?tag=sweep&order=name&way=up")
    asked = list[str]()
    page.on("request", lambda request: asked.append(request.url))
    page.click("text=Compare all")
    chart = figure(page, "Loss")
    expect(chart.locator("figcaption")).to_contain_text("200 runs")
    expect(page.locator("#live")).to_have_text("")
    expect(page.locator(".compared > span")).to_have_count(200)
    curves = [parse_qs(urlsplit(url).query) for url in asked if "/compare/curves" in url]
    assert sorted(run for one in curves for run in one["run"]) == sorted(many)
    assert max(len(one["run"]) for one in curves) == 24
    chart.scroll_into_view_if_needed()
    told = set[str]()
    for height in (0.5, 0.7, 0.9):
        box = chart.locator(".u-over").bounding_box()
        page.mouse.move(box["x"] + 0.2 * box["width"], box["y"] + height * box["height"], steps=4)
        said = re.search(r"sweep (\d+): ([\d.]+) at", chart.locator("figcaption").inner_text())
        assert said
        assert float(said[2]) == pytest.approx(int(said[1]), abs=2), "its loss has fallen to its number"
        told.add(said[1])
    assert len(told) == 3
    if SHOTS:
        page.screenshot(path=Path(SHOTS) / "compare-many-wide.png")
    with page.expect_response(lambda r: "low=" in r.url and "first=192" in r.url):
        page.get_by_role("button", name="Zoom in").click()
    assert "low=" in page.url
    link = page.url
    page.goto("about:blank")
    page.goto(link)
    expect(chart.locator("figcaption")).to_contain_text(re.compile(r"1[5-9]\d runs"))  # others ended before
    page.select_option("#x-axis", "time")
    expect(page.locator("#live")).to_have_text("")
    expect(chart.locator("figcaption")).to_contain_text("200 runs")
    tab.check()


def test_the_tables_of_two_hundred_runs_have_pages_and_say_so(
    browser: Any, server: Running, many: list[str]
) -> None:
    tab = Tab(browser, server.url, "narrow")
    tab.log_in(KEY)
    page = tab.go("/console/compare?match=1&tag=sweep&order=created_at&way=up")
    heads = page.locator("[aria-label='Final metrics'] thead th a")
    expect(heads).to_have_count(24)
    said = "The tables show runs 1 to 24. What differs was looked for in all 200."
    expect(page.locator("#tables")).to_contain_text(said)
    expect(figure(page, "Loss").locator("figcaption")).to_contain_text("200 runs")
    differ = page.locator("[aria-label=Configuration] tbody th").all_inner_texts()
    assert {"metadata.seed", "metadata.kind"} <= set(differ)
    page.click("#tables >> text=Next")
    expect(heads.first).to_have_text("sweep 24")
    loss = page.locator("[aria-label='Final metrics'] tbody tr", has_text="Loss").locator("td").first
    assert float(loss.inner_text()) == pytest.approx(24 + 100 / (299 + 5 * 24), abs=0.01)
    expect(figure(page, "Loss").locator("canvas")).to_be_visible()  # the charts stay as they are
    tab.check()
