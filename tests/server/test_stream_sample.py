"""Samples as server-sent events, over a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import KEY, Running
from tests.service.harness import User, serving
from tinkex.engine.protocol import EngineConfig
from tinkex.server import stream_sample
from tinkex.types.data import ModelInput
from tinkex.types.params import SamplingParams
from tinkex.types.sampling import SampleRequest


def body(sampler: str, **more: Any) -> dict[str, Any]:
    return {
        "sampling_session_id": sampler,
        "seq_id": 0,
        "num_samples": 2,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
        "sampling_params": {"max_tokens": 6, "seed": 3, "stop": []},
        **more,
    }


def events(raw: bytes) -> list[tuple[str, Any]]:
    found = []
    for block in raw.decode().strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith(":"))
        if fields:
            found.append((fields.get("event", ""), json.loads(fields["data"])))
    return found


def test_tokens_come_first_and_then_the_whole(server: Running) -> None:
    answer = server.ask("POST", "/api/v1/stream_sample", body(server.open_sampler()))
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    *tokens, (last, whole) = events(answer.body)
    assert last == "done"
    assert {name for name, _ in tokens} == {"tokens"}
    for index, sequence in enumerate(whole["sequences"]):
        parts = [event for _, event in tokens if event["sequence"] == index]
        assert [token for event in parts for token in event["tokens"]] == sequence["tokens"]
        told = [logprob for event in parts for logprob in event["logprobs"]]
        assert told == pytest.approx(sequence["logprobs"])
        assert len(parts) > 1
    assert len(whole["sample_sequence_ids"]) == 2


def test_the_stream_says_what_asample_says(server: Running) -> None:
    sampler = server.open_sampler()
    whole = events(server.ask("POST", "/api/v1/stream_sample", body(sampler)).body)[-1][1]
    plain = server.result(server.post("asample", **body(sampler, seq_id=1)), accept="application/json").json
    assert [s["tokens"] for s in whole["sequences"]] == [s["tokens"] for s in plain["sequences"]]


def test_what_is_wrong_with_the_request_is_a_status(server: Running) -> None:
    assert server.ask("POST", "/api/v1/stream_sample", body("none")).status == 404
    assert server.ask("POST", "/api/v1/stream_sample", body("none"), key=None).status == 401
    assert server.ask("POST", "/api/v1/stream_sample", b"[]").status == 422
    long = {"max_tokens": 100_000}
    answer = server.ask("POST", "/api/v1/stream_sample", body(server.open_sampler(), sampling_params=long))
    assert answer.status == 400
    assert "exceeds the model's context window" in answer.json["detail"]


def test_a_client_that_leaves_stops_the_work(server: Running) -> None:
    engine = next(iter(server.server.service.models)).engine
    assert engine is not None
    sampler = server.open_sampler()
    connection = server.connect()
    forever = json.dumps(body(sampler, sampling_params={"max_tokens": 2000, "stop": []}))
    connection.request("POST", "/api/v1/stream_sample", forever, KEY)
    response = connection.getresponse()
    assert response.read(20)
    response.close()
    connection.close()
    deadline = time.monotonic() + 10
    while engine.heartbeat().stats["sequences_running"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine.heartbeat().stats["sequences_running"] == 0
    assert server.ask("GET", "/api/v1/healthz").status == 200


def test_one_that_has_to_wait_is_answered_at_once_and_told_why(start: Callable[..., Running]) -> None:
    """The head comes with the acceptance, not with the first token; then why it waits, then tokens."""
    long = EngineConfig("", kind="fake", max_context=1_000_000)
    server = start(samples_in_flight=1, long_poll=0.1, engine=long)
    sampler = server.open_sampler()
    first, second = server.connect(), server.connect()
    forever = json.dumps(body(sampler, num_samples=1, sampling_params={"max_tokens": 900_000, "stop": []}))
    first.request("POST", "/api/v1/stream_sample", forever, KEY)
    running = first.getresponse()
    assert running.read(20)
    second.request("POST", "/api/v1/stream_sample", json.dumps(body(sampler, seq_id=1)), KEY)
    waiting = second.getresponse()
    assert waiting.status == 200
    assert waiting.readline() == b"event: queue\n"
    state = json.loads(waiting.readline().removeprefix(b"data: "))
    assert state["queue_state"] == "paused_capacity"
    assert "wait for room" in state["queue_state_reason"]
    running.close()
    first.close()
    names = [name for name, _ in events(waiting.read())]
    assert names[-1] == "done"
    assert set(names) <= {"queue", "tokens", "done"}
    second.close()


def test_a_server_that_stops_ends_its_streams_and_says_so(start: Callable[..., Running]) -> None:
    server = start(engine=EngineConfig("", kind="fake", max_context=1_000_000))
    forever = {"max_tokens": 900_000, "stop": []}
    connection = server.connect()
    connection.request(
        "POST", "/api/v1/stream_sample", json.dumps(body(server.open_sampler(), sampling_params=forever)), KEY
    )
    response = connection.getresponse()
    assert response.read(20)
    server.stop()
    (name, said) = events(response.read().rpartition(b"}\n\n")[0].rpartition(b"\n\n")[2] + b"}")[0]
    assert name == "error"
    assert said["category"] == "server"
    assert "the server is stopping" in said["error"]
    connection.close()


@pytest.mark.parametrize("path", ["/api/v1/stream_sample", "/api/v1/asample"])
def test_a_sample_that_is_asked_for_when_streams_have_been_ended_is_refused(
    start: Callable[..., Running], path: str
) -> None:
    """Its body was on the way when the server was told to stop: it must not keep the server from ending."""
    server = start(engine=EngineConfig("", kind="fake", max_context=1_000_000))
    request = body(server.open_sampler(), sampling_params={"max_tokens": 900_000, "stop": []})
    content = json.dumps(request).encode()
    connection = server.connect()
    connection.putrequest("POST", path)
    for name, value in {**KEY, "content-length": str(len(content))}.items():
        connection.putheader(name, value)
    connection.endheaders(content[:10])
    loop = server.loop
    assert loop is not None

    async def drained() -> None:
        connections = server.server._uvicorn.server_state.connections
        while all(c.cycle is None or c.cycle.response_complete for c in connections):
            await asyncio.sleep(0.01)  # until the request has begun
        server.server.stop()
        while not server.server.gateway.draining:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # nothing else was under way

    asyncio.run_coroutine_threadsafe(drained(), loop).result(20)
    connection.send(content[10:])
    response = connection.getresponse()
    assert response.status == 503
    assert "stopping" in json.loads(response.read())["detail"]
    connection.close()


@pytest.mark.anyio
async def test_an_answer_that_is_never_sent_stops_the_work_too(tmp_path: Path) -> None:
    """A client may be gone before the first byte: what was accepted for it must not go on for ever."""
    async with serving(tmp_path / "home") as service:
        user = User(service, "ann")
        sampler = await user.sampler(await user.session())
        params = SamplingParams(max_tokens=50, stop=[])
        request = SampleRequest(ModelInput.from_ints([1]), params, 1, sampler)
        events = service.stream(request, user.caller)
        encoded = stream_sample._encoded(events, lambda told: told)
        response = stream_sample.EventStream(encoded, contextlib.aclosing(events))

        async def broken(*_: Any) -> Any:
            raise OSError("nobody is there")

        with contextlib.suppress(Exception):
            await response({"type": "http", "asgi": {"spec_version": "2.4"}}, broken, broken)
        assert events._over
        assert not [event async for event in events]
        for _ in range(200):
            if not service.samplers._running:
                break
            await asyncio.sleep(0.01)
        assert not service.samplers._running


@pytest.mark.anyio
async def test_silence_is_filled_with_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    async def slow():
        yield b"first"
        await asyncio.sleep(0.15)
        yield b"last"

    monkeypatch.setattr(stream_sample, "PING_SECONDS", 0.04)
    response = stream_sample.EventStream(slow(), contextlib.nullcontext())
    chunks = [chunk async for chunk in response.body_iterator]
    assert (chunks[0], chunks[-1]) == (b"first", b"last")
    assert chunks.count(b": still here\n\n") >= 2


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
