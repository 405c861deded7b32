"""What the console must not do: show others' work, act on forged requests, outlive a login, take no end."""

from __future__ import annotations

import asyncio
import csv
import gc
import io
import json
import os
import re
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import closing
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from starlette.requests import Request

from tests.server.conftest import KEY, MODEL, Running, server_config
from tests.server.console_client import Browser, Page, drawn, read_events
from tinkex import AdamParams, Datum, ModelInput, SamplingParams, ServiceClient
from tinkex.engine.gpus import GpuReading
from tinkex.engine.protocol import EngineConfig, Heartbeat
from tinkex.server.api_keys import hash_key
from tinkex.server.console import event_pages
from tinkex.server.console.admin_pages import AdminPages
from tinkex.server.console.console_routes import server_console
from tinkex.server.console.event_pages import LiveStreams, SharedParts
from tinkex.service.refusal import Refusal
from tinkex.service.rows import AuditRow, UsageRow

ALICE, BOB = KEY["x-api-key"], "tml-bob"
DATA = [Datum(ModelInput.from_ints([5, 6, 7]), {"target_tokens": [6, 7, 8]})]
EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>"
PARAMS = SamplingParams(max_tokens=4, seed=1, stop=[])


@pytest.fixture(scope="module")
def keeping(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path) -> Iterator[Running]:
    """A server that keeps rollouts."""
    home = tmp_path_factory.mktemp("keeping")
    running = Running(server_config(home, str(tokenizer_dir), keep_rollouts=1.0))
    assert running.failed is None, running.failed
    yield running
    running.stop()


class Seen:
    """A run of Alice's with a checkpoint that all users may sample from, and one rollout."""

    def __init__(self, server: Running) -> None:
        self.service = ServiceClient(base_url=server.url, api_key=ALICE)
        run = self.service.create_lora_training_client(MODEL, rank=4, name="alice's own", timeout=20)
        run.forward_backward(DATA, "cross_entropy")
        run.optim_step(AdamParams(learning_rate=0.25)).result(20)
        self.run, self.id = run, run.model_id
        self.session = run.model_id.partition(":")[0]
        sampler = run.save_weights_and_get_sampling_client()
        sampler.sample(ModelInput.from_ints([11, 12, 13]), 1, PARAMS).result(20)
        self.path = run.save_weights_for_sampler("public").result(20).path
        self.service.create_rest_client().publish_checkpoint_from_tinker_path(self.path).result(20)
        self.rollouts = f"/console/runs/{self.id}/rollouts"
        server.server.service.rollouts.flush()
        (self.group,) = self.groups(Browser(server, ALICE))

    def groups(self, browser: Browser) -> set[str]:
        return set(re.findall(rf"{self.rollouts}/(\w+)", browser.get(self.rollouts).body.decode()))


@pytest.fixture(scope="module")
def seen(keeping: Running) -> Seen:
    return Seen(keeping)


def routes(server: Running, seen: Seen, method: str) -> list[str]:
    """The addresses of the whole console, filled in with what is Alice's; the login and files left out."""
    values = {"run_id": seen.id, "group": seen.group, "verb:str": "delete"}
    paths = [
        re.sub(r"{(.*?)}", lambda found: quote(values[found[1]]), route.path)
        for route in server_console(server.server.gateway, b"s" * 32)
        if method in (route.methods or ()) and "/static/" not in route.path and "login" not in route.path
    ]
    assert len(paths) >= {"GET": 20, "POST": 9}[method]
    return paths


# -- others ------------------------------------------------------------------------------------------------


def test_another_tenant_sees_nothing_at_any_address(keeping: Running, seen: Seen) -> None:
    bob = Browser(keeping, BOB)
    query = urlencode({"run": seen.id, "path": seen.path.replace("public", "none"), "model": MODEL, "id": 1})
    for path in routes(keeping, seen, "GET"):
        if path == "/console/now/events":
            ((_, body), *_) = read_events(keeping, path, bob.cookie, 1)
            assert seen.session not in body
            continue
        for address in (path, f"{path}?{query}", f"{path}?match=1"):
            answer = bob.get(address)
            assert answer.status in (200, 303, 403, 404, 422), address
            # what was asked for may be said again: that there is no such thing
            told = answer.body.decode() if answer.status == 200 else ""
            assert (
                seen.session not in told.replace(seen.id, "") if "model=" in address else seen.id not in told
            )
            assert "alice's own" not in told.replace("&#39;", "'"), address
            if seen.id in path and "training_runs" not in path:
                assert answer.status == 404, address


