"""Handling a request takes less than 10 ms of the event loop: the worst bodies of every route."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.server.conftest import MODEL, PROTO, Running, pass_body
from tinkex.engine.fake.trainer import FakeTrainer
from tinkex.server import uvicorn_protocol
from tinkex.server.bodies import zstd
from tinkex.types.base import WireModel
from tinkex.types.tensor import TensorData
from tinkex.wire import ops

MOST = 0.010  # seconds of CPU time between two scheduling points
SIZE = 1_000_000  # bytes of a large body: more than the loop could validate in time
SMALL = 15_000  # what is parsed on the loop
TRIES = 3  # the quickest counts: on a busy machine CPU time grows with cold caches

pytestmark = pytest.mark.slow  # it measures: nothing for a machine that does four other things


class Watch:
    """The CPU time of each callback of a server's event loop."""

    def __init__(self, thread: threading.Thread) -> None:
        self._thread, self.longest, self.what = thread, 0.0, ""

    def measured(self, run: Callable[[asyncio.Handle], None]) -> Callable[[asyncio.Handle], None]:
        def wrapped(handle: asyncio.Handle) -> None:
            if threading.current_thread() is not self._thread:
                return run(handle)
            callback, began = handle._callback, time.thread_time()  # type: ignore[attr-defined]
            run(handle)
            took = time.thread_time() - began
            task = getattr(callback, "__self__", None)
            what = getattr(task, "get_coro", lambda: callback)()
            if took > self.longest:
                self.longest, self.what = took, str(getattr(what, "__qualname__", what))
            return None

        return wrapped


