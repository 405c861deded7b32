"""Whatever is sent to whatever route: an answer below 500, soon, and the server goes on."""

from __future__ import annotations

import http.client
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.conftest import KEY, MODEL, Running
from tinkex.wire import ops

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
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
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
def connection(server: Running):
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
    max_examples=600, deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip
def test_no_request_breaks_the_server(
    server: Running, connection: http.client.HTTPConnection, route: tuple[str, str], parts: list[str],
    query: str, body: bytes, more: dict[str, str],
) -> None:  # fmt: skip
    method, path = route
    target = fill(path, parts)
    if query:
        from urllib.parse import quote

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
