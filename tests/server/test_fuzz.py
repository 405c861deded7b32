"""Whatever is sent to whatever route: an answer below 500, soon, and the server goes on."""

from __future__ import annotations

import gc
import http.client
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.conftest import KEY, MODEL, Running, server_config
from tinkex.wire import ops

pytestmark = pytest.mark.slow

ROUTES = [(op.method, op.path) for op in ops.OPS.values()] + [
    ("POST", "/api/v1/stream_sample"),
    ("GET", "/api/v1/models/{name:path}/tokenizer/{file}"),
    ("GET", "/api/v1/download/{path:path}"),
    ("GET", "/v1/models/{model:path}"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/metrics"),
]
FIELDS = sorted(
    {name for op in ops.OPS.values() for name in getattr(op.request, "model_fields", ())}
    | {"prompt", "sampling_params", "num_samples", "forward_backward_input", "model", "messages", "stop", "n"}
)

segments = st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="?#%"), max_size=12)
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**64), 2**64), st.floats(), st.text(max_size=8),
    st.sampled_from([MODEL, "tinker://x:train:0/sampler_weights/y", "weights/x", "\x00", "😀", "\ud800"]),
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
near = st.one_of(  # what might be right
    st.integers(-2, 600), st.floats(-0.5, 2), st.lists(st.integers(-1, 600), max_size=3), st.just("a"),
    st.dictionaries(st.sampled_from(FIELDS), st.integers(0, 9), max_size=2),
)  # fmt: skip
SEQ_IDS = itertools.count(1)
objects = st.dictionaries(st.sampled_from(FIELDS), values, max_size=8)
bodies = st.one_of(st.binary(max_size=60), objects.map(lambda fields: json.dumps(fields).encode()))
headers = st.fixed_dictionaries(
    {},
    optional={
        "content-type": st.sampled_from(["application/json", "application/x-protobuf", "text/plain", ""]),
        "content-encoding": st.sampled_from(["zstd", "gzip", "identity", "br"]),
        "accept": st.sampled_from(["application/x-protobuf", "application/json", "*/*", ""]),
        "accept-encoding": st.sampled_from(["gzip", "zstd, gzip;q=0", ";;,q=", "*"]),
        "x-request-id": st.text("ab \t", max_size=4).map(str.strip),
        "x-tinker-weights-access-token": st.just("t"),
    },
)


def fill(path: str, values: list[str]) -> str:
    for value in values:
        start, end = path.find("{"), path.find("}")
        if start < 0:
            break
        path = path[:start] + (value or "x") + path[end + 1 :]
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path) -> Iterator[Running]:
    running = Running(
        server_config(tmp_path_factory.mktemp("home"), str(tokenizer_dir), long_poll=0.02, gap_patience=0.02)
    )
    yield running
    running.stop()


@pytest.fixture(scope="module")
def connection(server: Running) -> Iterator[http.client.HTTPConnection]:
    connection = server.connect(timeout=15)
    yield connection
    connection.close()


def send(connection: http.client.HTTPConnection, *request: Any) -> int:
    connection.request(*request)
    response = connection.getresponse()
    response.read()
    return response.status


