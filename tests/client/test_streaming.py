"""sample_stream: over a server and embedded, on a real engine; and over servers that misbehave."""

from __future__ import annotations

import asyncio
import gc
import json
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.client.conftest import PARAMS, PROMPT, close, eventually, fast_retries
from tests.client.events import DONE, TOKENS, events
from tests.engine.tiny import tiny_model
from tests.server.conftest import Running
from tests.stub import Stub, drop, hang, status
from tinkex import (
    APIResponseValidationError,
    BadRequestError,
    ClientClosedError,
    ExpiredError,
    InternalServerError,
    InvalidInputError,
    NewTokens,
    NotFoundError,
    RequestErrorCategory,
    RequestFailedError,
    ResultTimeoutError,
    RetryConfig,
    SamplingParams,
    ServiceClient,
    StreamBrokenError,
    StreamingUnsupportedError,
    Timeouts,
)
from tinkex.client import loop as background
from tinkex.client.server_connection import ServerConnection
from tinkex.engine.protocol import EngineConfig
from tinkex.local import LocalTransport
from tinkex.server.serve import ServerConfig
from tinkex.service.config import ServiceConfig
from tinkex.service.service import Service

pytestmark = pytest.mark.slow

MODEL = "m/tiny"
SEEDED = SamplingParams(max_tokens=12, seed=5, temperature=1.0, stop=[])
FOREVER = SamplingParams(max_tokens=2000, stop=[])


class Place:
    """A service on a tiny model, with the way to it and a look at its engine."""

    def __init__(self, service: Service, connect: Callable[[], ServiceClient]) -> None:
        self.service, self.connect = service, connect
        self.sampler = connect().create_sampling_client(base_model=MODEL, timeout=30)

    def used(self, what: str) -> float:
        (model,) = self.service.models
        return 0 if model.engine is None else model.engine.heartbeat().stats[what]