def test_what_others_draw_from_a_public_checkpoint_is_not_among_its_runs_rollouts(
    keeping: Running, seen: Seen
) -> None:
    bob = Browser(keeping, BOB)
    client = ServiceClient(base_url=keeping.url, api_key=BOB).create_sampling_client(model_path=seen.path)
    client.sample(ModelInput.from_ints([21, 22, 23]), 1, PARAMS).result(20)
    ask = {"model": seen.path, "mode": "text", "prompt": "a secret of Bob's", "max_tokens": 4}
    v1 = {"model": seen.path, "prompt": "a secret of Bob's", "max_tokens": 4}
    for browser in (bob, Browser(keeping, ALICE)):  # her playground is no training either
        headers = {"cookie": browser.cookie, "x-form-token": browser.token}
        drawn = keeping.ask("POST", "/console/playground/sample", ask, headers=headers, key=None)
        assert b"event: end" in drawn.body
    completion = keeping.ask("POST", "/v1/completions", v1, key={"authorization": f"Bearer {BOB}"})
    assert completion.status == 200
    keeping.server.service.rollouts.flush()
    alice = Browser(keeping, ALICE)
    assert seen.groups(alice) == {seen.group}
    assert "secret" not in alice.get(seen.rollouts).body.decode()


# -- forged ------------------------------------------------------------------------------------------------


def test_every_address_that_changes_something_asks_for_the_token_of_its_page(
    keeping: Running, seen: Seen
) -> None:
    alice, bob = Browser(keeping, ALICE), Browser(keeping, BOB)
    before = alice.get(f"/console/runs/{seen.id}").body
    for path in routes(keeping, seen, "POST"):
        form = {"path": seen.path, "confirm": seen.id, "run": seen.id, "name": "forged", "key_id": "1"}
        for token in ("", "0" * 64, bob.token):
            assert alice.post(path, {**form, "form_token": token}).status == 403, path
            headers = {"cookie": alice.cookie, "x-form-token": token}
            answer = keeping.ask("POST", path, {"model": MODEL, "prompt": "x"}, headers=headers, key=None)
            assert answer.status == 403, path
        form["form_token"] = alice.token
        assert alice.post(path, form, sec_fetch_site="cross-site").status == 403, path
        assert bob.get(path).status in (404, 405), path
    after = alice.get(f"/console/runs/{seen.id}").body
    assert (b"forged" in after, len(after) > 0.9 * len(before)) == (False, True)


def test_errors_stay_text(keeping: Running, seen: Seen) -> None:
    work: Any = {"data": [{"model_input": {"chunks": []}, "loss_fn_inputs": {}}], "loss_fn": EVIL}
    promise = keeping.post(
        "forward_backward", forward_backward_input=work, model_id=keeping.open_run(), seq_id=1
    )
    assert "alert(1)" in keeping.result(promise).body.decode()
    alice = Browser(keeping, ALICE)
    (_, now), *_ = read_events(keeping, "/console/now/events", alice.cookie, 1)
    bodies = [alice.get("/console/now").body, json.loads(now)["html"].encode()]
    bodies += [
        alice.get(path).body
        for path in (f"/console/runs/{quote(EVIL[25:])}", f"/console/compare?run={quote(EVIL)}")
    ]
    for body in bodies:
        page = Page(body)
        assert "img" not in page.tags
        assert "alert(" in page.text
    moved = alice.get("/training_runs/a%0D%0Ax:%20y")
    assert moved.headers["location"] == "/console/runs/a%0D%0Ax:%20y"
    assert "x" not in moved.headers


def test_an_error_names_no_place_of_the_server(keeping: Running) -> None:
    server = keeping.server
    home = server.service.home.root
    user = server.gateway.authenticator.identify(ALICE).user
    server.gateway.metrics.refused(user, "x", f"no {home}/a/b")
    page = Browser(keeping, ALICE).get("/console/now").body.decode()
    assert "no a/b" in page
    assert str(home) not in page