@given(
    st.sampled_from(ROUTES), st.lists(segments, min_size=2, max_size=2), st.text(max_size=10), bodies, headers
)
@settings(
    max_examples=1000, deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
def test_no_request_breaks_the_server(
    server: Running, connection: http.client.HTTPConnection, route: tuple[str, str], parts: list[str],
    query: str, body: bytes, more: dict[str, str],
) -> None:  # fmt: skip
    method, path = route
    target = fill(path, parts)
    if query:
        target += f"?{quote(query)}=1&limit={quote(query)}"
    status = send(connection, method, target, body if method in ("POST", "PUT") else None, {**KEY, **more})
    assert 200 <= status < 500, (status, method, target, body)


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_protobuf_breaks_the_server(
    server: Running, connection: http.client.HTTPConnection, body: bytes
) -> None:
    headers = {**KEY, "content-type": "application/x-protobuf"}
    assert 200 <= send(connection, "POST", "/api/v1/forward_backward", body, headers) < 500


# -- almost right ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def almost(server: Running) -> list[tuple[str, str, dict[str, Any]]]:
    """Requests that are right, each to be spoilt in one place."""
    run, sampler = server.open_run(), server.open_sampler()
    session, params = run.partition(":")[0], {"max_tokens": 2, "temperature": 1.0, "top_p": 0.9, "stop": [3]}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    tensor = {"data": [1, 2], "dtype": "int64", "shape": [2]}
    datum = {"model_input": prompt, "loss_fn_inputs": {"target_tokens": tensor}}
    work = {"data": [datum], "loss_fn": "cross_entropy", "loss_fn_config": {"x": 1.0}}
    at = {"model_id": run, "seq_id": 10**6}
    v1, chat = "/api/v1", [{"role": "user", "content": "x"}]
    checkpoint = f"{v1}/training_runs/{run}/checkpoints/weights/w"
    return [
        ("POST", f"{v1}/create_session", {"tags": [], "user_metadata": {}, "sdk_version": "x"}),
        ("POST", f"{v1}/session_heartbeat", {"session_id": session}),
        ("POST", f"{v1}/sessions/search", {"user_metadata": {}, "owner": {"type": "own"}, "limit": 5}),
        ("PUT", f"{v1}/sessions/{session}/project", {"project_id": "p"}),
        ("POST", f"{v1}/create_model",
         {"session_id": session, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 4}}),
        ("POST", f"{v1}/forward_backward", {**at, "forward_backward_input": work}),
        ("POST", f"{v1}/forward", {**at, "forward_input": work}),
        ("POST", f"{v1}/optim_step", {**at, "adam_params": {"learning_rate": 0.1, "eps": 1e-8}}),
        ("POST", f"{v1}/save_weights", {**at, "path": "w", "ttl_seconds": 7200, "user_metadata": {"a": "b"}}),
        ("POST", f"{v1}/save_weights_for_sampler", {**at, "sampling_session_seq_id": 4}),
        ("POST", f"{v1}/load_weights", {**at, "path": f"tinker://{run}/weights/w", "optimizer": True}),
        ("POST", f"{v1}/weights_info", {"tinker_path": f"tinker://{run}/weights/w"}),
        ("POST", f"{v1}/copy_weights", {"source_path": f"tinker://{run}/weights/w", "session_id": session}),
        ("POST", f"{v1}/import_weights", {"upload_id": "0123456789abcdef", "base_model": MODEL, "name": "n"}),
        ("PUT", f"{checkpoint}/ttl", {"ttl_seconds": 7200}),
        ("POST", f"{v1}/create_sampling_session",
         {"session_id": session, "sampling_session_seq_id": 1, "base_model": MODEL}),
        ("POST", f"{v1}/asample",
         {"sampling_session_id": sampler, "seq_id": 10**6, "num_samples": 1, "prompt": prompt,
          "sampling_params": params, "topk_prompt_logprobs": 1, "prompt_logprobs": True,
          "target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [1, 1]}}),
        ("POST", f"{v1}/stream_sample",
         {"sampling_session_id": sampler, "num_samples": 1, "prompt": prompt, "sampling_params": params}),
        ("POST", f"{v1}/retrieve_futures",
         {"target": {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": 0},
          "prev_cursor": 0, "retrieved_request_ids": ["x"]}),
        ("POST", f"{v1}/create_custom_loss",
         {"session_id": session, "custom_loss_seq_id": 0, "name": "l",
          "inputs": [{"name": "logprobs", "rank": 1}], "graph": {"format": 1, "nodes": []}}),
        ("POST", f"{v1}/telemetry", {"events": [], "platform": "L", "sdk_version": "x", "session_id": "s"}),
        ("POST", "/v1/completions", {"model": MODEL, "prompt": "x", "max_tokens": 2, "stop": ["a"]}),
        ("POST", "/v1/chat/completions", {"model": MODEL, "messages": chat, "max_tokens": 2, "top_p": 0.5}),
    ]  # fmt: skip


def spoil(value: Any, data: st.DataObject) -> Any:
    """`value` with something else in one place."""
    if isinstance(value, dict) and value and data.draw(st.booleans()):
        key = data.draw(st.sampled_from(sorted(value)))
        return {**value, key: spoil(value[key], data)}
    if isinstance(value, list) and value and data.draw(st.booleans()):
        return [spoil(value[0], data), *value[1:]]
    return data.draw(values | near)


@given(st.data())
@settings(
    max_examples=1000, deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
def test_no_spoilt_request_breaks_the_server(
    almost: list[tuple[str, str, dict[str, Any]]], connection: http.client.HTTPConnection, data: st.DataObject
) -> None:
    method, path, fields = data.draw(st.sampled_from(almost))
    if "seq_id" in fields:
        fields = {**fields, "seq_id": next(SEQ_IDS)}
    key = data.draw(st.sampled_from(sorted(fields)))
    body = json.dumps({**fields, key: spoil(fields[key], data)}).encode()
    status = send(connection, method, path, body, KEY)
    assert 200 <= status < 500, (status, path, body)


BAD = [(b"{", {}), (b"[]", {}), (b'{"a": "' + b"x" * 10_000, {"content-encoding": "gzip"}), (b"{}", {})]


def test_what_is_refused_leaves_nothing_behind(
    server: Running, connection: http.client.HTTPConnection
) -> None:
    """The server is in this process: whatever it kept of these requests would be counted here."""

    def refuse_all() -> int:
        for (method, path), (body, more) in itertools.product(ROUTES, BAD):
            target = fill(path, ["no", "such"])
            send(connection, method, target, body if method in ("POST", "PUT") else None, {**KEY, **more})
        server.server.service.expire_results(time.monotonic() + 1e6)
        gc.collect()
        return len(gc.get_objects())

    refuse_all()
    before = refuse_all()
    after = [refuse_all() for _ in range(5)][-1]
    requests = 5 * len(ROUTES) * len(BAD)
    assert after - before < requests / 4  # one object for each would be four times that


def test_the_server_is_well_after_all_this(server: Running) -> None:
    assert server.ask("GET", "/api/v1/healthz").status == 200
    promise = server.post(
        "asample",
        sampling_session_id=server.open_sampler(),
        prompt={"chunks": [{"tokens": [1]}]},
        sampling_params={"max_tokens": 2},
        seq_id=0,
    )
    assert server.result(promise, accept="application/json").json["sequences"]
