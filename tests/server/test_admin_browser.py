"""The administrator's pages in a real browser, while a tenant trains on a real server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.server.browser import Tab, until
from tests.server.served import MODEL, Serve
from tinkex import AdamParams, Datum, ModelInput, ServiceClient, TrainingClient

pytestmark = [pytest.mark.slow, pytest.mark.browser]

SHOTS = os.environ.get("TINKEX_SCREENSHOTS")  # where pictures for the documentation go, if anywhere
DATA = [Datum(ModelInput.from_ints([5, 6, 7]), {"target_tokens": [6, 7, 8]})]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    served = Serve(tmp_path_factory.mktemp("admin"))
    yield served
    served.terminate(30)


def new_key(server: Serve, *options: str) -> str:
    command = [sys.executable, "-m", "tinkex.cli", "server", "keys", "add", *options]
    environment = os.environ | {"COLUMNS": "300"}
    said = subprocess.run(
        [*command, "--home", str(server.home)], capture_output=True, text=True, check=True, env=environment
    )
    found = re.search(r"tml-\S+", said.stdout + said.stderr)
    assert found, said
    return found.group()


@pytest.fixture(scope="module")
def admin(server: Serve) -> str:
    return new_key(server, "ops", "--admin")


@pytest.fixture(scope="module")
def tenant(server: Serve, admin: str) -> str:
    return new_key(server, "alice", "--project", "math")


@pytest.fixture(scope="module")
def runs(server: Serve, tenant: str) -> Iterator[list[TrainingClient]]:
    """Seven runs; the first trains until the end."""
    service = ServiceClient(base_url=server.url, api_key=tenant)
    made = [service.create_lora_training_client(MODEL, rank=4, name=f"run {n}") for n in range(7)]
    made[0].save_state("kept").result(60)
    stop = threading.Event()

    def train() -> None:
        while not stop.wait(0.1):
            made[0].forward_backward(DATA, "cross_entropy")
            made[0].optim_step(AdamParams()).result(60)

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    yield made
    stop.set()
    thread.join(60)
    service.close().result(20)


@pytest.fixture(params=["wide", "narrow", "dark"])
def tab(request: pytest.FixtureRequest, browser: Any, server: Serve, admin: str) -> Iterator[Tab]:
    size, scheme = ("narrow", "light") if request.param == "narrow" else ("wide", request.param)
    opened = Tab(browser, server.url, size, "dark" if scheme == "dark" else "light")
    opened.log_in(admin)
    yield opened
    opened.page.context.close()


def finish(tab: Tab, name: str) -> None:
    tab.check()
    if SHOTS:
        tab.page.screenshot(path=Path(SHOTS) / f"{name}-{tab.look}.png", full_page=True)


def test_a_key_is_made_and_revoked_and_usage_is_told(tab: Tab, runs: list[TrainingClient]) -> None:
    page, name = tab.go("/console/admin"), f"bob {tab.look}"
    used = page.locator("[aria-label=Usage] tr", has_text="alice").locator("td").nth(1)
    until(lambda: tab.go("/console/admin") and used.count() and used.inner_text() not in ("", "0"))
    curve = page.locator("[aria-label^='Trained tokens of each']")
    points = [point.split(",") for point in (curve.locator("polyline").get_attribute("points") or "").split()]
    assert len(points) == 30
    assert float(points[-1][1]) < float(points[0][1]), "today is higher than a month ago"
    expect(page.locator("[aria-label=Storage]")).to_contain_text("math")
    page.click("text=Create a key")
    page.fill("#name", name)
    page.click("text=Create key")
    expect(page.locator("main")).to_contain_text("tml-")
    tab.check()
    tab.go("/console/admin")
    assert "tml-" not in page.content()  # it is shown once
    expect(page.locator("[aria-label='Audit log']")).to_contain_text("keys.add")
    finish(tab, "admin")
    row = page.locator("[aria-label=Keys] tr", has_text=name)
    page.once("dialog", lambda dialog: dialog.accept())
    row.locator("button").click()
    expect(row).to_contain_text("revoked")


def test_a_project_is_created_and_keys_are_assigned_to_it(
    tab: Tab, server: Serve, admin: str, runs: list[TrainingClient]
) -> None:
    """Two users, each with a run made in the project, see each other's; a third does not."""
    name, evil = f"poems {tab.look}", "<img src=x onerror=alert(1)>"
    keys = {who: new_key(server, f"{who} {tab.look}") for who in ("carol", "dave", "erin")}
    page = tab.go("/console/admin")
    page.click("text=Create a project")
    for who in ("carol", "dave"):
        page.get_by_label(f"{who} {tab.look}", exact=True).check()
    page.fill("#assigned", name)
    page.click("button:text-is('Assign')")
    row = page.locator("[aria-label=Projects] tr", has_text=name)
    both = f"carol {tab.look}, dave {tab.look}"
    expect(row).to_contain_text(both)
    expect(page.locator("[aria-label='Audit log']")).to_contain_text(f"{both}: {name}")
    finish(tab, "admin")
    service = ServiceClient(base_url=server.url, api_key=keys["carol"])
    made = service.create_lora_training_client(MODEL, rank=4, name="carol's poems")
    for who, status in (("dave", 200), ("erin", 404)):
        other = Tab(tab.page.context.browser, server.url)
        other.log_in(keys[who])
        answer = other.page.context.request.get(f"{server.url}/console/runs/{made.model_id}")
        assert answer.status == status, who
        other.page.context.close()
    tab.go("/console/admin")
    page.click("text=Create a project")
    page.get_by_label(re.compile(f"erin {tab.look}")).check()
    page.fill("#assigned", evil)
    page.click("button:text-is('Assign')")
    expect(page.locator("[aria-label=Projects]")).to_contain_text(evil)
    page.click("text=Create a project")
    page.get_by_label(re.compile(f"erin {tab.look}")).check()
    page.click("button:text-is('Assign')")
    expect(page.locator("[aria-label=Projects]")).not_to_contain_text(evil)
    tab.check()
    service.close().result(20)


