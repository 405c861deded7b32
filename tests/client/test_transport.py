"""HTTP: servers that are away, old, odd or broken."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import threading
import time
from typing import Any

import pytest

from tests.client.conftest import PARAMS, PROMPT, QUICK, close, datum, eventually, fast_retries, free_port
from tests.stub import Stub, delay, drop, garbage, hang, status
from tinkex import (
    APIConnectionError,
    APIResponseValidationError,
    APIStatusError,
    APITimeoutError,
    AuthenticationError,
    BadRequestError,
    ClientClosedError,
    InternalServerError,
    ModelInput,
    NotFoundError,
    PermissionDeniedError,
    ServiceClient,
    Timeouts,
    UnprocessableEntityError,
)
from tinkex.wire import codec

# -- away --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [1.0, None], ids=["1s", "default"])
def test_a_host_that_is_not_there_is_reported_soon_and_in_full(seconds: float | None) -> None:
    """URL, cause and attempts, within 10 s by default."""
    url = f"http://127.0.0.1:{free_port()}"
    timeouts = Timeouts(unreachable=seconds) if seconds else Timeouts()
    service = ServiceClient(base_url=url, timeouts=timeouts)
    began = time.monotonic()
    with pytest.raises(APIConnectionError) as caught:
        service.create_lora_training_client("stub/base")
    assert time.monotonic() - began < (seconds or 10) + 3
    for words in (url, "refused", "attempts in"):
        assert words in str(caught.value)


@pytest.mark.slow
def test_a_host_that_swallows_connections_is_reported_in_time() -> None:
    """A full backlog drops the handshake, as a firewall would: two tries, and no more than the time given."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        fillers = [socket.socket() for _ in range(3)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", listener.getsockname()[1]))
        time.sleep(0.1)
        service = ServiceClient(base_url=url, timeouts=Timeouts(connect=0.6, unreachable=2))
        began = time.monotonic()
        with pytest.raises(APIConnectionError, match=f"no connection to {url}") as caught:
            service.get_server_capabilities()
        assert time.monotonic() - began < 6
        assert "2 attempts" in str(caught.value)
        for filler in fillers:
            filler.close()


def test_an_unreachable_host_can_be_tried_again() -> None:
    port = free_port()
    service = ServiceClient(base_url=f"http://127.0.0.1:{port}", timeouts=Timeouts(unreachable=0.2))
    with pytest.raises(APIConnectionError):
        service.create_sampling_client(base_model="stub/base")
    with Stub(port=port):
        service.create_sampling_client(base_model="stub/base", timeout=10)
        close(service)


def test_a_server_that_comes_back_is_not_noticed(stub: Stub, run: Any, sampler: Any) -> None:
    """Polls, submissions and samples all survive a restart."""
    stub.hold("forward_backward", "asample")
    waiting = run.forward_backward([datum()], "cross_entropy")
    sampling = sampler.sample(PROMPT, 1, PARAMS)
    stub.wait_for("retrieve_future", 3)
    stub.stop()
    step = run.optim_step()
    more = sampler.sample(PROMPT, 1, PARAMS)
    time.sleep(0.3)
    assert not waiting.done()
    stub.start()
    stub.release()
    for future in (waiting, sampling, step, more):
        future.result(10)


@pytest.mark.slow
def test_a_server_that_is_lost_for_good_is_given_up(stub: Stub) -> None:
    service = ServiceClient(base_url=stub.url, timeouts=Timeouts(lost=0.5, close=0.5))
    fast_retries(service)
    run = service.create_lora_training_client("stub/base", timeout=20)
    stub.stop()
    with pytest.raises(APIConnectionError, match=r"refused.*attempts in"):
        run.optim_step().result(20)
    close(service)