@pytest.fixture(scope="module", params=["served", "embedded"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    home: Path = tmp_path_factory.mktemp("stream")
    model = tiny_model(home, "llama3", max_position_embeddings=4096)
    engine = EngineConfig(str(model), device="cpu", kv_bytes=4 << 20, threads=1)
    config = ServiceConfig(home / "home", models={MODEL: str(model)}, engine=engine, preload=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        if request.param == "served":
            running = Running(ServerConfig(config, port=0, drain_seconds=0.1))
            yield Place(running.server.service, lambda: ServiceClient(base_url=running.url))
            running.stop()
        else:
            service = Service(config)
            transport = LocalTransport(service)
            patch.setattr("tinkex.local.connection", lambda settings: ServerConnection(transport, settings))
            yield Place(service, ServiceClient)
            asyncio.run_coroutine_threadsafe(service.stop(), background.get_loop()).result(20)


# -- what comes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_samples", [1, 3])
def test_a_seeded_stream_is_the_seeded_sample(place: Place, num_samples: int) -> None:
    """Token for token, logprob for logprob; and its result is the same object as sample() gives."""
    whole = place.sampler.sample(PROMPT, num_samples, SEEDED, topk_sample_logprobs=2).result(30)
    stream = place.sampler.sample_stream(PROMPT, SEEDED, num_samples, topk_sample_logprobs=2)
    pieces = list(stream)
    response = stream.result(20)
    assert len(pieces) > num_samples, "it came in pieces"
    for index, (sequence, other) in enumerate(zip(whole.sequences, response.sequences, strict=True)):
        mine = [piece for piece in pieces if piece.sequence == index]
        assert [token for piece in mine for token in piece.tokens] == sequence.tokens == other.tokens
        assert [value for piece in mine for value in piece.logprobs] == sequence.logprobs == other.logprobs
        assert sequence.topk_logprobs == other.topk_logprobs
        assert sequence.stop_reason == other.stop_reason
        assert other.sequence_id
    assert [(new.sequence, new.tokens) for new in stream.received] == [
        (index, sequence.tokens) for index, sequence in enumerate(whole.sequences)
    ]


def test_tokens_come_before_the_end(place: Place) -> None:
    with place.sampler.sample_stream(PROMPT, FOREVER) as stream:
        first = next(stream)
        assert isinstance(first, NewTokens)
        assert len(first.tokens) == len(first.logprobs) >= 1
        with pytest.raises(ResultTimeoutError):
            stream.result(0.01)


def test_async_for(place: Place) -> None:
    async def scenario() -> tuple[list[int], list[int]]:
        tokens = []
        async with place.sampler.sample_stream(PROMPT, SEEDED) as stream:
            async for new in stream:
                tokens += new.tokens
            return tokens, (await stream.result_async(5)).sequences[0].tokens

    tokens, whole = asyncio.run(scenario())
    assert tokens == whole
    assert len(tokens) == 12


def test_the_result_needs_no_iteration(place: Place) -> None:
    stream = place.sampler.sample_stream(PROMPT, SEEDED, include_prompt_logprobs=True)
    response = stream.result(30)
    assert len(response.prompt_logprobs or []) == PROMPT.length
    assert len(list(stream)) > 1, "what came meanwhile is still there"
    assert list(stream) == [], "once"


def test_many_streams_at_once_are_each_their_own(place: Place) -> None:
    params = [replace(SEEDED, seed=seed) for seed in range(12)]
    whole = [place.sampler.sample(PROMPT, 1, each) for each in params]
    streams = [place.sampler.sample_stream(PROMPT, each) for each in params]
    for stream, sample in zip(streams, whole, strict=True):
        tokens = [token for new in stream for token in new.tokens]
        assert tokens == sample.result(30).sequences[0].tokens


# -- leaving -----------------------------------------------------------------------------------------------


def _leave_by_close(place: Place) -> None:
    stream = place.sampler.sample_stream(PROMPT, FOREVER)
    next(stream)
    eventually(lambda: place.used("kv_pages_used") > 0)
    stream.close()
    stream.close()
    for _ in stream:  # what had come, and then no more
        pass


def _leave_by_break(place: Place) -> None:
    for _ in place.sampler.sample_stream(PROMPT, FOREVER):
        eventually(lambda: place.used("kv_pages_used") > 0)
        break


def _leave_by_collection(place: Place) -> None:
    stream = place.sampler.sample_stream(PROMPT, FOREVER)
    next(stream)
    del stream
    gc.collect()


def _leave_by_error(place: Place) -> None:
    def fail() -> None:
        with place.sampler.sample_stream(PROMPT, FOREVER) as stream:
            next(stream)
            1 / 0

    with pytest.raises(ZeroDivisionError):
        fail()


def _leave_by_aclose(place: Place) -> None:
    async def scenario() -> None:
        stream = place.sampler.sample_stream(PROMPT, FOREVER)
        await anext(stream)
        await stream.aclose()

    asyncio.run(scenario())


def _leave_by_cancelled_task(place: Place) -> None:
    async def scenario() -> None:
        began = asyncio.Event()

        async def read() -> None:
            async with place.sampler.sample_stream(PROMPT, FOREVER) as stream:
                async for _ in stream:
                    began.set()

        task = asyncio.create_task(read())
        await began.wait()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    asyncio.run(scenario())


def _leave_before_the_first_token(place: Place) -> None:
    place.sampler.sample_stream(PROMPT, FOREVER, 4).close()


@pytest.mark.parametrize(
    "leave",
    [
        _leave_by_close, _leave_by_break, _leave_by_collection, _leave_by_error, _leave_by_aclose,
        _leave_by_cancelled_task, _leave_before_the_first_token,
    ],
)  # fmt: skip
def test_leaving_half_way_frees_what_it_held(place: Place, leave: Callable[[Place], None]) -> None:
    """Long before the 2000 tokens are drawn, nothing of it is left on the engine."""
    leave(place)
    eventually(lambda: place.used("sequences_running") == place.used("sequences_waiting") == 0)
    eventually(lambda: place.used("kv_pages_used") <= 1)  # the prefix cache's, and can be taken
    assert len(place.sampler.sample(PROMPT, 1, SEEDED).result(30).sequences) == 1


def test_a_timeout_limits_each_wait_and_cancels_nothing(place: Place) -> None:
    stream = place.sampler.sample_stream(PROMPT, replace(SEEDED, max_tokens=400), timeout=1e-6)
    pieces, waits = [], 0
    while True:
        try:
            pieces.append(next(stream))
        except ResultTimeoutError:
            waits += 1
        except StopIteration:
            break
    assert waits > 0
    assert [t for piece in pieces for t in piece.tokens] == stream.result(0).sequences[0].tokens


def test_an_await_that_is_cancelled_loses_no_tokens(place: Place) -> None:
    async def scenario() -> None:
        stream = place.sampler.sample_stream(PROMPT, replace(SEEDED, max_tokens=300))
        pieces = []
        while True:
            try:
                pieces.append(await asyncio.wait_for(anext(stream), 0.001))
            except TimeoutError:
                continue
            except StopAsyncIteration:
                break
        tokens = [t for piece in pieces for t in piece.tokens]
        assert tokens == (await stream.result_async(1)).sequences[0].tokens

    asyncio.run(scenario())


# -- errors ------------------------------------------------------------------------------------------------


def test_what_is_wrong_is_the_error_that_sample_gives(place: Place) -> None:
    with pytest.raises(InvalidInputError, match="num_samples"):
        place.sampler.sample_stream(PROMPT, PARAMS, 0)
    with pytest.raises(InvalidInputError, match="timeout"):
        place.sampler.sample_stream(PROMPT, PARAMS, timeout="soon")  # type: ignore[arg-type]
    too_long = SamplingParams(max_tokens=100_000)
    for call in (
        lambda: place.sampler.sample(PROMPT, 1, too_long).result(30),
        lambda: place.sampler.sample_stream(PROMPT, too_long).result(30),
        lambda: list(place.sampler.sample_stream(PROMPT, too_long)),
    ):
        with pytest.raises(BadRequestError, match="exceeds the model's context window"):
            call()


def test_closing_the_client_ends_its_streams(place: Place) -> None:
    service = place.connect()
    sampler = service.create_sampling_client(base_model=MODEL, timeout=30)
    stream = sampler.sample_stream(PROMPT, FOREVER)
    next(stream)
    service.close().result(20)
    if service._connection.base_url:  # an embedded service outlives its clients, and so does its work
        with pytest.raises(ClientClosedError):
            for _ in stream:
                pass
    stream.close()
    with pytest.raises(ClientClosedError):
        sampler.sample_stream(PROMPT, PARAMS)


# -- servers that misbehave --------------------------------------------------------------------------------


def test_a_server_without_streams_is_a_typed_error_that_names_sample(stub: Stub, sampler: Any) -> None:
    """What is not there is not promised; and a 404 about the sampler is another thing."""
    for code in (404, 405):
        stub.script("stream_sample", status(code))
        with pytest.raises(StreamingUnsupportedError, match=r"use sample\(\) instead") as caught:
            sampler.sample_stream(PROMPT, PARAMS).result(20)
        assert caught.value.status_code == code
    assert stub.count("stream_sample") == 2
    text = f"sampler {sampler._sampling_session_id} does not exist"
    stub.script("stream_sample", status(404, body={"detail": text}))
    with pytest.raises(NotFoundError, match=text):
        sampler.sample_stream(PROMPT, PARAMS).result(20)


def test_what_comes_over_the_wire(stub: Stub, sampler: Any) -> None:
    news = ("news", {"for": "newer clients"})
    queue = ("queue", {"queue_state": "paused_capacity", "queue_state_reason": "full"})
    stub.script("stream_sample", events(news, queue, TOKENS, DONE, raw=b": bye\n\n"))
    stream = sampler.sample_stream(PROMPT, PARAMS)
    (new,) = stream
    assert (new.sequence, new.tokens, new.logprobs) == (0, [7, 8], [-0.5, -1.0])
    (sequence,) = stream.result(20).sequences
    assert (sequence.tokens, sequence.sequence_id) == ([7, 8], "s-0")
    (request,) = stub.sent("stream_sample")
    assert request.headers["accept"] == "text/event-stream"
    assert request.headers["x-api-key"]
    assert "seq_id" not in request.json, "what broke off must not be found again"


def test_the_last_event_needs_no_empty_line_after_it(stub: Stub, sampler: Any) -> None:
    """An unterminated tail is not lost."""
    stub.script("stream_sample", events(raw=f"event: done\ndata: {json.dumps(DONE[1])}".encode()))
    assert sampler.sample_stream(PROMPT, PARAMS).result(20).sequences[0].tokens == [7, 8]


@pytest.mark.parametrize(
    "mishap",
    [drop(), status(503), status(429, {"retry-after-ms": "20"}), events(), events(raw=b": ping\n\n")],
    ids=["drop", "503", "429", "nothing", "pings"],
)
def test_before_the_first_token_it_is_tried_again(stub: Stub, sampler: Any, mishap: Any) -> None:
    """By the one policy."""
    stub.script("stream_sample", mishap, mishap, events(TOKENS, DONE))
    assert [new.tokens for new in sampler.sample_stream(PROMPT, PARAMS)] == [[7, 8]]
    assert stub.count("stream_sample") == 3


def test_after_the_first_token_it_is_an_error_with_what_came(stub: Stub, sampler: Any) -> None:
    other = ("tokens", {"sequence": 1, "tokens": [1], "logprobs": [-2.0]})
    more = ("tokens", {"sequence": 0, "tokens": [9], "logprobs": [-0.25]})
    stub.script("stream_sample", events(TOKENS, other, more), events(TOKENS, DONE))
    stream = sampler.sample_stream(PROMPT, PARAMS, 2)
    assert [next(stream).tokens for _ in range(3)] == [[7, 8], [1], [9]], "what came is given before"
    with pytest.raises(StreamBrokenError, match="ended without its result") as caught:
        next(stream)
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert [(new.sequence, new.tokens, new.logprobs) for new in error.received] == [
            (0, [7, 8, 9], [-0.5, -1.0, -0.25]),
            (1, [1], [-2.0]),
        ]
    with pytest.raises(StreamBrokenError):
        stream.result(0)
    assert stub.count("stream_sample") == 1


def test_a_sample_that_fails_half_way_says_so_and_has_what_came(stub: Stub, sampler: Any) -> None:
    stub.script("stream_sample", events(TOKENS, ("error", {"error": "out of luck", "category": "server"})))
    with pytest.raises(RequestFailedError, match="out of luck") as caught:
        list(sampler.sample_stream(PROMPT, PARAMS))
    assert caught.value.category is RequestErrorCategory.Server
    assert caught.value.received[0].tokens == [7, 8]


def test_without_retries_it_is_sent_once(stub: Stub, service: ServiceClient) -> None:
    config = RetryConfig(enable_retry_logic=False)
    sampler = service.create_sampling_client(base_model="stub/base", retry_config=config, timeout=20)
    stub.script("stream_sample", status(503), events())
    with pytest.raises(InternalServerError):
        sampler.sample_stream(PROMPT, PARAMS).result(20)
    with pytest.raises(StreamBrokenError):
        sampler.sample_stream(PROMPT, PARAMS).result(20)
    assert stub.count("stream_sample") == 2


def test_a_server_that_wants_no_retries_of_samples_gets_none_of_streams(
    stub: Stub, service: ServiceClient
) -> None:
    stub.config = {"sample_no_retries": True}
    sampler = service.create_sampling_client(base_model="stub/base", timeout=20)
    for mishap, error in [(status(503), InternalServerError), (events(), StreamBrokenError)]:
        stub.script("stream_sample", mishap)
        with pytest.raises(error):
            sampler.sample_stream(PROMPT, PARAMS).result(20)
    stub.script("stream_sample", status(410))
    with pytest.raises(ExpiredError):
        sampler.sample_stream(PROMPT, PARAMS).result(20)
    assert stub.count("stream_sample") == 3
    stub.script("stream_sample", status(429, {"retry-after-ms": "20"}), events(TOKENS, DONE))  # its pace
    assert sampler.sample_stream(PROMPT, PARAMS).result(20).sequences[0].tokens == [7, 8]


def test_a_stream_that_breaks_off_at_once_is_given_up_in_time(
    stub: Stub, service: ServiceClient, sampler: Any
) -> None:
    fast_retries(service, lost_budget=0.3)
    stub.script("stream_sample", events(), always=True)
    with pytest.raises(StreamBrokenError):
        sampler.sample_stream(PROMPT, PARAMS).result(20)


@pytest.mark.parametrize(
    "answer",
    [
        status(200, body={"sequences": []}),
        events(("tokens", {"sequence": 0, "tokens": [1], "logprobs": []})),
        events(("tokens", {"sequence": -1, "tokens": [1], "logprobs": [0.0]})),
        events(("tokens", [1])),
        events(raw=b"event: done\ndata: {nonsense\n\n"),
        events(("done", {"error": "x"})),
        events(("error", DONE[1])),
    ],
)
def test_an_answer_that_cannot_be_read_is_a_typed_error(stub: Stub, sampler: Any, answer: Any) -> None:
    stub.script("stream_sample", answer)
    with pytest.raises(APIResponseValidationError, match="an event cannot be read"):
        sampler.sample_stream(PROMPT, PARAMS).result(20)


def test_silence_is_an_error(stub: Stub) -> None:
    """One that says nothing is tried again; pings are not silence."""
    service = ServiceClient(base_url=stub.url, timeouts=Timeouts(request=0.3))
    fast_retries(service)
    sampler = service.create_sampling_client(base_model="stub/base", timeout=20)
    stub.script("stream_sample", hang(), events(TOKENS, DONE))
    began = time.monotonic()
    assert sampler.sample_stream(PROMPT, PARAMS).result(20)
    assert time.monotonic() - began > 0.25
    close(service)


def test_streams_share_the_samplers_limit(stub: Stub, service: ServiceClient) -> None:
    """`max_connections` counts streams and samples alike."""
    config = RetryConfig(max_connections=2)
    sampler = service.create_sampling_client(base_model="stub/base", retry_config=config, timeout=20)
    stub.script("stream_sample", hang(), hang())
    held = [sampler.sample_stream(PROMPT, PARAMS) for _ in range(2)]
    stub.wait_for("stream_sample", 2)
    sample = sampler.sample(PROMPT, 1, PARAMS)
    time.sleep(0.2)
    assert stub.count("asample") == 0
    held[0].close()
    sample.result(20)


def test_streams_have_connections_of_their_own(stub: Stub, sampler: Any) -> None:
    """More open streams than any other kind of traffic has sockets for, and a sample goes through."""
    stub.script("stream_sample", hang(), always=True)
    held = [sampler.sample_stream(PROMPT, PARAMS) for _ in range(40)]
    stub.wait_for("stream_sample", 40)
    assert sampler.sample(PROMPT, 1, PARAMS).result(20)
    for stream in held:
        stream.close()
    eventually(lambda: stub.connections < 20)


@pytest.mark.parametrize("code", [402, 429])
def test_a_stream_that_is_put_off_puts_off_all_samples_of_the_key(
    stub: Stub, sampler: Any, code: int
) -> None:
    stub.script("stream_sample", status(code, {"retry-after": "0.5"}), events(TOKENS, DONE))
    stream = sampler.sample_stream(PROMPT, PARAMS)
    stub.wait_for("stream_sample")
    time.sleep(0.1)
    sample = sampler.sample(PROMPT, 1, PARAMS)
    assert stream.result(20)
    sample.result(20)
    first = stub.sent("stream_sample")[0].time
    assert min(stub.sent("asample")[0].time, stub.sent("stream_sample")[1].time) - first >= 0.4


def test_the_http_library_streams_too(place: Place) -> None:
    """As over TLS or a proxy: the same tokens, and leaving is noticed."""
    service = place.connect()
    transport: Any = service._connection.transport
    if isinstance(transport, LocalTransport):
        return
    transport._pools.plain = False
    sampler = service.create_sampling_client(base_model=MODEL, timeout=30)
    stream = sampler.sample_stream(PROMPT, SEEDED)
    tokens = [token for new in stream for token in new.tokens]
    assert tokens == place.sampler.sample(PROMPT, 1, SEEDED).result(30).sequences[0].tokens
    with pytest.raises(BadRequestError):
        sampler.sample_stream(PROMPT, SamplingParams(max_tokens=100_000)).result(20)
    with sampler.sample_stream(PROMPT, FOREVER) as stream:
        next(stream)
    eventually(lambda: place.used("sequences_running") == 0)
    close(service)


def test_the_http_library_breaking_off(stub: Stub, service: ServiceClient, sampler: Any) -> None:
    transport: Any = service._connection.transport
    transport._pools.plain = False
    stub.script("stream_sample", drop(), events(), events(TOKENS))
    with pytest.raises(StreamBrokenError) as caught:
        sampler.sample_stream(PROMPT, PARAMS).result(20)
    assert caught.value.received[0].tokens == [7, 8]
    assert stub.count("stream_sample") == 3


FORKED = """
import os, sys, signal, tinkex
service = tinkex.ServiceClient(base_url=sys.argv[1])
sampler = service.create_sampling_client(base_model="stub/base")
stream = sampler.sample_stream(tinkex.ModelInput.from_ints([1]), tinkex.SamplingParams(max_tokens=1))
if os.fork() == 0:
    signal.alarm(10)
    try:
        next(stream)
    except tinkex.ForkedClientError:
        print("said so", flush=True)
    del stream
    os._exit(0)
os.wait()
stream.close()
"""


def test_a_stream_in_a_forked_child_says_so(stub: Stub) -> None:
    """And neither waits for ever nor makes a noise when it is dropped there."""
    stub.script("stream_sample", hang(), always=True)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED, stub.url], capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "said so\n", "")