@pytest.fixture
def watch(server: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    made = Watch(server.thread)
    gc.collect()
    gc.freeze()  # what pytest has imported is no part of a server
    monkeypatch.setattr(asyncio.Handle, "_run", made.measured(asyncio.Handle._run))
    yield made
    gc.unfreeze()


def filled(item: Any, size: int) -> list[Any]:
    return [item] * (size // (len(json.dumps(item)) + 2))


def nonsense(request: Any, size: int) -> Iterator[Any]:
    """A body whose fields are all large."""
    names = request.model_fields if issubclass(request, WireModel) else request.__dataclass_fields__
    each = size // (len(names) + 1)
    yield dict.fromkeys([*names, "unknown"], filled("a", each))
    table = {f"k{i}": i for i in range(each // 16)}
    yield dict.fromkeys([*names, "unknown"], table)


def bodies_of(run: str, sampler: str, size: int) -> Iterator[tuple[str, Any]]:
    for op in ops.OPS.values():
        if op.method == "POST" and not op.placeholders:
            yield from ((op.path, body) for body in nonsense(op.request, size))
    session = {"tags": [], "user_metadata": {}, "sdk_version": "1"}
    yield "/api/v1/create_session", {**session, "tags": filled("a", size)}
    yield "/api/v1/create_session", {**session, "tags": filled(1, size)}
    yield "/api/v1/create_session", {**session, "user_metadata": {f"k{i}": "v" for i in range(size // 14)}}
    target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": "c"}
    ids = {"target": target, "retrieved_request_ids": filled("a", size), "timeout": 0.01}
    yield "/api/v1/retrieve_futures", ids
    chunk = {"type": "encoded_text", "tokens": [1]}
    sample = {"sampling_session_id": sampler, "seq_id": 0, "prompt": {"chunks": [chunk]}}
    for path in ("/api/v1/asample", "/api/v1/stream_sample"):
        yield path, {**sample, "prompt": {"chunks": filled(chunk, size)}}
        yield path, {**sample, "prompt": {"chunks": [{**chunk, "tokens": filled(1, size)}]}}
        for stop in ("a", 1, "", -1, None):
            yield path, {**sample, "sampling_params": {"stop": filled(stop, size), "max_tokens": 1}}
    datum = {"model_input": {"chunks": [chunk]}, "loss_fn_inputs": {
        "target_tokens": {"data": [1], "dtype": "int64"}, "weights": {"data": [1.0], "dtype": "float32"}
    }}  # fmt: skip
    for number, data in enumerate(
        (filled(datum, size), filled({}, size), [{**datum, "model_input": {"chunks": filled(chunk, size)}}])
    ):
        work = {"data": data, "loss_fn": "cross_entropy"}
        fields = {"forward_backward_input": work, "model_id": run, "seq_id": 1 + number}
        yield "/api/v1/forward_backward", fields
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    yield "/v1/chat/completions", {**chat, "messages": filled(chat["messages"][0], size)}
    yield "/v1/chat/completions", {**chat, "stop": filled("a", size)}
    yield "/v1/chat/completions", {**chat, "metadata": filled({"a": "b"}, size)}
    for prompt in ("x" * size, filled(300, size), filled("a", size), filled([1], size)):
        yield "/v1/completions", {"model": MODEL, "prompt": prompt, "max_tokens": 1}
    yield "/v1/completions", {"model": "no/model", "prompt": filled(300, size), "max_tokens": 1}


@pytest.mark.parametrize("form", ["small", "large", "packed"])
def test_the_worst_bodies_do_not_hold_the_loop(server: Running, watch: Watch, form: str):
    run, sampler = server.open_run(), server.open_sampler()
    size, slow = SMALL if form == "small" else SIZE, dict[str, float]()
    for path, body in bodies_of(run, sampler, size):
        content, headers = json.dumps(body).encode(), {"content-type": "application/json"}
        if form == "packed":
            content, headers["content-encoding"] = zstd.compress(content, 1), "zstd"
        for _ in range(TRIES):
            watch.longest = 0.0
            answer = server.ask("POST", path, content, headers)
            assert answer.status < 500, (path, answer.body)
            if watch.longest <= MOST:
                break
        else:
            slow[f"{path} {next(iter(body))} {watch.what}"] = watch.longest
    assert slow == {}, "\n".join(f"{what}: {took * 1000:.0f} ms" for what, took in slow.items())


LARGE_OPS = (
    "forward_backward",
    "forward",
    "asample",
    "stream_sample",
    "create_custom_loss",
    "create_session",
)


@pytest.mark.parametrize("path", [*(f"/api/v1/{op}" for op in LARGE_OPS), "/v1/completions"])
def test_json_of_120_megabytes_is_refused_unread(
    server: Running, watch: Watch, path: str, monkeypatch: pytest.MonkeyPatch
):
    """Its parser would hold the GIL, and with it the loop, for a second."""
    monkeypatch.setattr(uvicorn_protocol, "DISCARD_RATE", 1 << 30)  # this client reads after it has sent all
    content, json_type = b'{"a": [' + b"12345," * 20_000_000 + b"1]}", {"content-type": "application/json"}
    answer = server.ask("POST", path, content, json_type)
    assert answer.status == 413, answer.body
    packed = server.ask("POST", path, zstd.compress(content, 1), {**json_type, "content-encoding": "zstd"})
    assert packed.status in (400, 422), packed.body
    assert b"more than" in packed.body or path.startswith("/v1")  # which unpacks nothing
    assert watch.longest < MOST, watch.what


@pytest.fixture
def instant_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine computes nothing: its results are as large as ever."""

    def compute(trainer: FakeTrainer, batch: list[Any]) -> None:
        for training, index in batch:
            size = training.examples[index].tokens.size
            training.outputs[index] = {"logprobs": TensorData.from_numpy(np.zeros(size, np.float32))}

    monkeypatch.setattr(FakeTrainer, "_compute", compute)


# The last ones have 120 MB; those that the engine refuses are too long for it, or too many.
PASSES = [(1, 4000), (1, 40_000), (8_000, 64), (500, 1000), (500, 4000), (1_900, 4000)]


@pytest.mark.parametrize(("tokens", "datums"), PASSES)
def test_passes_do_not_hold_the_loop(
    server: Running, watch: Watch, instant_passes: None, tokens: int, datums: int
):
    run, best, what = server.open_run(), 1.0, ""
    for seq_id in range(1, 1 + TRIES):
        watch.longest = 0.0
        body = pass_body(run, seq_id, tokens, datums)
        answer = server.ask("POST", "/api/v1/forward_backward", body, PROTO)
        assert answer.status == 200, answer.body
        result = server.result(answer.json, accept="application/x-protobuf")
        assert result.status == 200
        assert (b"at most 4096" in result.body) == (datums > 4096)
        assert (len(result.body) > 4 * tokens * datums) == (tokens < 2048 and datums <= 4096)
        time.sleep(0.2)  # what is freed is freed by now
        if watch.longest < best:
            best, what = watch.longest, watch.what
    assert best < MOST, what


def test_metrics_say_how_late_the_loop_was(server: Running):
    assert server.loop is not None
    server.loop.call_soon_threadsafe(time.sleep, 0.25)
    time.sleep(0.5)
    page = server.ask("GET", "/metrics").body.decode()
    longest = re.search(r"^tinkex_loop_longest_stall_seconds (\S+)", page, re.MULTILINE)
    assert longest is not None
    assert float(longest[1]) > 0.1
    assert 'tinkex_loop_stall_seconds_bucket{le="0.01"}' in page