def test_losing_a_server_is_said(
    stub: Stub, run: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinkex.client.http_transport.LOST_NOTICE", 0.1)
    stub.stop()
    step = run.optim_step()
    with caplog.at_level(logging.WARNING, "tinkex"):
        eventually(lambda: "lost contact with http://127.0.0.1" in caplog.text)
    stub.start()
    step.result(10)


@pytest.mark.parametrize("effect", [False, True])
def test_a_dropped_submission_is_done_once(stub: Stub, run: Any, effect: bool) -> None:
    """Whether or not the server had taken it before the connection broke."""
    stub.script("optim_step", drop(effect=effect), drop(effect=effect))
    run.optim_step().result(20)
    assert [op for _, _, op in stub.executed] == ["optim_step"]


@pytest.mark.slow
def test_a_request_that_gets_no_answer_times_out_and_is_sent_again(stub: Stub) -> None:
    service = ServiceClient(base_url=stub.url, timeouts=Timeouts(request=0.3, long_poll=0.3))
    run = service.create_lora_training_client("stub/base", timeout=10)
    stub.script("optim_step", hang())
    stub.script("retrieve_future", hang())
    run.optim_step().result(10)
    fast_retries(service, lost_budget=0.5)
    stub.script("get_info", hang(), always=True)
    with pytest.raises(APITimeoutError, match=r"no answer from POST .*/get_info in time"):
        run.get_info()
    close(service)


# -- closed ------------------------------------------------------------------------------------------------


def test_closing_ends_everything_under_way(
    stub: Stub, service: ServiceClient, run: Any, sampler: Any
) -> None:
    """Whoever waits gets ClientClosedError at once, and so does whoever comes later."""
    stub.hold("forward_backward", "asample")
    stub.script("optim_step", status(503), always=True)
    waiting = [
        run.forward_backward([datum()], "cross_entropy"),
        run.optim_step(),
        run.save_state("queued"),
        sampler.sample(PROMPT, 1, PARAMS),
    ]
    stub.wait_for("optim_step", 2)
    stub.wait_for("retrieve_future", 3)
    service.close().result(20)
    for future in waiting:
        with pytest.raises(ClientClosedError, match="make a new ServiceClient"):
            future.result(2)
    for call in (run.optim_step, run.get_info, lambda: sampler.sample(PROMPT, 1, PARAMS)):
        with pytest.raises(ClientClosedError):
            call()
    with pytest.raises(ClientClosedError):
        service.create_lora_training_client("stub/base")
    assert service.close().result(20) is None, "closing twice is no error"


def test_closing_ends_a_batch_poll_too() -> None:
    with Stub(sample_use_retrieve_futures=True) as stub:
        service = ServiceClient(base_url=stub.url)
        sampler = service.create_sampling_client(base_model="stub/base", timeout=20)
        stub.hold("asample")
        future = sampler.sample(PROMPT, 1, PARAMS)
        stub.wait_for("retrieve_futures")
        service.close().result(20)
        with pytest.raises(ClientClosedError):
            future.result(2)


# -- old ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [400, 415, 422, 500])
def test_a_server_that_only_speaks_json_gets_json(stub: Stub, run: Any, code: int) -> None:
    """Found out once, with a first pass; its JSON result is read too."""
    is_proto = lambda request: "protobuf" in request.headers.get("content-type", "")  # noqa: E731
    stub.script("forward_backward", status(code), where=is_proto, always=True)
    stub.json_only = True
    output = run.forward_backward([datum()], "cross_entropy").result(20)
    assert output.loss_fn_outputs[0]["logprobs"].tolist() == [-0.5] * 4
    refused = len([r for r in stub.requests if is_proto(r)])
    run.forward([datum()], "cross_entropy").result(20)
    assert len([r for r in stub.requests if is_proto(r)]) == refused
    assert [op for _, _, op in stub.executed] == ["forward_backward", "forward"]


def test_one_500_does_not_make_it_a_json_server(stub: Stub, run: Any) -> None:
    stub.script("forward_backward", status(500))
    for _ in range(2):
        run.forward_backward([datum()], "cross_entropy").result(20)
    kinds = [request.headers["content-type"] for request in stub.sent("forward_backward")]
    assert kinds == ["application/x-protobuf"] * 3


def test_a_failing_server_is_not_given_up_because_json_fails_too(stub: Stub, run: Any) -> None:
    stub.script("forward_backward", *[status(500)] * 5)
    run.forward_backward([datum()], "cross_entropy").result(20)
    assert stub.count("forward_backward") == 6


def test_a_refusal_that_is_not_about_protobuf_is_the_one_raised(stub: Stub, run: Any) -> None:
    stub.script("forward_backward", status(400, body={"detail": "first"}), status(422))
    with pytest.raises(BadRequestError, match="first"):
        run.forward_backward([datum()], "cross_entropy").result(20)


def test_a_server_without_client_config(stub: Stub, service: ServiceClient) -> None:
    """The defaults describe it."""
    stub.script("client/config", status(404), always=True)
    service.create_lora_training_client("stub/base", timeout=20).optim_step().result(20)


def test_a_server_without_sequence_ids(stub: Stub, sampler: Any) -> None:
    """The official client fails an assertion on it."""
    stub.script("asample", status(200, body={"request_id": "r-own"}))
    stub.script(
        "retrieve_future", status(200, body={"sequences": [{"stop_reason": "length", "tokens": [9]}]})
    )
    (sequence,) = sampler.sample(PROMPT, 1, PARAMS).result(20).sequences
    assert sequence.tokens == [9]


@pytest.mark.parametrize("code", [200, 408])
def test_not_yet_comes_in_two_forms(stub: Stub, run: Any, code: int) -> None:
    pending = status(code, body={"type": "try_again", "request_id": "r", "queue_state": "active"})
    stub.script("retrieve_future", pending, pending, status(408, body=b""))
    assert run.optim_step().result(20).metrics == {"grad_norm": 1.0}
    assert stub.count("retrieve_future") == 1 + 4  # the run's creation, then this


@pytest.mark.slow
def test_a_server_that_never_holds_a_poll_is_not_asked_in_a_hot_loop(stub: Stub, run: Any) -> None:
    """The official client asks 150 times a second."""
    stub.poll_seconds = 0
    stub.hold("optim_step")
    before = stub.count("retrieve_future")
    step = run.optim_step()
    time.sleep(1.5)
    assert stub.count("retrieve_future") - before < 12
    stub.release()
    step.result(20)


def test_a_failing_poll_is_paced_and_survived(stub: Stub, service: ServiceClient, run: Any) -> None:
    fast_retries(service, base=0.2, cap=0.2)
    stub.script("retrieve_future", *[status(code) for code in (500, 503, 502, 429)])
    before = stub.count("retrieve_future")
    run.optim_step().result(20)
    times = [request.time for request in stub.sent("retrieve_future")[before:]]
    assert len(times) == 5
    assert min(b - a for a, b in itertools.pairwise(times)) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("ended_by", ["us", "a proxy"])
def test_a_poll_that_is_held_for_longer_than_anyone_waits_is_no_failure(stub: Stub, ended_by: str) -> None:
    """Servers of others hold a poll for minutes: theirs is no silence while they answer everything else."""
    timeouts = Timeouts(long_poll=0.3, heartbeat_interval=0.02, close=2)
    service = ServiceClient(base_url=stub.url, timeouts=timeouts)
    run = service.create_lora_training_client("stub/base", timeout=10)
    fast_retries(service, lost_budget=1.5, status_budget=1.5)
    stub.hold("optim_step")
    stub.script("retrieve_future", hang() if ended_by == "us" else delay(0.2, status(504)), always=True)
    step = run.optim_step()
    polls = stub.count("retrieve_future")
    stub.wait_for("retrieve_future", polls + 12, timeout=60)  # for far longer than a lost server has
    assert not step.done()
    stub.unscript()
    stub.release()
    step.result(20)
    close(service)


def test_metadata_before_the_result(stub: Stub, run: Any) -> None:
    ready = status(200, body={"status": "complete_metadata", "response_payload_size": 10})
    stub.script("retrieve_future", ready)
    assert run.optim_step().result(20).metrics == {"grad_norm": 1.0}


# -- odd ---------------------------------------------------------------------------------------------------


def test_an_empty_400_is_tried_again(stub: Stub, run: Any) -> None:
    """A proxy that lost its backend, not a refusal."""
    stub.script("optim_step", status(400, body=b""), status(400, body=b""))
    run.optim_step().result(20)


@pytest.mark.parametrize(
    ("op", "call"),
    [
        ("get_info", lambda run: run.get_info()),
        ("optim_step", lambda run: run.optim_step().result(20)),
        ("retrieve_future", lambda run: run.optim_step().result(20)),
        ("retrieve_future", lambda run: run.forward([datum()], "cross_entropy").result(20)),
    ],
)
def test_an_answer_that_cannot_be_read_is_a_typed_error(stub: Stub, run: Any, op: str, call: Any) -> None:
    stub.gap_seconds = 0.1  # the submission that got no readable answer was not taken
    stub.script(op, garbage("application/x-protobuf" if op == "retrieve_future" else "application/json"))
    with pytest.raises(APIResponseValidationError, match=f"{op}: the answer cannot be read"):
        call(run)
    run.optim_step().result(20)


def test_a_redirect_within_the_server_keeps_method_body_and_key(stub: Stub, run: Any) -> None:
    stub.script("get_info", status(307, {"location": "/api/v1/get_info"}))
    assert run.get_info().model_id == run.model_id
    first, second = stub.sent("get_info")
    assert (second.method, second.body) == ("POST", first.body)
    assert second.headers["x-api-key"] == first.headers["x-api-key"]


def test_a_redirect_elsewhere_never_sees_the_key(stub: Stub) -> None:
    with Stub() as other:
        service = ServiceClient(base_url=stub.url, api_key="tml-secret")
        stub.script(
            "get_server_capabilities",
            status(302, {"location": f"{other.url}/api/v1/get_server_capabilities"}),
        )
        assert service.get_server_capabilities(timeout=20).supported_models
        (request,) = other.sent("get_server_capabilities")
        assert "x-api-key" not in request.headers
        assert b"tml-secret" not in request.head
        close(service)


def test_endless_redirects_end(stub: Stub, run: Any) -> None:
    stub.script("get_info", status(302, {"location": "/api/v1/get_info"}), always=True)
    with pytest.raises(APIStatusError, match="302 from"):
        run.get_info()
    assert stub.count("get_info") == 6


def test_a_poll_that_is_refused_is_the_documented_class(stub: Stub, run: Any) -> None:
    """401, 403, 404 and 422 were ValueError."""
    kinds = {
        401: AuthenticationError,
        403: PermissionDeniedError,
        404: NotFoundError,
        422: UnprocessableEntityError,
    }
    for code, kind in kinds.items():
        stub.script("retrieve_future", status(code, body={"detail": "because"}))
        with pytest.raises(kind, match="because"):
            run.optim_step().result(20)
    run.optim_step().result(20)


def test_a_persistent_5xx_on_a_poll_is_bounded(stub: Stub, service: ServiceClient, run: Any) -> None:
    fast_retries(service, status_budget=0.3)
    stub.script("retrieve_future", status(500), always=True)
    with pytest.raises(InternalServerError):
        run.optim_step().result(20)


def test_a_deprecation_note_is_logged(stub: Stub, run: Any, caplog: pytest.LogCaptureFixture) -> None:
    body = {"model_id": run.model_id, "model_data": {}}
    note = {"x-deprecation-note": "please update", "x-deprecation-level": "error"}
    stub.script("get_info", status(200, note, body))
    with caplog.at_level(logging.WARNING, "tinkex"):
        run.get_info()
    assert [(r.levelname, "please update" in r.message) for r in caplog.records] == [("ERROR", True)]


# -- how it is said ----------------------------------------------------------------------------------------


def test_headers_of_the_user_and_of_ours(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read once, when the client is made."""
    monkeypatch.setenv("CLOUDFLARE_ACCESS_CLIENT_ID", "cf-id")
    service = ServiceClient(base_url=stub.url, api_key="tml-k", default_headers_overrides={"x-mine": "1"})
    monkeypatch.setenv("CLOUDFLARE_ACCESS_CLIENT_ID", "other")
    service.get_server_capabilities()
    (request,) = stub.sent("get_server_capabilities")
    names = ("x-api-key", "x-mine", "cf-access-client-id", "user-agent")
    assert [request.headers[name].partition("/")[0] for name in names] == ["tml-k", "1", "cf-id", "tinkex"]
    close(service)


def test_bodies_are_compressed_where_the_server_asks_for_it() -> None:
    with Stub(proto_compress_fwdbwd=True) as stub:
        service = ServiceClient(base_url=stub.url)
        run = service.create_lora_training_client("stub/base", timeout=20)
        run.forward_backward([datum(4096)], "cross_entropy").result(20)
        (request,) = stub.sent("forward_backward")
        assert request.headers["content-encoding"] == "zstd"
        assert len(request.body) < 4096 * 8
        close(service)


def test_big_bodies_are_built_and_read_off_the_loop(
    stub: Stub, service: ServiceClient, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By which thread does it; what takes less than a millisecond stays where it is."""
    threads: dict[str, set[str]] = {"encode_request": set(), "decode_result": set()}
    for name in threads:

        def spy(*args: Any, _real: Any = getattr(codec, name), _name: str = name, **more: Any) -> Any:
            threads[_name].add(threading.current_thread().name.partition("_")[0])
            return _real(*args, **more)

        monkeypatch.setattr(codec, name, spy)
    run.forward([datum()] * 128, "cross_entropy").result(20)
    run.forward([datum(100_000)], "cross_entropy").result(20)  # its arrays are not copied into the body
    assert threads == {"encode_request": {"tinkex"}, "decode_result": {"tinkex"}}
    run.forward([datum(2_200)] * 129, "cross_entropy").result(20)
    assert "tinkex-worker" in threads["encode_request"]
    assert "tinkex-worker" in threads["decode_result"]
    threads["encode_request"].clear()
    service.create_sampling_client(base_model="stub/base").sample(
        ModelInput.from_ints(range(50_000)), 1, PARAMS
    ).result(20)
    assert "tinkex-worker" in threads["encode_request"], "a long prompt is written as JSON"


def test_kinds_of_traffic_do_not_wait_for_each_other(stub: Stub, service: ServiceClient, run: Any) -> None:
    """More held polls and stuck submissions than any pool has room for, and a REST call goes through."""
    sampler = service.create_sampling_client(base_model="stub/base", timeout=20)
    stub.hold("asample")
    stub.script("asample", *[delay(2)] * 20)
    stub.script("optim_step", delay(2))
    samples = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(300)]
    step = run.optim_step()
    stub.wait_for("asample", 8)
    assert run.get_info(timeout=1.5).model_id == run.model_id
    assert not step.done()
    for sample in samples:
        sample.cancel()


@pytest.mark.slow
def test_sockets_are_bounded(stub: Stub) -> None:
    """At most 16 sockets for 2,000 samples in flight, with batch retrieval."""
    stub.config = {"sample_use_retrieve_futures": True}
    service = ServiceClient(base_url=stub.url)
    sampler = service.create_sampling_client(base_model="stub/base", timeout=20)
    stub.hold("asample")
    samples = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(2000)]
    stub.wait_for("asample", 2000, timeout=30)
    stub.release()
    for sample in samples:
        sample.result(30)
    assert stub.peak_connections <= 16
    close(service)


