"""A server that floods, lies or echoes: memory stays bounded, errors are ours, and the key stays here."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import pickle
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.client.conftest import PARAMS, PROMPT, QUICK, close, datum, fast_retries
from tests.client.raw_server import Handler, answering, serving
from tests.stub import Stub, fail, status
from tinkex import APIResponseValidationError, ServiceClient, TinkerError
from tinkex.client import download, http1, http_call, http_pools
from tinkex.client.http1 import HttpRequest, RefusedResponseError
from tinkex.client.http_pools import LibraryClient

KEY = "tml-a-key-of-somebody-0123456789"
LIMIT = 1 << 20


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (http1, http_pools):
        monkeypatch.setattr(module, "MAX_BODY", LIMIT)


# -- how much ----------------------------------------------------------------------------------------------


def forever(head: bytes, piece: bytes) -> Handler:
    async def answer(_: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        while not writer.is_closing():
            writer.write(piece)
            await writer.drain()

    return answer


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
ENDLESS = {
    "chunks": forever(CHUNKED, b"10000\r\n" + bytes(65536) + b"\r\n"),
    "chunks of one byte": forever(CHUNKED, b"1\r\nx\r\n" * 10_000),
    "a body until the end": forever(b"HTTP/1.1 200 OK\r\n\r\n", bytes(65536)),
    "a head": forever(b"HTTP/1.1 200 OK\r\n", b"x-a: b\r\n" * 1000),
    "a header": forever(b"HTTP/1.1 200 OK\r\nx-a: ", b"b" * 65536),
    "continues": forever(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
    "trailers": forever(CHUNKED + b"1\r\nx\r\n0\r\n", b"x-a: b\r\n" * 1000),
    "a trailer": forever(CHUNKED + b"1\r\nx\r\n0\r\nx-a: ", b"b" * 65536),
    "a chunk's extension": forever(CHUNKED + b"1\r\nx\r\n1;", b"b" * 65536),
}


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("kind", ENDLESS)
async def test_what_has_no_end_is_refused_at_the_limit(kind: str) -> None:
    async with serving(ENDLESS[kind]) as (http, url):
        tracemalloc.start()
        try:
            with pytest.raises(ConnectionError):
                await http.execute(HttpRequest("GET", url + "/x", {}))
            assert tracemalloc.get_traced_memory()[1] < 8 * LIMIT
        finally:
            tracemalloc.stop()


@pytest.mark.anyio
@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("kind", ["chunks", "a body until the end"])
async def test_the_library_of_tls_is_held_to_the_same_limit(kind: str) -> None:
    async with serving(ENDLESS[kind]) as (_, url):
        http = LibraryClient(20, 2, 1, streaming=False)
        with pytest.raises(RefusedResponseError, match=str(LIMIT)):
            await http.execute(HttpRequest("GET", url + "/x", {}))
        await http.aclose()


@pytest.mark.anyio
@pytest.mark.usefixtures("small_limits")
async def test_a_body_that_unpacks_to_more_is_refused() -> None:
    packed = gzip.compress(bytes(LIMIT + 1))
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed)
    async with serving(answering(head + packed)) as (http, url):
        with pytest.raises(RefusedResponseError, match="unpacks to more"):
            await http.execute(HttpRequest("GET", url + "/x", {}))


@pytest.mark.anyio
async def test_memory_is_taken_for_what_arrives_and_not_for_what_is_announced() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (1_000 << 20)

    async def answer(_: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head + bytes(100_000))
        await writer.drain()
        await asyncio.sleep(0.2)
        writer.close()

    async with serving(answer) as (http, url):
        tracemalloc.start()
        try:
            with pytest.raises(ConnectionError):
                await http.execute(HttpRequest("GET", url + "/x", {}))
            assert tracemalloc.get_traced_memory()[1] < 32 << 20
        finally:
            tracemalloc.stop()
        more = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (http1.MAX_BODY + 1)
    async with serving(answering(more)) as (http, url):
        with pytest.raises(RefusedResponseError, match=f"at most {http1.MAX_BODY}"):
            await http.execute(HttpRequest("GET", url + "/x", {}))


@pytest.mark.anyio
@pytest.mark.parametrize("size", [100_000, 200_000, 256_000, 1_000_003])
async def test_a_body_that_outgrows_its_place_again_and_again_is_whole(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http1, "TRUSTED", 70_000)
    body = bytes(range(251)) * (size // 251 + 1)
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size
    async with serving(answering(head, body[:size])) as (http, url):
        for _ in range(2):
            assert (await http.execute(HttpRequest("GET", url + "/x", {})))[2] == body[:size]


def test_a_reply_that_is_too_large_is_not_asked_for_again(
    stub: Stub, service: ServiceClient, run: Any, small_limits: None
) -> None:
    stub.script("get_info", status(200, body=b" " * (LIMIT + 1)), always=True)
    with pytest.raises(APIResponseValidationError, match=rf"POST {stub.url}/\S+get_info: the server sent"):
        run.get_info()
    assert stub.count("get_info") == 1


def test_a_stream_that_has_no_end_is_refused(
    stub: Stub, sampler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_call, "MAX_STREAM", LIMIT)
    body = b": still here\n\n" * (LIMIT // 10)
    stub.script("stream_sample", status(200, {"content-type": "text/event-stream"}, body), always=True)
    with pytest.raises(APIResponseValidationError, match=f"more than {LIMIT} bytes"):
        list(sampler.sample_stream(PROMPT, PARAMS))


def test_a_download_leaves_some_of_the_disk_free(
    stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub.script("*", status(200, body=bytes(100_000)), always=True)
    monkeypatch.setattr(download, "_LEAVE_FREE", 1 << 60)
    with pytest.raises(TinkerError, match="stay free"):
        download.download(f"{stub.url}/file", tmp_path / "f")
    assert not list(tmp_path.iterdir())


# -- where to ------------------------------------------------------------------------------------------------

NOWHERE = [
    "file:///etc/passwd",
    "ftp://127.0.0.1/x",
    "gopher://127.0.0.1/x",
    "javascript:alert(1)",
    "data:application/json,{}",
    "http://[::1/x",
    "http://127.0.0.1:99999/x",
    "http://127.0.0.1/a b",
]


@pytest.mark.parametrize("code", [302, 307])
@pytest.mark.parametrize("location", NOWHERE)
def test_a_redirect_to_what_is_no_http_url_is_an_error_of_ours(
    stub: Stub, run: Any, location: str, code: int
) -> None:
    stub.script("get_info", status(code, {"location": location}), always=True)
    with pytest.raises(APIResponseValidationError, match="a redirect to something else than"):
        run.get_info()
    assert stub.count("get_info") == 1


def test_a_redirect_elsewhere_gets_neither_the_key_nor_a_body(stub: Stub) -> None:
    with Stub() as other:
        service = ServiceClient(base_url=stub.url, api_key=KEY, timeouts=QUICK)
        run = service.create_lora_training_client("stub/base", timeout=20)
        for code, to, says in [
            (307, other.url, "with a body to another host"),
            (308, other.url, "with a body to another host"),
            (302, f"{other.url}/?key={KEY}", "send the key to another host"),
        ]:
            stub.script("get_info", status(code, {"location": to}))
            with pytest.raises(APIResponseValidationError, match=says) as caught:
                run.get_info()
            assert KEY not in shown(caught.value)
        assert other.requests == []
        close(service)


@pytest.mark.parametrize("link", ["file:///etc/passwd", "ftp://127.0.0.1/x", "data:,x", "/etc/passwd"])
def test_a_server_cannot_name_a_file_of_this_machine(stub: Stub, service: ServiceClient, link: str) -> None:
    rest = service.create_rest_client()
    path = "tinker://00000000-0000-0000-0000-000000000000:train:0/weights/x"
    for answer in (status(302, {"location": link}), status(200, body={"url": link})):
        stub.script("*archive", answer)
        with pytest.raises(APIResponseValidationError, match="http or https URL"):
            rest.get_checkpoint_archive_url_from_tinker_path(path).result(20)


# -- what is echoed ------------------------------------------------------------------------------------------


def shown(error: BaseException) -> str:
    """Everything of an error that can be printed, sent or stored, its causes and its pickle included."""
    words: list[str] = []
    at: BaseException | None = error
    while at is not None:
        words += [str(at), repr(at), repr(vars(at)), repr(getattr(at, "response", ""))]
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
    copy = pickle.dumps(error)
    pickle.loads(copy)
    return "\n".join(words) + copy.decode("latin-1")


SECRET = "Bearer a-proxy-s-secret"


@pytest.fixture
def known(stub: Stub) -> Iterator[ServiceClient]:
    """A client with a key, and a header of the user's that is one too."""
    client = ServiceClient(
        base_url=stub.url, api_key=KEY, timeouts=QUICK, default_headers_overrides={"authorization": SECRET}
    )
    fast_retries(client, status_budget=0.1)
    yield client
    close(client)


