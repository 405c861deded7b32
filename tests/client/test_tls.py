"""https: what plain HTTP shows, over TLS and the HTTP library, which the hosted service needs.

Over HTTP/1.1, as `tinkex serve` speaks it, and over HTTP/2, where the server offers it: there a request can
also be lost by being refused, or with a connection that takes no more.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.client.chaos import Chaos
from tests.client.conftest import PARAMS, PROMPT, QUICK, close, datum, eventually, fast_retries, free_port
from tests.stub import Stub, drop, hang, status
from tests.stub.http2 import LOSSES
from tests.stub.server import certificate
from tinkex import (
    APIConnectionError,
    APITimeoutError,
    BadRequestError,
    ClientClosedError,
    ModelInput,
    ServiceClient,
    Timeouts,
)

pytestmark = pytest.mark.slow


@pytest.fixture(params=["", *LOSSES], ids=["http1", *(f"http2 {loss}" for loss in LOSSES)])
def stub(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    """With a certificate that this process trusts."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate()))
    with Stub(tls=True, http2=request.param) as server:
        server.gap_seconds = 5
        yield server


@pytest.mark.parametrize("batch", [False, True])
def test_a_whole_session(stub: Stub, batch: bool) -> None:
    stub.config = {"sample_use_retrieve_futures": batch, "fwdbwd_max_chunk_len": 50}
    with ServiceClient(base_url=stub.url, api_key="tml-k") as service:
        run = service.create_lora_training_client("stub/base", timeout=10)
        passing = run.forward_backward([datum(2_000)] * 120, "cross_entropy")  # megabytes, in three requests
        run.optim_step().result(10)
        assert len(passing.result(10).loss_fn_outputs) == 120
        sampler = run.save_weights_and_get_sampling_client()
        prompts = [ModelInput.from_ints(range(n)) for n in range(1, 60)]
        for future in [sampler.sample(prompt, 1, PARAMS) for prompt in prompts]:
            assert future.result(10).sequences[0].tokens == [1, 2, 3, 4]
        assert len(service.create_rest_client().list_sessions().result(20).sessions) == 1
    assert [session["finished"]["reason"]["type"] for session in stub.sessions.values()] == ["success"]
    assert {request.headers["x-api-key"] for request in stub.requests} == {"tml-k"}


def test_infinite_patience(stub: Stub) -> None:
    patient = Timeouts(connect=math.inf, request=math.inf, long_poll=math.inf, lost=math.inf)
    with ServiceClient(base_url=stub.url, api_key="tml-k", timeouts=patient) as service:
        sampler = service.create_sampling_client(base_model="stub/base", timeout=20)
        assert sampler.sample(PROMPT, 1, PARAMS).result(20).sequences


def test_http2_is_spoken_where_it_is_offered_and_requests_share_a_connection(
    stub: Stub, sampler: Any
) -> None:
    stub.hold("asample")
    samples = [sampler.sample(PROMPT, 1, PARAMS)]
    stub.wait_for("retrieve_future", 1)  # before a first handshake nobody knows that one connection will do
    samples += [sampler.sample(PROMPT, 1, PARAMS) for _ in range(49)]
    stub.wait_for("retrieve_future", 50)
    polls = stub.sent("retrieve_future")
    assert {poll.head.split(b"\r\n")[0][-6:] for poll in polls} == {b"HTTP/2" if stub.http2 else b"TP/1.1"}
    assert len({poll.connection for poll in polls}) == (1 if stub.http2 else 50)
    stub.release()
    for sample in samples:
        sample.result(10)


@pytest.mark.parametrize(
    "mishap", [status(503), drop(), drop(effect=True), status(429), status(400, body=b"")]
)
@pytest.mark.parametrize("op", ["optim_step", "retrieve_future", "asample"])
def test_what_passes_is_survived(stub: Stub, run: Any, sampler: Any, op: str, mishap: Any) -> None:
    stub.script(op, mishap, mishap)
    step, sample = run.optim_step(), sampler.sample(PROMPT, 1, PARAMS)
    step.result(10)
    sample.result(10)
    assert [op for _, _, op in stub.executed] == ["optim_step"], "once"


def test_what_does_not_pass_is_raised(stub: Stub, run: Any) -> None:
    stub.script("optim_step", status(400, body={"detail": "the moon is full"}))
    with pytest.raises(BadRequestError, match=r"400 from POST https://.*/optim_step: the moon is full"):
        run.optim_step().result(20)
    run.optim_step().result(20)