@pytest.mark.slow
def test_an_async_method_never_blocks_the_users_loop(stub: Stub, service: ServiceClient) -> None:
    """Session, run, publish and sampler, each with a slow server behind it."""
    for op in (
        "client/config",
        "create_session",
        "create_model",
        "save_weights_for_sampler",
        "create_sampling_session",
    ):
        stub.script(op, delay(1.0))

    async def scenario() -> float:
        worst, going = 0.0, True

        async def tick() -> None:
            nonlocal worst
            while going:
                began = time.perf_counter()
                await asyncio.sleep(0.01)
                worst = max(worst, time.perf_counter() - began)

        ticking = asyncio.create_task(tick())
        run = await service.create_lora_training_client_async("stub/base")
        await (await run.optim_step_async())
        sampler = await run.save_weights_and_get_sampling_client_async()
        await sampler.sample_async(PROMPT, 1, PARAMS)
        other = await service.create_sampling_client_async(base_model="stub/base")
        await other.compute_logprobs_async(PROMPT)
        await run.get_info_async()
        going = False
        await ticking
        return worst

    assert asyncio.run(scenario()) < 0.9, "some call held the loop for as long as the server took"


def test_two_servers_at_once(stub: Stub) -> None:
    """No global state decides where a client's calls go."""
    with Stub() as other:
        services = [
            ServiceClient(base_url=url, api_key=key, timeouts=QUICK)
            for url, key in ((stub.url, "tml-a"), (other.url, "tml-b"))
        ]
        runs = [service.create_lora_training_client("stub/base", timeout=20) for service in services]
        for run in runs:
            run.optim_step().result(20)
        assert {r.headers["x-api-key"] for r in stub.requests} == {"tml-a"}
        assert {r.headers["x-api-key"] for r in other.requests} == {"tml-b"}
        for service in services:
            close(service)
