"""Telemetry: asked for or absent, never in the way, and with nothing in it that is anyone's."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from tests.client.conftest import PARAMS, QUICK, close, datum, eventually, fast_retries
from tests.stub import Action, Stub, delay, drop, fail, hang, status
from tinkex import (
    BadRequestError,
    InternalServerError,
    InvalidInputError,
    ModelInput,
    RequestFailedError,
    RestClient,
    SamplingParams,
    ServiceClient,
    TinkerError,
    types,
)
from tinkex.client import loop as background
from tinkex.client import telemetry as module
from tinkex.client.telemetry import Telemetry

pytestmark = pytest.mark.slow

KEY = "tml-verySecretKey4242"
HEADER = "header-value-5151"
PROMPT_IDS = [777001, 777002, 777003]
SERVERS_WORDS = "the-servers-own-words-6161"
PROMPT = ModelInput.from_ints(PROMPT_IDS)


def told(stub: Stub) -> list[dict[str, Any]]:
    return [event for request in stub.sent("telemetry") for event in request.json["events"]]


def kinds(stub: Stub) -> list[str]:
    return [event["event"] for event in told(stub)]


@pytest.fixture
def talking(stub: Stub) -> Any:
    service = ServiceClient(base_url=stub.url, api_key=KEY, timeouts=QUICK, telemetry=True)
    fast_retries(service)
    yield service
    close(service)


# -- asked for ---------------------------------------------------------------------------------------------


def test_nothing_is_told_unless_it_was_asked_for(stub: Stub, service: ServiceClient, run: Any) -> None:
    stub.script("optim_step", status(400))
    with pytest.raises(BadRequestError):
        run.optim_step().result(20)
    service.close().result(20)
    assert stub.count("telemetry") == 0
    for client in (service, run, service.create_rest_client()):
        assert client.get_telemetry() is None


@pytest.mark.parametrize("value", ["1", "true", "YES", "on"])
def test_the_environment_can_ask_for_it(stub: Stub, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", value)
    with ServiceClient(base_url=stub.url) as service:
        sampler = service.create_sampling_client(base_model="stub/base", timeout=20)
        assert sampler.get_telemetry() is service.get_telemetry() is not None
    assert kinds(stub) == ["SESSION_START", "SESSION_END"]


@pytest.mark.parametrize("value", ["0", "", "off", "no", "2"])
def test_and_any_other_value_does_not(stub: Stub, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", value)
    service = ServiceClient(base_url=stub.url)
    assert service.get_telemetry() is None
    close(service)


def test_the_argument_wins_over_the_environment(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "1")
    assert ServiceClient(base_url=stub.url, telemetry=False).get_telemetry() is None
    with pytest.raises(InvalidInputError, match="telemetry must be"):
        ServiceClient(base_url=stub.url, telemetry="yes")  # type: ignore[arg-type]


def test_a_client_without_a_session_says_so(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "1")
    stub.script("sessions", status(403))
    with RestClient(base_url=stub.url) as rest, pytest.raises(TinkerError):
        rest.list_sessions().result(20)
    (request,) = stub.wait_for("telemetry")
    assert request.json["session_id"].startswith("sessionless-")


# -- what is told ------------------------------------------------------------------------------------------


def test_a_sessions_life_in_the_official_form(stub: Stub) -> None:
    """The common fields, an index from 0, a session, a process; in one request."""
    with ServiceClient(base_url=stub.url, telemetry=True) as service:
        run = service.create_lora_training_client("stub/base", timeout=20)
        stub.script("optim_step", fail("because", "server"))
        with pytest.raises(RequestFailedError):
            run.optim_step().result(20)
        telemetry = service.get_telemetry()
        assert telemetry is not None
        assert telemetry.log("my_event", {"steps": 3, "kind": "warm-up", "ok": True})
    events = told(stub)
    assert [event["event"] for event in events] == [
        "SESSION_START", "UNHANDLED_EXCEPTION", "GENERIC_EVENT", "SESSION_END",
    ]  # fmt: skip
    assert [event["event_session_index"] for event in events] == [0, 1, 2, 3]
    assert len({event["event_id"] for event in events}) == 4
    failed, mine, end = events[1:]
    assert (failed["error_type"], failed["severity"]) == ("RequestFailedError", "ERROR")
    assert failed["error_message"] == "during=optim_step category=server"
    assert "client/polling.py:" in failed["traceback"]
    assert mine["event_data"] == {"steps": 3, "kind": "warm-up", "ok": True}
    assert end["duration"].startswith("0:00:0")
    for request in stub.sent("telemetry"):
        batch = types.TelemetryBatch.model_validate(request.json)
        assert batch.session_id == "session-1"
        assert batch.process_uuid
        assert batch.platform == __import__("platform").system()


def test_a_users_mistake_is_a_warning(stub: Stub, talking: ServiceClient) -> None:
    """And a 429 is not one: it is a pause, which is over when anything else is answered."""
    run = talking.create_lora_training_client("stub/base", timeout=20)
    stub.script("optim_step", status(429), status(422))
    with pytest.raises(TinkerError):
        run.optim_step().result(20)
    eventually(lambda: len(told(stub)) == 4)
    start, pause, end, mistake = told(stub)
    assert start["event"] == "SESSION_START"
    assert [(e["event_data"]["from"], e["event_data"]["to"]) for e in (pause, end)] == [
        ("active", "paused_rate_limit"), ("paused_rate_limit", "active"),
    ]  # fmt: skip
    assert (mistake["event_name"], mistake["severity"]) == ("user_error", "WARNING")
    assert mistake["event_data"] == {
        "error_type": "UnprocessableEntityError", "during": "optim_step", "status": 422,
    }  # fmt: skip


def _whole_session(stub: Stub) -> None:
    """Everything a client does, with secrets everywhere, and every way to fail on the way."""
    service = ServiceClient(
        {"note": KEY}, base_url=stub.url, api_key=KEY, timeouts=QUICK, telemetry=True,
        default_headers_overrides={"x-mine": HEADER},
    )  # fmt: skip
    fast_retries(service, status_budget=0.1, lost_budget=0.2)
    words = {"detail": f"{SERVERS_WORDS} {KEY} {HEADER} {PROMPT_IDS}"}
    run = service.create_lora_training_client("stub/base", timeout=20)
    sampler = service.create_sampling_client(base_model="stub/base", timeout=20)
    stub.gap_seconds = 0.05
    for code in (400, 401, 403, 404, 410, 422, 500):
        stub.script("optim_step", *[status(code, body=words)] * 9)
        stub.script("retrieve_future", *[status(code, body=words)] * 9)
        stub.script("asample", *[status(code, body=words)] * 9)
        for call in (
            run.optim_step,
            lambda: run.forward_backward([datum(3)], "cross_entropy"),
            lambda: sampler.sample(PROMPT, 1, PARAMS),
            lambda: sampler.sample_stream(PROMPT, PARAMS),
        ):
            with pytest.raises(Exception):  # noqa: B017
                call().result(0.5)
        stub.unscript()
    stub.script("asample", fail(f"{SERVERS_WORDS} {PROMPT_IDS} {KEY}", "server"), drop())
    with pytest.raises(RequestFailedError):
        sampler.sample(PROMPT, 1, PARAMS).result(20)
    sampler.sample(PROMPT, 1, SamplingParams(max_tokens=1, stop=SERVERS_WORDS)).result(20)
    paused = {"type": "try_again", "queue_state": "paused_capacity", "queue_state_reason": SERVERS_WORDS}
    stub.script("retrieve_future", status(408, body=paused))
    sampler.sample(PROMPT, 1, PARAMS).result(20)
    telemetry = service.get_telemetry()
    assert telemetry is not None
    telemetry.log(f"name-{KEY}", {
        "plain": f"x:{KEY}", KEY: 1, "header": HEADER, "prompt": PROMPT_IDS, "text": "some words of a prompt",
        "nested": {"authorization": "abc", "deep": [KEY], "bytes": KEY.encode()}, "error": ValueError(KEY),
    })  # fmt: skip
    try:
        raise type("Leak" + HEADER.replace("-", ""), (RuntimeError,), {})(KEY)
    except RuntimeError as error:
        telemetry.log_exception(error)
    close(service)


def test_no_key_header_prompt_or_word_leaves(stub: Stub) -> None:
    """Every byte that went to telemetry, searched; the key is where it must be, and nowhere else."""
    _whole_session(stub)
    requests = stub.sent("telemetry")
    events = told(stub)
    assert {"UNHANDLED_EXCEPTION", "GENERIC_EVENT", "SESSION_START", "SESSION_END"} <= set(kinds(stub))
    assert {event["event_name"] for event in events if event["event"] == "GENERIC_EVENT"} >= {
        "user_error", "queue_state", "[redacted]",
    }  # fmt: skip
    assert len(events) > 15
    secrets = [
        KEY,
        KEY[4:],
        HEADER,
        HEADER.replace("-", ""),
        SERVERS_WORDS,
        "some words",
        "x-api-key",
        "x-mine",
    ]
    secrets += map(str, PROMPT_IDS)
    for request in requests:
        body = request.body.decode()
        assert [secret for secret in secrets if secret.lower() in body.lower()] == []
        lines = [line for line in request.head.decode().split("\r\n") if KEY in line]
        assert lines == [f"x-api-key: {KEY}"], "as for any request"


def test_the_same_holds_for_what_is_said_in_the_log(stub: Stub, caplog: pytest.LogCaptureFixture) -> None:
    """The key is in no log line either."""
    stub.script("telemetry", status(500), always=True)
    stub.script("get_server_capabilities", status(500), always=True)
    with caplog.at_level("DEBUG", "tinkex"):
        service = ServiceClient(base_url=stub.url, api_key=KEY, timeouts=QUICK, telemetry=True)
        fast_retries(service, status_budget=0.1)
        with pytest.raises(InternalServerError):
            service.get_server_capabilities(timeout=20)
        close(service)
    assert KEY not in caplog.text


# -- never in the way --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "trouble", [status(503), hang(), drop(), status(200, body=b"nonsense"), delay(30)],
    ids=["503", "hang", "drop", "nonsense", "slow"],
)  # fmt: skip
def test_errors_are_not_delayed_and_calls_not_broken(stub: Stub, trouble: Action) -> None:
    """The official client holds every error back for 30 s."""
    stub.script("telemetry", trouble, always=True)
    service = ServiceClient(base_url=stub.url, timeouts=QUICK, telemetry=True)
    run = service.create_lora_training_client("stub/base", timeout=20)
    for _ in range(3):
        stub.script("optim_step", status(400))
        began = time.monotonic()
        with pytest.raises(BadRequestError):
            run.optim_step().result(20)
        assert time.monotonic() - began < 4
        run.optim_step().result(20)
    stub.wait_for("telemetry")
    began = time.monotonic()
    service.close().result(20)
    assert time.monotonic() - began < QUICK.close + 4, "close is bounded"
    telemetry = service.get_telemetry()
    assert telemetry is not None
    assert telemetry.dropped > 0
    assert telemetry.sent == 0
    assert not telemetry.log("too_late")


def test_an_exception_is_told_at_once(stub: Stub, talking: ServiceClient) -> None:
    """Not at the next flush, ten seconds later, nor at the end."""
    stub.script("get_server_capabilities", status(403))
    with pytest.raises(TinkerError):
        talking.get_server_capabilities(timeout=20)
    stub.wait_for("telemetry", timeout=3)
    assert kinds(stub) == ["GENERIC_EVENT"]


def test_what_is_not_urgent_waits_for_company(stub: Stub, talking: ServiceClient) -> None:
    talking.create_sampling_client(base_model="stub/base", timeout=20)
    telemetry = talking.get_telemetry()
    assert telemetry is not None
    for n in range(20):
        telemetry.log("tick", {"n": n})
    time.sleep(0.3)
    assert stub.count("telemetry") == 0
    telemetry.flush()
    (request,) = stub.wait_for("telemetry")
    assert len(request.json["events"]) == 21


def test_it_has_a_connection_of_its_own(stub: Stub, talking: ServiceClient) -> None:
    """While telemetry hangs, everything else goes on over other connections."""
    stub.script("telemetry", hang(), always=True)
    telemetry = talking.get_telemetry()
    assert telemetry is not None
    telemetry.log("x")
    telemetry.flush()
    (hanging,) = stub.wait_for("telemetry")
    sampler = talking.create_sampling_client(base_model="stub/base", timeout=20)
    for _ in range(20):
        sampler.sample(PROMPT, 1, PARAMS).result(20)
    assert hanging.connection not in {r.connection for r in stub.requests if r is not hanging}


def test_the_queue_is_bounded_and_the_oldest_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is lost is counted."""
    monkeypatch.setattr(module, "CAPACITY", 10)
    monkeypatch.setattr(module, "BATCH", 5)
    batches: list[list[int]] = []
    go, begun = asyncio.Event(), threading.Event()

    async def send(request: Any) -> None:
        begun.set()
        await go.wait()
        batches.append([event.event_data["n"] for event in request.events])

    telemetry = Telemetry(send)
    for n in range(40):
        telemetry.log("tick", {"n": n})
        if n == 4:
            assert begun.wait(5)
    eventually(lambda: telemetry.dropped == 25)  # 5 are being sent, 10 wait
    background.call_soon(go.set)
    eventually(lambda: telemetry.sent == 15)
    assert batches == [[0, 1, 2, 3, 4], [30, 31, 32, 33, 34], [35, 36, 37, 38, 39]]


