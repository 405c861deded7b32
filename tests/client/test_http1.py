"""HTTP/1.1 over plain TCP: every framing of a response, cut at every byte, whole and streamed."""

from __future__ import annotations

import asyncio
import gzip
import random

import pytest

from tests.client.raw_server import FRAMED, Handler, answering, serving
from tinkex.client.http1 import Http1Client, HttpRequest, HttpStream

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.slow
@pytest.mark.parametrize("kind", FRAMED)
async def test_an_answer_cut_at_any_byte_is_the_same_answer(kind: str) -> None:
    raw, body = FRAMED[kind]
    for cut in range(1, len(raw)):
        async with serving(answering(raw[:cut], raw[cut:])) as (http, url):
            status, headers, got, _ = await http.execute(HttpRequest("POST", url + "/x", {}, b"ask"))
            assert (status, got) == (int(raw.split(b"HTTP/1.1 ")[-1][:3]), body)
            assert headers.get("x-a") == ("b" if kind == "length" else None)


async def test_a_body_without_a_length_ends_with_its_connection() -> None:
    async def answer(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nto the ")
        await writer.drain()
        writer.write(b"end")
        writer.close()

    async with serving(answer) as (http, url):
        for _ in range(2):
            assert (await http.execute(HttpRequest("GET", url + "/x", {})))[2] == b"to the end"


async def test_a_packed_answer_is_unpacked() -> None:
    packed = gzip.compress(b"hello" * 100)
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed)
    async with serving(answering(head + packed)) as (http, url):
        _, headers, body, _ = await http.execute(HttpRequest("GET", url + "/x", {}))
    assert body == b"hello" * 100
    assert "content-encoding" not in headers


LONG = bytes(range(256)) * 1024  # more than is read at once


