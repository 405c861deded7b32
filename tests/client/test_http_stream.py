"""Answers read while they are being sent: every framing, cut anywhere, and every way to break off."""

from __future__ import annotations

import asyncio

import pytest

from tests.client.raw_server import FRAMED, Handler, answering, serving
from tinkex.client.http_stream import PlainStream, open_plain

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def opened(url: str, silence: float = 5.0, body: bytes | None = b"{}") -> asyncio.Future[PlainStream]:
    return asyncio.ensure_future(
        open_plain("POST", f"{url}/x?y=1", {"x-a": "b"}, body, silence=silence, connect=2)
    )


async def whole(stream: PlainStream) -> bytes:
    try:
        return b"".join([piece async for piece in stream])
    finally:
        await stream.aclose()


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_every_framing_cut_at_every_byte(framing: str) -> None:
    raw, body = FRAMED[framing]
    for cut in range(1, len(raw), 3):
        async with serving(answering(raw[:cut], raw[cut:])) as (_, url):
            stream = await opened(url)
            assert stream.status == 200
            assert await whole(stream) == body


async def test_a_body_that_ends_with_its_connection() -> None:
    async def answer(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nX-B: c\r\n\r\nhel")
        await writer.drain()
        writer.write(b"lo")
        writer.close()

    async with serving(answer) as (_, url):
        stream = await opened(url)
        assert stream.headers == {"x-b": "c"}
        assert await whole(stream) == b"hello"


async def test_pieces_are_given_as_they_come() -> None:
    """No accumulation."""
    go = asyncio.Event()

    async def answer(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n")
        await writer.drain()
        await go.wait()
        writer.write(b"3\r\ntwo\r\n0\r\n\r\n")

    async with serving(answer) as (_, url):
        stream = await opened(url)
        assert await anext(stream) == b"one"
        go.set()
        assert await whole(stream) == b"two"


async def test_the_request_is_sent_whole() -> None:
    seen: list[bytes] = []

    async def answer(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.extend([head, await reader.readexactly(4)])
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    async with serving(answer) as (_, url):
        assert await whole(await opened(url, body=b"body")) == b""
    lines = seen[0].decode().split("\r\n")
    assert lines[0] == "POST /x?y=1 HTTP/1.1"
    assert {"x-a: b", "content-length: 4", f"host: {url.removeprefix('http://')}"} <= set(lines)
    assert seen[1] == b"body"


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"HTTP/1.1 200", b"SMTP ready\r\n\r\n", b"HTTP/1.1 two OK\r\n\r\n", b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 1\r\n\r\nx",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000,
    ],
)  # fmt: skip
async def test_what_breaks_off_or_is_no_answer_is_an_oserror(raw: bytes) -> None:
    async def answer(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(raw)
        writer.close()

    async with serving(answer) as (_, url):
        with pytest.raises(OSError):
            await whole(await opened(url))


async def test_silence_is_a_timeout_before_and_after_the_head() -> None:
    async def head_only(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n")
        await asyncio.sleep(3)

    async def nothing(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(3)

    handlers: list[Handler] = [head_only, nothing]
    for handler in handlers:
        async with serving(handler) as (_, url):
            with pytest.raises(TimeoutError, match=r"no word for 0\.1 s"):
                await whole(await opened(url, silence=0.1))


async def test_closing_is_noticed_by_the_server_at_once() -> None:
    """So that it stops its work."""
    gone = asyncio.Event()

    async def answer(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(2)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n")
        try:
            await reader.read()
        finally:
            gone.set()

    async with serving(answer) as (_, url):
        stream = await opened(url)
        assert await anext(stream) == b"x"
        await stream.aclose()
        await asyncio.wait_for(gone.wait(), 2)


async def test_a_host_that_is_not_there() -> None:
    async with serving(answering(b"")) as (_, url):
        pass
    with pytest.raises(OSError):
        await opened(url)