ECHO = {
    "headers": {"x-api-key": KEY, "authorization": SECRET, KEY: [SECRET]},
    "detail": f"no {KEY}, {SECRET}",
}
ESCAPED = (
    b'{"detail": "no \\u0074ml-a-key-of-somebody-0123456789", "\\u0074ml-a-key-of-somebody-0123456789": 1}'
)
ESCAPED_KEY = "".join(f"\\u{ord(c):04X}" for c in KEY)
ECHOES = {
    "a 400": status(400, {"x-echo": KEY, "set-cookie": SECRET}, ECHO),
    "a 500": status(500, {"x-echo": KEY}, ECHO),
    "a 429": status(429, {"x-echo": KEY, "retry-after-ms": "1"}, ECHO),
    "escapes": status(400, {}, ESCAPED),
    "plain text": status(403, {"content-type": "text/plain"}, f"you sent {KEY} {SECRET}".encode()),
    "a reply of another shape": status(200, {"x-echo": KEY}, [ECHO, {KEY: KEY}]),
    "no JSON": status(200, {"x-echo": SECRET}, f"<pre>{KEY} {SECRET}".encode()),
    "an encoding": status(200, {"content-encoding": KEY}, b"x"),
    "a redirect": status(302, {"location": f"{KEY}:{SECRET}"}),
}