@pytest.mark.parametrize("first", [0, 1, 5_000, 100_000, len(LONG) - 1, len(LONG)])
async def test_a_long_body_is_whole_however_it_comes(first: int) -> None:
    """And it stays what it was, whatever is read after it."""
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(LONG)
    async with serving(answering(head + LONG[:first], LONG[first:])) as (http, url):
        bodies = [(await http.execute(HttpRequest("GET", url + "/x", {})))[2] for _ in range(2)]
    async with serving(answering(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")) as (http, url):
        assert (await http.execute(HttpRequest("GET", url + "/x", {})))[2] == b"ok"
    assert bodies == [LONG, LONG]


async def test_a_short_answer_after_a_long_one_on_the_same_connection() -> None:
    async def answer(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = LONG if b"/long" in head else b"short"
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    async with serving(answer) as (http, url):
        for path, body in [("/long", LONG), ("/short", b"short")] * 2:
            assert (await http.execute(HttpRequest("GET", url + path, {})))[2] == body


async def test_a_long_packed_answer_is_unpacked() -> None:
    packed = gzip.compress(random.Random(0).randbytes(300_000))
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed)
    async with serving(answering(head, packed)) as (http, url):
        assert (await http.execute(HttpRequest("GET", url + "/x", {})))[2] == gzip.decompress(packed)


async def test_pieces_arrive_as_one_body_and_the_connection_is_used_again() -> None:
    seen: list[tuple[bytes, bytes]] = []
    ports = set()

    async def answer(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ports.add(writer.get_extra_info("peername"))
        seen.append((head, await reader.readexactly(9)))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    async with serving(answer) as (http, url):
        for _ in range(3):
            await http.execute(
                HttpRequest("POST", url + "/a?b=c", {"x-k": "v"}, [b"abc", memoryview(b"def"), b"ghi"])
            )
    assert [body for _, body in seen] == [b"abcdefghi"] * 3
    assert seen[0][0].startswith(b"POST /a?b=c HTTP/1.1\r\nhost: 127.0.0.1")
    assert b"\r\ncontent-length: 9\r\n" in seen[0][0]
    assert len(ports) == 1


async def test_a_connection_closed_while_idle_is_replaced_without_an_error() -> None:
    async def answer(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await writer.drain()
        writer.close()  # without saying so beforehand

    async with serving(answer) as (http, url):
        for _ in range(5):
            assert (await http.execute(HttpRequest("GET", url + "/x", {})))[0] == 200


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nContent-Length: 900000\r\n\r\n" + bytes(200_000),
        b"HTTP/1.1 200 OK\r\nContent-Length: 900000000000000000000\r\n\r\nnobody believes it",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\ntoo long",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc",
    ],
)
async def test_what_is_no_answer_is_a_connection_error(raw: bytes) -> None:
    async def answer(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(raw)
        await writer.drain()
        writer.close()

    async with serving(answer) as (http, url):
        with pytest.raises(ConnectionError):
            await http.execute(HttpRequest("GET", url + "/x", {}))


async def test_silence_is_a_timeout_and_a_header_cannot_hide_another() -> None:
    async with serving(answering()) as (_, url):
        http = Http1Client(url, timeout=0.1, connect_timeout=1, keep=1)
        with pytest.raises(TimeoutError):
            await http.execute(HttpRequest("GET", url + "/x", {}))
        with pytest.raises(ConnectionError, match="line break"):
            await http.execute(HttpRequest("GET", url + "/x", {"x-a": "b\r\nx-api-key: stolen"}))


async def test_a_cancelled_request_does_not_give_its_answer_to_the_next() -> None:
    go = asyncio.Event()

    async def answer(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if b"/slow" in head:
            await go.wait()
        body = head.split(b" ")[1]
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    async with serving(answer) as (http, url):
        slow = asyncio.create_task(http.execute(HttpRequest("GET", url + "/slow", {})))
        await asyncio.sleep(0.05)
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow
        go.set()
        assert (await http.execute(HttpRequest("GET", url + "/fast", {})))[2] == b"/fast"


@pytest.mark.slow
async def test_a_way_that_fell_silent_is_left_with_all_its_connections() -> None:
    """A VPN that was built up anew, a laptop that slept: what was open stays open, and nothing comes."""
    silent: set[asyncio.StreamWriter] = set()
    known: set[asyncio.StreamWriter] = set()

    async def answer(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        known.add(writer)
        await asyncio.sleep(0.05)  # so that those who ask at once have a connection each
        if writer not in silent:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    async with serving(answer) as (_, url):
        http = Http1Client(url, timeout=2, connect_timeout=4, keep=4)
        await asyncio.gather(*(http.execute(HttpRequest("GET", url + "/x", {})) for _ in range(4)))
        assert len(known) == 4
        silent |= known
        with pytest.raises(TimeoutError):
            await http.execute(HttpRequest("GET", url + "/x", {}))
        assert (await http.execute(HttpRequest("GET", url + "/x", {})))[0] == 200
        await http.aclose()


@pytest.mark.parametrize("end", ["timeout", "cancel"])
async def test_a_request_given_up_half_way_is_not_sent_to_its_end(end: str) -> None:
    got = asyncio.get_running_loop().create_future()
    go = asyncio.Event()

    async def slow(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await go.wait()
        size = 0
        while piece := await reader.read(1 << 20):
            size += len(piece)
        got.set_result(size)

    async with serving(slow) as (_, url):
        http = Http1Client(url, timeout=0.3 if end == "timeout" else 20, connect_timeout=2, keep=4)
        sending = asyncio.create_task(http.execute(HttpRequest("POST", url + "/x", {}, bytes(50_000_000))))
        if end == "cancel":
            await asyncio.sleep(0.3)
            sending.cancel()
        with pytest.raises((TimeoutError, asyncio.CancelledError)):
            await sending
        go.set()
        assert await asyncio.wait_for(got, 20) < 50_000_000


# -- streams -----------------------------------------------------------------------------------------------


def opened(url: str, silence: float = 5.0, body: bytes | None = b"{}") -> asyncio.Future[HttpStream]:
    http = Http1Client(url, timeout=silence, connect_timeout=2, keep=1)
    return asyncio.ensure_future(http.stream(HttpRequest("POST", f"{url}/x?y=1", {"x-a": "b"}, body)))


async def whole(stream: HttpStream) -> bytes:
    try:
        return b"".join([piece async for piece in stream.pieces])
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
        assert await anext(stream.pieces) == b"one"
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
        assert await anext(stream.pieces) == b"x"
        await stream.aclose()
        await asyncio.wait_for(gone.wait(), 2)


async def test_a_host_that_is_not_there() -> None:
    async with serving(answering(b"")) as (_, url):
        pass
    with pytest.raises(OSError):
        await opened(url)