def test_silence_is_a_timeout(stub: Stub) -> None:
    service = ServiceClient(base_url=stub.url, timeouts=Timeouts(request=0.3, close=1))
    fast_retries(service, lost_budget=0.5)
    stub.script("get_server_capabilities", hang(), always=True)
    with pytest.raises(APITimeoutError, match=r"no answer from GET https://.*capabilities in time"):
        service.get_server_capabilities(timeout=10)
    close(service)


def test_a_connection_that_fell_silent_is_left(stub: Stub) -> None:
    """A VPN that was built up anew, a laptop that slept: what was open stays open, and nothing comes."""
    service = ServiceClient(base_url=stub.url, timeouts=Timeouts(request=2, close=1))
    rest = service.create_rest_client()
    for future in [rest.list_sessions() for _ in range(8)]:
        future.result(20)
    before = stub.sent("sessions")
    old = {request.connection for request in before}
    stub.script("sessions", hang(), where=lambda request: request.connection in old, always=True)
    rest.list_sessions().result(20)
    assert stub.count("sessions") <= len(before) + 2
    close(service)


def test_a_session_goes_on_beating_over_another_connection(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though nobody waits for a heartbeat for longer than until the next one is due."""
    monkeypatch.setattr("tinkex.client.http_pools.SILENCE", 0.2)
    service = ServiceClient(base_url=stub.url, timeouts=Timeouts(heartbeat_interval=0.5, close=1))
    service.create_sampling_client(base_model="stub/base", timeout=20)
    old = {request.connection for request in stub.wait_for("session_heartbeat", 1)}
    old |= {request.connection for request in stub.sent("create_session")}
    stub.script("session_heartbeat", hang(), where=lambda request: request.connection in old, always=True)
    eventually(lambda: {request.connection for request in stub.sent("session_heartbeat")} - old)
    close(service)


def test_a_restart_is_survived(stub: Stub, run: Any) -> None:
    stub.hold("forward_backward")
    waiting = run.forward_backward([datum()], "cross_entropy")
    stub.wait_for("retrieve_future", 2)
    stub.stop()
    step = run.optim_step()
    stub.start()
    stub.release()
    for future in (waiting, step):
        future.result(10)


def test_nobody_there_is_said_with_url_and_cause() -> None:
    url = f"https://127.0.0.1:{free_port()}"
    service = ServiceClient(base_url=url, timeouts=Timeouts(unreachable=0.5))
    with pytest.raises(APIConnectionError, match=rf"no connection to {url}.*refused.*attempts in"):
        service.get_server_capabilities(timeout=10)


def test_a_certificate_that_is_not_trusted_is_said(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing, least of all a key, is sent."""
    monkeypatch.setenv("SSL_CERT_FILE", str(Path(__file__)))
    service = ServiceClient(base_url=stub.url, api_key="tml-k", timeouts=Timeouts(unreachable=0.5))
    with pytest.raises(APIConnectionError, match=r"no connection to https://.*certificate"):
        service.get_server_capabilities(timeout=10)
    assert stub.requests == []


def test_cancelling_and_closing(stub: Stub, service: ServiceClient, run: Any, sampler: Any) -> None:
    stub.hold("asample", "forward_backward")
    samples = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(2)]
    passing = run.forward_backward([datum()], "cross_entropy")
    stub.wait_for("retrieve_future", 4)

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sampler.sample_async(PROMPT, 1, PARAMS), 0.1)

    asyncio.run(give_up())
    assert samples[0].cancel()
    stub.wait_for("cancel_future", 2)
    service.close().result(20)
    for future in (samples[1], passing):
        with pytest.raises(ClientClosedError):
            future.result(20)


@pytest.mark.parametrize("seed", range(2))
def test_any_interleaving_leaves_later_calls_working(stub: Stub, seed: int) -> None:
    stub.config = {"fwdbwd_max_chunk_len": 1, "sample_use_retrieve_futures": bool(seed)}
    stub.gap_seconds = 60
    service = ServiceClient(base_url=stub.url, timeouts=Timeouts(close=QUICK.close))
    fast_retries(service)
    chaos = Chaos(stub, service, seed)
    for _ in range(80):
        chaos.step()
    chaos.settle()
    chaos.check_runs_still_train()
    chaos.check_order()
    close(service)