# -- logins ------------------------------------------------------------------------------------------------


def follow(server: Running, path: str, cookie: str) -> tuple[threading.Thread, list[bytes]]:
    """Read a stream until it ends."""
    lines = list[bytes]()

    def read() -> None:
        with closing(server.connect(timeout=30)) as connection:
            connection.request("GET", path, headers={"accept": "text/event-stream", "cookie": cookie})
            response = connection.getresponse()
            while line := response.readline():
                lines.append(line)

    reading = threading.Thread(target=read)
    reading.start()
    until = time.monotonic() + 10
    while not lines and time.monotonic() < until:
        time.sleep(0.02)
    assert lines, "the stream did not begin"
    return reading, lines


@pytest.mark.slow
def test_streams_end_with_their_login_or_key(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_pages, "RECHECKED", 0.5)
    server = start()
    ledger, keys = server.server.service.ledger, [f"tml-{letter * 40}" for letter in "kl"]
    made = [
        ledger.add_key(
            name=key[-1], note="", hash=hash_key(key), owner=key[-1], project_id=None, created_at=1.0
        )
        for key in keys
    ]
    first, second, third = Browser(server, keys[0]), Browser(server, keys[1]), Browser(server, keys[0])
    streams = [follow(server, "/console/now/events", one.cookie)[0] for one in (first, second, third)]
    first.post("/console/logout", {"form_token": first.token})
    ledger.revoke_key(made[1].key_id, time.time())
    for one in streams[:2]:
        one.join(10)
        assert not one.is_alive()
    time.sleep(1)
    assert streams[2].is_alive(), "another login of the first key"
    third.post("/console/logout", {"form_token": third.token})
    streams[2].join(10)