def test_runs_are_cleaned_up_by_their_size_after_one_question(tab: Tab, runs: list[TrainingClient]) -> None:
    first = {"wide": 1, "narrow": 3, "dark": 5}[tab.look]
    victims = [run.model_id for run in runs[first : first + 2]]
    page = tab.go("/console/admin/disk")
    for run_id in victims:
        page.check(f"input[value='{run_id}']")
    finish(tab, "disk")
    page.click("text=Delete the selected")
    expect(page.locator("h1")).to_have_text("Delete 2 runs?")
    expect(page.locator("tbody tr")).to_have_count(2)
    finish(tab, "clean-up")
    page.click("text=Keep them")
    for run_id in victims:
        page.check(f"input[value='{run_id}']")
    page.click("text=Delete the selected")
    page.click("text=Delete 2 runs >> nth=-1")
    expect(page.locator("h1")).to_have_text("Disk by run")
    for run_id in victims:
        expect(page.locator(f"input[value='{run_id}']")).to_have_count(0)
    expect(page.locator(f"tbody input[value='{runs[0].model_id}']")).to_have_count(1)
    tab.check()
    tab.go("/console/admin")
    audit = page.locator("[aria-label='Audit log'] tr", has_text="runs.clean-up")
    assert audit.count() >= 2


def test_a_tenant_is_told_that_these_pages_are_not_theirs(browser: Any, server: Serve, tenant: str) -> None:
    tab = Tab(browser, server.url)
    tab.log_in(tenant)
    expect(tab.page.locator("header")).not_to_contain_text("Admin")
    for path in ("", "/disk", "/disk/clean-up", "/usage.csv"):
        answer = tab.page.context.request.get(f"{server.url}/console/admin{path}")
        assert answer.status == 403, path
