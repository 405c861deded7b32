"""Live pages in a real browser: what stays while they change, and how they come back after a cut."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.server.browser import Tab, until
from tests.server.conftest import MODEL, Running
from tests.server.prefix_proxy import prefix_proxy
from tests.server.served import Serve
from tinkex import AdamParams, Datum, ModelInput, SamplingParams, ServiceClient, TrainingClient
from tinkex.server.api_keys import hash_key
from tinkex.service.ledger import Ledger

pytestmark = [pytest.mark.slow, pytest.mark.browser]

KEY = "tml-alice"
DATA = [Datum(ModelInput.from_ints([5, 6, 7]), {"target_tokens": [6, 7, 8]})]
ROOT = Path(__file__).parents[2]
CUT = ("Failed to load resource", "ERR_")  # what a browser says of a server that is away or refuses


@pytest.fixture
def training() -> Iterator[Callable[[str, str], TrainingClient]]:
    """Makes a run of this name on the server at this address."""
    services: list[ServiceClient] = []

    def make(url: str, name: str) -> TrainingClient:
        services.append(ServiceClient(base_url=url, api_key=KEY))
        return services[-1].create_lora_training_client(MODEL, rank=4, name=name, timeout=60)

    yield make
    for service in services:
        service.close().result(20)


def step(run: TrainingClient) -> None:
    run.forward_backward(DATA, "cross_entropy")
    run.optim_step(AdamParams(learning_rate=0.1)).result(60)


def watch(browser: Any, url: str, run: TrainingClient) -> Tab:
    tab = Tab(browser, url)
    tab.log_in(KEY)
    tab.go(f"/console/runs/{run.model_id}")
    expect(tab.page.locator("#live")).to_have_text("live")
    return tab


def steps(tab: Tab) -> int:
    return int(tab.page.locator("#state dd").first.inner_text())


def test_a_part_goes_on_changing_while_something_in_it_has_the_focus(
    browser: Any, server: Running, training: Callable[[str, str], TrainingClient]
) -> None:
    run = training(server.url, "focused")
    step(run)
    tab = watch(browser, server.url, run)
    timeline = tab.page.locator("#state details").first
    timeline.locator("summary").click()  # closes it, and has the focus from now on
    for count in (2, 3):
        step(run)
        until(lambda: steps(tab) == count)  # noqa: B023
        expect(timeline.locator("summary")).to_be_focused()
        assert timeline.get_attribute("open") is None
    tab.page.keyboard.press("Enter")
    expect(timeline).to_have_attribute("open", "")
    engine: Any = server.server.service.models.find(MODEL).engine
    held, other = threading.Event(), training(server.url, "the other")
    engine.trainer._thread.submit(held.wait)  # as a long pass would
    try:
        passes = [run.forward_backward(DATA, "cross_entropy")]
        page = tab.go("/console/now")
        link = page.locator("#now").get_by_role("link", name="focused")
        link.focus()
        passes.append(other.forward_backward(DATA, "cross_entropy"))
        expect(page.locator("tr", has_text="In the queue")).to_contain_text("the other")
        expect(link).to_be_focused()
        tab.check()
    finally:
        held.set()
    for one in passes:
        one.result(20)


def test_a_stream_that_was_refused_is_opened_again(
    browser: Any, server: Running, training: Callable[[str, str], TrainingClient]
) -> None:
    run = training(server.url, "refused")
    tab = watch(browser, server.url, run)
    page, refused = tab.page, list[int]()

    def refuse(route: Any) -> None:
        refused.append(503 if len(refused) < 3 else 429)
        route.fulfill(status=refused[-1], body="not now")

    page.route("**/events?*", refuse)
    page.reload()
    expect(page.locator("#live")).to_have_text("not connected; trying again")
    expect(page.locator("#live")).to_have_text("too many pages are open; trying again")
    page.unroute("**/events?*")
    expect(page.locator("#live")).to_have_text("live")
    step(run)
    until(lambda: steps(tab) == 1)
    tab.forgive(*CUT)
    tab.check()
    service = ServiceClient(base_url=server.url, api_key=KEY)
    service.create_rest_client().delete_training_run(run.model_id).result(20)
    expect(page.locator("#live")).to_have_text("deleted")


def test_open_pages_come_back_with_a_server_that_was_killed(browser: Any, tmp_path: Path) -> None:
    server = Serve(tmp_path)
    try:
        service = ServiceClient(base_url=server.url, api_key=KEY)
        run = service.create_lora_training_client(MODEL, rank=4, name="survivor", timeout=60)
        step(run)
        tabs = [watch(browser, server.url, run) for _ in range(2)]
        server.kill()
        for tab in tabs:
            expect(tab.page.locator("#live")).to_have_text("not connected; trying again")
        tabs[1].page.context.clear_cookies()
        server.start()
        expect(tabs[0].page.locator("#live")).to_have_text("live", timeout=40_000)
        step(run)
        until(lambda: steps(tabs[0]) == 2)
        tabs[1].page.wait_for_url("**/console/login?next=**", timeout=40_000)
        tabs[1].page.fill("#key", KEY)
        tabs[1].page.click("main button")
        expect(tabs[1].page.locator("h1")).to_have_text("survivor")
        for tab in tabs:
            tab.forgive(*CUT)
            tab.check()
        service.close().result(20)
    finally:
        server.terminate(30)


def test_the_list_of_runs_is_live_and_keeps_what_is_checked(
    browser: Any, server: Running, training: Callable[[str, str], TrainingClient]
) -> None:
    training(server.url, "listed first")
    tab = Tab(browser, server.url)
    tab.log_in(KEY)
    page = tab.go("/console/runs?q=listed")
    rows, compare = page.locator("table.runs tbody tr"), page.get_by_role("button", name="Compare")
    expect(rows).to_have_count(1)
    expect(compare).to_be_disabled()
    rows.locator("input").check()
    expect(compare).to_be_enabled()
    training(server.url, "listed second")
    expect(rows).to_have_count(2)
    mine = page.get_by_label("Select listed first")
    expect(mine).to_be_checked()
    expect(mine).to_be_focused()
    expect(compare).to_be_enabled()
    tab.check()


def test_back_after_a_search_shows_what_was_there_before(
    browser: Any, server: Running, training: Callable[[str, str], TrainingClient]
) -> None:
    training(server.url, "hay")
    training(server.url, "needle")
    tab = Tab(browser, server.url)
    tab.log_in(KEY)
    page, rows = tab.page, tab.page.locator("table.runs tbody tr")
    expect(page.locator("#runs")).to_contain_text("hay")
    page.fill("#q", "needle")
    expect(rows).to_have_count(1)
    assert "q=needle" in page.url
    page.go_back()
    expect(page.locator("#runs")).to_contain_text("hay")
    expect(page.locator("#q")).to_have_value("")
    page.go_forward()
    expect(rows).to_have_count(1)
    expect(page.locator("#q")).to_have_value("needle")
    rows.locator("input").check()
    expect(page.get_by_role("button", name="Compare")).to_be_enabled()
    tab.check()


def test_all_of_it_works_below_a_path_of_a_proxy(
    browser: Any,
    start: Callable[..., Running],
    training: Callable[[str, str], TrainingClient],
    tmp_path: Path,
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    with closing(Ledger(home / "ledger.sqlite")) as ledger:
        ledger.add_key(
            name="a", note="", hash=hash_key(KEY), owner="ann", project_id=None, created_at=time.time()
        )
    address: list[tuple[str, int]] = []
    with prefix_proxy("/lab/tinkex", address) as port:
        url = f"http://127.0.0.1:{port}/lab/tinkex"
        server = start(home=home, public_url=url)
        address.append(server.server.address)
        run = training("http://{}:{}".format(*server.server.address), "proxied")
        run.save_state("saved").result(20)
        tab = watch(browser, url, run)
        page = tab.page
        step(run)
        until(lambda: steps(tab) == 1)
        page.wait_for_selector("figure canvas")
        page.click("nav >> text=Runs")
        page.wait_for_url("**/console/runs")
        page.fill("#q", "proxied")
        expect(page).to_have_url(re.compile("q=proxied"))
        page.locator("table.runs tbody input").check()
        page.click("text=Compare the selected")
        page.wait_for_selector("figure canvas")
        page.click("nav >> text=Checkpoints")
        page.get_by_role("link", name="Playground", exact=True).last.click()
        page.select_option("[name=mode]", "text")
        page.fill("[name=prompt]", "hello")
        page.fill("[name=max_tokens]", "4")
        page.click("text=Sample")
        expect(page.locator("#answers")).to_contain_text("ended by")
        page.click("nav >> text=Now")
        expect(page.locator("#live")).to_have_text("live")
        page.click("text=Log out")
        page.wait_for_url("**/lab/tinkex/console/login")
        tab.check()


@contextmanager
def home_console(home: Path) -> Iterator[str]:
    """`tinkex console` for a home, and the link that it prints."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TINK")}
    command = [sys.executable, "-m", "tinkex.cli", "console", "--home", str(home), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait(20)


@pytest.mark.parametrize("size", ["wide", "narrow"])
def test_the_pages_of_a_home_are_as_good_as_a_servers(
    browser: Any, start: Callable[..., Running], training: Callable[[str, str], TrainingClient],
    tmp_path: Path, size: str,
) -> None:  # fmt: skip
    server = start(home=tmp_path / "home", keep_rollouts=1.0)
    run = training(server.url, "at home")
    sampler = run.save_weights_and_get_sampling_client(timeout=20)
    sampler.sample(ModelInput.from_ints([5, 6]), 2, SamplingParams(max_tokens=4)).result(20)
    step(run)
    run.save_state("kept").result(20)
    server.server.service.rollouts.flush()
    server.server.service.flush()
    with home_console(tmp_path / "home") as link:
        tab = Tab(browser, link.partition("/console/")[0], size)
        page = tab.page
        page.goto(link)
        page.wait_for_url("**/console/runs")
        tab.check()
        one = f"/console/runs/{run.model_id}"
        for path in (
            f"/console/compare?run={run.model_id}",
            "/console/checkpoints",
            "/console/admin",
            "/console/admin/disk",
        ):
            tab.go(path)
            tab.check()
        tab.go(f"{one}/rollouts")
        tab.check()
        page.click("table.runs tbody th a >> nth=0")
        expect(page.locator(".sample .tokens span").first).to_be_visible()
        tab.check()
        tab.go(one)
        page.wait_for_selector("figure canvas")
        step(run)  # in another process, as a script would
        until(lambda: steps(tab) == 2)
        expect(page.locator("header nav")).not_to_contain_text(re.compile("Playground|Now"))
        tab.check()