def test_a_session_that_has_ended_stays_so_over_a_restart_and_on_other_servers(
    start: Callable[..., Running], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinkex.server.console.login_session.LOOK", 0.0)
    server = start()
    gone, stays = Browser(server, ALICE), Browser(server, ALICE)
    other = server_console(server.server.gateway, server.server._secret)  # as another server of this ledger
    pages = {route.path: route.endpoint for route in other}

    def elsewhere(browser: Browser) -> int:
        name, _, value = browser.cookie.partition("=")
        scope = {
            "type": "http", "method": "GET", "path": "/console/runs", "query_string": b"", "scheme": "http",
            "headers": [(b"cookie", f"{name}={value}".encode()), (b"host", b"localhost")],
        }  # fmt: skip

        async def look() -> int:
            return (await pages["/console/runs"](Request(scope))).status_code

        assert server.loop is not None
        return asyncio.run_coroutine_threadsafe(look(), server.loop).result(10)

    assert elsewhere(gone) == 200
    assert gone.post("/console/logout", {"form_token": gone.token}).status == 303
    assert (elsewhere(gone), elsewhere(stays)) != (200, 200)
    assert elsewhere(stays) == 200
    server.stop()
    again = start(home=tmp_path / "home")
    gone.server = stays.server = again
    assert (gone.get("/console/runs").status, stays.get("/console/runs").status) == (303, 200)


def test_two_consoles_of_one_machine_have_cookies_of_their_own(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    one, two = start(home=tmp_path / "one"), start(home=tmp_path / "two")
    first, second = Browser(one, ALICE), Browser(two, ALICE)
    first.cookie = second.cookie = f"{first.cookie}; {second.cookie}"  # as a browser: for both ports
    assert (first.get("/console/runs").status, second.get("/console/runs").status) == (200, 200)


# -- too much ----------------------------------------------------------------------------------------------


def visitor(name: str = "ann") -> Any:
    return SimpleNamespace(name=name)


class Used:
    closed = 0

    async def aclose(self) -> None:
        self.closed += 1


async def nothing() -> AsyncGenerator[bytes]:
    await asyncio.sleep(60)
    yield b"never"


@pytest.mark.anyio
async def test_streams_are_counted_before_they_begin_and_let_go_of_what_they_use_if_they_never_do() -> None:
    streams, used, request = LiveStreams(SimpleNamespace(find=lambda _: None)), Used(), Any  # type: ignore[arg-type]
    responses = [streams.response(nothing(), request, visitor(), used) for _ in range(64)]  # type: ignore[arg-type]
    with pytest.raises(Refusal, match="64 live pages"):
        streams.check_room(visitor())
    streams.check_room(visitor("bob"))

    async def gone() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        """Nobody reads it."""

    for one in responses:
        await asyncio.wait_for(one({"type": "http", "asgi": {"spec_version": "2.3"}}, gone, send), 5)
    assert used.closed == 64
    streams.check_room(visitor())


@pytest.mark.anyio
async def test_a_part_that_fails_after_its_reader_left_complains_to_nobody() -> None:
    told, parts, go_on = list[Any](), SharedParts(), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: told.append(context))

    async def fail() -> None:
        await go_on.wait()
        raise Refusal(404, "gone")

    waiting = asyncio.create_task(parts.get("x", 1.0, fail))
    await asyncio.sleep(0)
    waiting.cancel()
    go_on.set()
    await asyncio.sleep(0.01)
    parts._made.clear()
    gc.collect()
    loop.set_exception_handler(None)
    assert told == []


def test_a_playground_without_room_for_its_stream_draws_nothing(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_pages, "MOST_STREAMS", 0)
    started = list[Any]()
    samplers = server.server.service.samplers
    monkeypatch.setattr(samplers, "start", lambda request, *_: started.append(request))
    browser = Browser(server, ALICE)
    headers = {"cookie": browser.cookie, "x-form-token": browser.token}
    ask = {"model": MODEL, "mode": "text", "prompt": "hello"}
    answer = server.ask("POST", "/console/playground/sample", ask, headers=headers, key=None)
    assert (answer.status, started) == (429, [])


def test_a_users_open_pages_are_limited(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty-five looks at once at a page that takes its time: one is too many."""
    waiting, go_on = threading.Semaphore(0), threading.Event()

    def slowly(*_: Any) -> None:
        waiting.release()
        go_on.wait(20)

    monkeypatch.setattr("tinkex.service.run_series.RunSeries.last", slowly)
    run, alice, found = server.open_run(), Browser(server, ALICE), list[int]()
    looks = [
        threading.Thread(target=lambda: found.append(alice.get(f"/console/runs/{run}").status))
        for _ in range(65)
    ]
    for one in looks:
        one.start()
    looks[0].join(0.5)
    until = time.monotonic() + 10
    while not found and time.monotonic() < until:
        time.sleep(0.05)
    assert found == [429]
    began = time.monotonic()
    assert server.ask("GET", "/api/v1/healthz").status == 200  # the service's threads are free
    assert time.monotonic() - began < 5
    monkeypatch.undo()
    go_on.set()
    for one in looks:
        one.join(20)
    assert sum(waiting.acquire(blocking=False) for _ in range(65)) <= 4 + 64


# -- pages -------------------------------------------------------------------------------------------------


def test_a_part_of_overlaid_runs_is_shown_by_time_too(keeping: Running, seen: Seen) -> None:
    alice = Browser(keeping, ALICE)
    both = f"/console/compare/curves?run={seen.id}&x=time"
    x, y = drawn(json.loads(alice.get(both).body))["loss@0"]
    assert 0 <= x[0] < 60, "seconds since the run began"
    zoomed = drawn(json.loads(alice.get(f"{both}&low={x[0] - 1}&high={x[0] + 1}").body))
    assert zoomed["loss@0"][1] == y
    elsewhere = drawn(json.loads(alice.get(f"{both}&low={x[0] + 5}&high={x[0] + 9}").body))
    assert elsewhere["loss@0"] == ([], [])


def test_what_a_client_logs_as_loss_is_shown_beside_ours(keeping: Running, seen: Seen) -> None:
    service = ServiceClient(base_url=keeping.url, api_key=ALICE)
    run = service.create_lora_training_client(MODEL, rank=4, timeout=20)
    alice, one = Browser(keeping, ALICE), f"/console/runs/{run.model_id}"
    run.forward_backward(DATA, "cross_entropy")
    run.optim_step(AdamParams(learning_rate=0.25)).result(20)
    run.log({"loss": 77.0}).result(20)
    told = json.loads(alice.get(f"{one}/curves").body)
    assert drawn(told)["loss (logged)"] == ([1], [77.0])
    assert drawn(told)["loss"][1] != [77.0]
    assert ["loss (logged)", "loss (logged)"] in [line for panel in told["panels"] for line in panel["lines"]]
    (_, first), *_ = read_events(keeping, f"{one}/events", alice.cookie, 1)
    assert drawn(json.loads(first)) == drawn(told)
    assert "loss (logged)" in alice.get(one).body.decode()


def test_the_usage_is_a_table_that_a_spreadsheet_takes_for_text(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    server = start()
    ledger, key = server.server.service.ledger, "tml-" + "a" * 40
    ledger.add_key(
        name="root", note="", hash=hash_key(key), owner="root", project_id=None, created_at=1.0, admin=True
    )
    owners = ["=cmd()", "+1", "-1", "@x", "\tx", "\rx", "\nx", 'a "b", c', "plain"]
    now = time.time()
    ledger.add_usage(UsageRow(now, owner, "training", 7.0) for owner in owners)
    admin = Browser(server, key)
    answer = admin.get("/console/admin/usage.csv")
    assert answer.headers["content-disposition"] == "attachment; filename=usage.csv"
    head, *lines = csv.reader(io.StringIO(answer.body.decode(), newline=""))
    assert head == ["hour", "owner", "project", "base_model", "session", "kind", "amount"]
    assert {line[1] for line in lines} == {f"'{one}" for one in owners[:7]} | {*owners[7:]}
    assert {tuple(line[5:]) for line in lines} == {("training", "7.0")}
    page = admin.get("/console/admin").body.decode()
    assert page.count("plain") == 1
    assert Browser(server, key).get("/console/admin/usage.csv").status == 200


def test_the_audit_log_has_pages(start: Callable[..., Running]) -> None:
    server = start()
    key, ledger = "tml-" + "a" * 40, server.server.service.ledger
    ledger.add_key(
        name="root", note="", hash=hash_key(key), owner="root", project_id=None, created_at=1.0, admin=True
    )
    admin = Browser(server, key)
    for n in range(120):
        ledger.add_audit(AuditRow(time.time(), "x", "keys.add", details={"what": f"key {n}"}))
    first, second = (admin.get(f"/console/admin?audit={n}").body.decode() for n in (1, 2))
    assert (first.count("keys.add"), second.count("keys.add")) == (100, 20)
    assert "audit=2" in first
    assert "audit=1" in second


def admin_of(server: Running) -> Browser:
    key = "tml-" + "a" * 40
    server.server.service.ledger.add_key(
        name="root", note="", hash=hash_key(key), owner="root", project_id=None, created_at=1.0, admin=True
    )
    return Browser(server, key)


def test_only_an_administrator_assigns_keys_and_every_change_is_in_the_audit_log(
    start: Callable[..., Running],
) -> None:
    server = start()
    admin, ledger, form = admin_of(server), server.server.service.ledger, {"project": "poems", "key_id": "2"}
    ledger.add_key(name="ann", note="", hash=hash_key("tml-a"), owner="ann", project_id=None, created_at=1.0)
    ann, path = Browser(server, "tml-a"), "/console/admin/keys/assign"
    assert ann.post(path, {**form, "form_token": ann.token}).status == 403
    assert admin.post(path, form).status == 403, "without the page's token"
    form["form_token"] = admin.token
    assert (admin.post(path, form | {"key_id": "9"}).status, ledger.keys()[1].project_id) == (422, None)
    assert admin.post(path, form | {"project": "a\nb"}).status == 422
    assert admin.post(path, form | {"project": "x" * 101}).status == 422
    assert admin.post(path, form).status == 303
    assert [key.project_id for key in list(ledger.keys())] == [None, "poems"]
    (event, *_) = ledger.latest_audit(limit=9, offset=0)
    assert (event.owner, event.event, event.details) == ("root", "keys.assign", {"what": "ann: poems"})
    assert admin.post(path, form | {"project": " "}).status == 303
    assert ledger.keys()[1].project_id is None
    ledger.revoke_key(2, time.time())
    assert admin.post(path, form).status == 422


def test_several_runs_are_cleaned_up_and_what_stays_is_told(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start()
    first, second, third = (server.open_run() for _ in range(3))
    admin, service, path = admin_of(server), server.server.service, "/console/admin/runs/delete"
    question = Page(admin.get(f"/console/admin/disk/clean-up?run={first}&run={second}&run=none").body)
    assert "Delete 2 runs?" in question.text
    assert service.ledger.run(first) is not None
    close = type(service.runs).close

    async def busy(self: Any, row: Any) -> bool:
        return row.run_id != second and await close(self, row)

    monkeypatch.setattr(type(service.runs), "close", busy)
    both = f"run={quote(first)}&run={quote(second)}&run=none&form_token={admin.token}"
    sent = {"cookie": admin.cookie, "content-type": "application/x-www-form-urlencoded"}
    answer = server.ask("POST", path, both.encode(), headers=sent, key=None)
    assert answer.status == 422
    assert b"1 of 2 runs were not deleted" in answer.body
    left = [service.ledger.run(run_id) is not None for run_id in (first, second, third)]
    assert left == [False, True, True]
    monkeypatch.undo()
    assert server.ask("POST", path, both.encode(), headers=sent, key=None).status == 303
    assert service.ledger.run(second) is None
    assert admin.post(path, {"run": second, "form_token": admin.token}).status == 404


def test_disk_is_measured_off_the_page(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start()
    key, service = "tml-" + "a" * 40, server.server.service
    run = server.open_run()
    service.ledger.add_key(
        name="root", note="", hash=hash_key(key), owner="root", project_id=None, created_at=1.0, admin=True
    )
    measure, slow = AdminPages._measure, threading.Event()

    def slowly(self: AdminPages, rows: Any) -> None:
        slow.wait(10)
        measure(self, rows)

    monkeypatch.setattr(AdminPages, "_measure", slowly)
    admin = Browser(server, key)
    began = time.monotonic()
    assert b"0 of 1 runs were measured so far" in admin.get("/console/admin/disk").body
    assert time.monotonic() - began < 3
    slow.set()
    until = time.monotonic() + 10
    while run.encode() not in (page := admin.get("/console/admin/disk").body) and time.monotonic() < until:
        time.sleep(0.05)
    assert b"1 runs take" in page


def test_gpus_of_this_machine_and_of_other_nodes_are_shown(
    start: Callable[..., Running], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "NVIDIA H200, 1024, 143771, 37, 214.35, 51"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    server = start(engine=EngineConfig("", kind="fake"))
    engine: Any = next(iter(server.server.service.models)).engine
    gpu = GpuReading("NVIDIA L4", 2048.0, 23034.0, 88.0, 71.5, 63.0)
    beat = Heartbeat(True, "", {"kv_pages_used": 3, "kv_pages_total": 9}, {}, "node-b", (gpu,))
    engine.partition, engine.processes = (lambda index: engine), (lambda: [("trainer 1", beat)])
    page = re.sub(r"\s+", " ", Page(Browser(server, ALICE).get("/console/now").body).text)
    for text in ("NVIDIA H200", "Memory 1024 of 143.8k MiB", "Utilisation 37 %", "214.3 W", "51 °C"):
        assert text in page or text.replace("143.8k", "144k") in page, (text, page)
    for text in ("Node node-b", "trainer 1 of m/base", "NVIDIA L4", "Utilisation 88 %", "71.5 W"):
        assert text in page, (text, page)


def test_a_chat_with_a_system_message_is_drawn_as_its_template_says(server: Running) -> None:
    browser = Browser(server, ALICE)
    headers = {"cookie": browser.cookie, "x-form-token": browser.token}
    ask = {"model": MODEL, "mode": "chat", "system": "be short", "prompt": "hi", "max_tokens": 5, "seed": 3}
    told = server.ask("POST", "/console/playground/tokens", ask, headers=headers, key=None).json
    text = "".join(told["pieces"])
    assert text.index("be short") < text.index("hi")
    assert text != "be shorthi", "the template has words of its own"
    bare = server.ask(
        "POST", "/console/playground/tokens", ask | {"system": ""}, headers=headers, key=None
    ).json
    assert "be short" not in "".join(bare["pieces"])
    stream = server.ask("POST", "/console/playground/sample", ask, headers=headers, key=None).body.decode()
    events = re.findall(r"event: (\w+)\ndata: (.*)\n\n", stream)
    tokens = [token for name, data in events if name == "tokens" for token in json.loads(data)["ids"]]
    messages = [{"role": "system", "content": "be short"}, {"role": "user", "content": "hi"}]
    chat = {"model": MODEL, "messages": messages, "max_tokens": 5, "seed": 3, "logprobs": True}
    answer = server.ask("POST", "/v1/chat/completions", chat, key={"authorization": f"Bearer {ALICE}"}).json
    assert answer["usage"]["prompt_tokens"] == len(told["ids"])
    assert answer["usage"]["completion_tokens"] == len(tokens)


def test_colleagues_of_a_project_see_a_run_and_no_form_to_change_it(start: Callable[..., Running]) -> None:
    server = start()
    ledger, keys = server.server.service.ledger, {name: f"tml-{name[0] * 40}" for name in ("ann", "bob")}
    for name, key in keys.items():
        ledger.add_key(name=name, note="", hash=hash_key(key), owner=name, project_id="p", created_at=1.0)
    service = ServiceClient(base_url=server.url, api_key=keys["ann"], project_id="p")
    run = service.create_lora_training_client(MODEL, rank=4, timeout=20)
    run.save_state("one").result(20)
    one = f"/console/runs/{run.model_id}"
    own, other = (Browser(server, key) for key in keys.values())
    assert b"Delete this run" in own.get(one).body
    assert other.get(one).status == 200
    assert b"Delete this run" not in other.get(one).body
    checkpoints = f"/console/checkpoints?run={run.model_id}"
    assert b"/console/checkpoints/delete" in own.get(checkpoints).body
    assert b"/weights/one" in other.get(checkpoints).body
    assert b"/console/checkpoints/delete" not in other.get(checkpoints).body


def test_rollouts_are_filtered_and_have_pages(keeping: Running) -> None:
    service = ServiceClient(base_url=keeping.url, api_key=ALICE)
    run = service.create_lora_training_client(MODEL, rank=4, timeout=20)
    sampler = run.save_weights_and_get_sampling_client()
    data = list[Datum]()
    for n in range(60):
        prompt = [5, 6, n + 20]
        (drawn,) = sampler.sample(ModelInput.from_ints(prompt), 1, PARAMS).result(20).sequences
        whole = prompt + drawn.tokens
        weights = [0.0] * 2 + [1.0 if n % 3 else -1.0] * len(drawn.tokens)
        inputs = {"target_tokens": whole[1:], "logprobs": [-1.0] * len(weights), "advantages": weights}
        data.append(Datum(ModelInput.from_ints(whole[:-1]), inputs))
    run.forward_backward(data[:30], "importance_sampling").result(20)
    keeping.server.service.rollouts.flush()
    alice, address = Browser(keeping, ALICE), f"/console/runs/{run.model_id}/rollouts"

    def groups(query: str) -> list[str]:
        return re.findall(
            rf'class="prompt" href="{address}/(\w+)\?', alice.get(f"{address}?{query}").body.decode()
        )

    assert [len(groups(f"page={n}")) for n in (1, 2, 3)] == [50, 10, 0]
    assert "there are only 2 pages" in alice.get(f"{address}?page=3").body.decode()
    assert not {*groups("page=1")} & {*groups("page=2")}
    assert [len(groups(query)) for query in ("sign=%2B", "sign=-", "trained=1")] == [20, 10, 30]
    assert (len(groups("stop=length")), groups("stop=stop"), len(groups("step=0")), groups("step=7")) == (
        50, [], 50, [],
    )  # fmt: skip
    first = alice.get(f"{address}?page=1").body.decode()
    prompt = unescape(re.findall(r'class="prompt"[^>]*>([^<]+)<', first)[0]).strip()
    assert 1 <= len(groups(urlencode({"text": prompt}))) < 50
    assert groups("text=no+such+text") == []
    assert alice.get(f"{address}?step={'9' * 5000}").status == 200


def test_lists_say_when_a_page_is_beyond_their_end(keeping: Running, seen: Seen) -> None:
    alice = Browser(keeping, ALICE)
    assert b"There is only 1 page" in alice.get("/console/runs?page=9").body
    assert b"There is only 1 page" in alice.get("/console/checkpoints?page=9").body