def test_a_batch_that_cannot_be_sent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """And does not hold up the next one for ever."""
    tries = 0

    async def send(request: Any) -> None:
        nonlocal tries
        tries += 1
        raise TinkerError("no")

    telemetry = Telemetry(send)
    monkeypatch.setattr(module, "ATTEMPTS", 2)
    telemetry.log_exception(ValueError("x"))
    eventually(lambda: telemetry.dropped == 1)
    assert tries == 2


def test_with_nothing_to_tell_nothing_runs(stub: Stub, talking: ServiceClient) -> None:
    """No task of its own keeps a client alive."""
    talking.create_sampling_client(base_model="stub/base", timeout=20)
    telemetry = talking.get_telemetry()
    assert telemetry is not None
    telemetry.flush()
    eventually(lambda: telemetry.sent == 1)
    eventually(lambda: telemetry._task is None)


def test_a_short_script_sends_what_it_has_at_its_end(stub: Stub) -> None:
    """The official one sends nothing; and an exception that ends the script is no obstacle."""
    code = (
        "import tinkex\n"
        f"service = tinkex.ServiceClient(base_url={stub.url!r}, telemetry=True)\n"
        "service.create_lora_training_client('stub/base')\n"
        "raise SystemError('a secret in a message')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "SystemError" in done.stderr
    assert kinds(stub) == ["SESSION_START", "SESSION_END"]
    assert "a secret" not in json.dumps(told(stub))


def test_each_client_tells_its_own_server(stub: Stub) -> None:
    """Who is told is the connection's, not found out from frames or global state."""
    with Stub() as other:
        talking = ServiceClient(base_url=stub.url, timeouts=QUICK, telemetry=True)
        silent = ServiceClient(base_url=other.url, timeouts=QUICK)
        for server, service in ((stub, talking), (other, silent)):
            server.script("get_server_capabilities", status(403))
            with pytest.raises(TinkerError):
                service.get_server_capabilities(timeout=20)
        stub.wait_for("telemetry")
        close(talking)
        close(silent)
        assert other.count("telemetry") == 0
    assert kinds(stub) == ["GENERIC_EVENT"]