@pytest.mark.parametrize("kind", ECHOES)
def test_a_key_that_is_echoed_is_in_no_error(
    stub: Stub, known: ServiceClient, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    run = known.create_lora_training_client("stub/base", timeout=20)
    sampler = known.create_sampling_client(base_model="stub/base", timeout=20)
    calls = {
        "get_info": run.get_info,
        "asample": lambda: sampler.sample(PROMPT, 1, PARAMS).result(20),
        "stream_sample": lambda: list(sampler.sample_stream(PROMPT, PARAMS)),
        "retrieve_future": lambda: run.optim_step().result(20),
        "optim_step": lambda: run.optim_step().result(20),
    }
    if kind == "a 429":  # which samples wait out without a limit
        del calls["asample"], calls["stream_sample"]
    for op, call in calls.items():
        stub.script(op, ECHOES[kind], always=True)
        with pytest.raises(TinkerError) as caught:
            call()
        stub.unscript()
        for secret in (KEY, SECRET):
            assert secret not in shown(caught.value), op
            assert secret not in caplog.text, op


def test_a_key_that_is_echoed_by_a_failed_request_or_a_value_is_redacted(
    stub: Stub, known: ServiceClient, caplog: pytest.LogCaptureFixture
) -> None:
    run = known.create_lora_training_client("stub/base", timeout=20)
    stub.script("forward_backward", fail(f"it said {KEY}"))
    with pytest.raises(TinkerError, match=r"it said \[redacted\]") as caught:
        run.forward_backward([datum()], "cross_entropy").result(20)
    assert KEY not in shown(caught.value)
    for spelled in (json.dumps(ESCAPED_KEY), "".join(f"%{ord(c):02x}" for c in KEY), ESCAPED_KEY):
        stub.script("forward_backward", fail(f"it said {spelled}!"))
        with pytest.raises(TinkerError, match=r"it said \W*\[redacted\]") as caught:
            run.forward_backward([datum()], "cross_entropy").result(20)
        assert "somebody" not in shown(caught.value)
    stub.script("get_server_capabilities", status(200, body={"supported_models": [{"model_name": KEY}]}))
    answer = known.get_server_capabilities(timeout=20)
    assert KEY not in repr(answer)
    assert KEY.encode() not in pickle.dumps(answer)
    stub.script(
        "get_server_capabilities",
        status(200, {"x-deprecation-note": f"drop {KEY}"}, {"supported_models": []}),
    )
    known.get_server_capabilities(timeout=20)
    assert "drop [redacted]" in caplog.text
    assert KEY not in caplog.text
