"""The decoder of server-sent events, against a parser of whole texts."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tinkex.client import http_call
from tinkex.client.http_call import ServerSentEvent, SSEDecoder
from tinkex.errors import InvalidInputError

MIXED = (
    b"\xef\xbb\xbf: hello\r\nevent: add\rdata: 1\ndata:2\r\ndata\r\n\r\n"
    b"id: 7\ndata: x\n\r\n"  # LF, then CRLF: two line breaks
    b"retry: 3000\rdata:  two spaces \r\revent: none\n\n"
    b"data: caf\xc3\xa9 \xff\nid\ndata: :\n\nid: a\0b\ndata: t"
)


def whole(raw: bytes) -> tuple[list[ServerSentEvent], ServerSentEvent | None]:
    """The standard's algorithm over a whole text: its events, and that of an unterminated tail."""
    text = raw.decode(errors="replace").removeprefix("\ufeff")
    lines = re.split("\r\n|\r|\n", text)
    last, events = lines.pop(), []
    fields: dict[str, list[str]] = {}

    def dispatch() -> ServerSentEvent | None:
        data, name = fields.pop("data", None), fields.pop("event", [""])[-1]
        return None if data is None else ServerSentEvent("\n".join(data), name or "message")

    for line in [*lines, *([last] if last else [])]:
        if line == "":
            if (event := dispatch()) is not None:
                events.append(event)
            continue
        name, value = re.fullmatch(r"([^:]*)(?:: ?(.*))?", line, re.DOTALL).groups()  # type: ignore[union-attr]
        value = value or ""
        if name in ("data", "event"):
            fields.setdefault(name, []).append(value)
    return events, dispatch()


def decoded(pieces: list[bytes]) -> tuple[list[ServerSentEvent], ServerSentEvent | None]:
    decoder = SSEDecoder()
    events = [event for piece in pieces for event in decoder.feed(piece)]
    return events, next(iter(decoder.feed(b"\n\n")), None)


def test_what_the_reference_makes_of_a_mixed_stream() -> None:
    """The oracle itself, by hand."""
    events, tail = whole(MIXED)
    assert [(e.event, e.data) for e in events] == [
        ("add", "1\n2\n"),
        ("message", "x"),
        ("message", " two spaces "),
        ("message", "café \ufffd\n:"),
    ]
    assert tail == ServerSentEvent("t")


@pytest.mark.parametrize("newline", [b"\n", b"\r", b"\r\n", None])
def test_every_cut_in_two_and_in_three(newline: bytes | None) -> None:
    """Byte-order mark, comments, several data lines, a half character, an unterminated tail."""
    raw = MIXED if newline is None else re.sub(rb"\r\n|\r|\n", newline, MIXED)
    expected = whole(raw)
    for i in range(len(raw) + 1):
        assert decoded([raw[:i], raw[i:]]) == expected
    for i in range(0, len(raw) + 1, 3):
        for j in range(i, len(raw) + 1, 2):
            assert decoded([raw[:i], raw[i:j], raw[j:]]) == expected
    assert decoded([raw[i : i + 1] for i in range(len(raw))]) == expected


TOKENS = [
    b"data", b"event", b"id", b"retry", b"other", b":", b": ", b" ", b"\n", b"\r", b"\r\n", b"\n\n", b"\r\r",
    b"12", b"x", b"\0", b"\xef\xbb\xbf", "é".encode(), b"\xe2\x82", b"\xff",
]  # fmt: skip


@given(st.lists(st.sampled_from(TOKENS) | st.binary(max_size=3), max_size=40), st.data())
@example([b"data:1\r", b"\n", b"\r\n"], None)
@example([b"\xef\xbb", b"\xbfdata:1\n\n"], None)
def test_any_bytes_however_they_are_cut(parts: list[bytes], data: st.DataObject | None) -> None:
    raw = b"".join(parts)
    expected = whole(raw)
    assert decoded([raw]) == expected
    assert decoded([raw[i : i + 1] for i in range(len(raw))]) == expected
    assert decoded(parts) == expected
    if data is not None:
        cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
        assert decoded([raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]) == expected


@pytest.mark.parametrize("ending", [b"\n\n", b"\r\r", b"\r\n\r\n", b"\n\r\n", b"\r\n\n", b"\n\r"])
def test_an_event_is_there_with_the_byte_that_ends_it(ending: bytes) -> None:
    """One that ends in LF and CRLF is not kept until the next one ends."""
    decoder, raw = SSEDecoder(), b"data: now" + ending
    given_at = [n for n, byte in enumerate(raw) if decoder.feed(bytes([byte]))]
    two_line_breaks = len(re.match(rb"(?:\r\n|\r|\n)(?:\r|\n)", ending)[0])  # type: ignore[index]
    assert given_at == [len(b"data: now") + two_line_breaks - 1]


def test_nothing_is_kept_but_the_event_under_way() -> None:
    """No accumulation."""
    decoder = SSEDecoder()
    for _ in range(1000):
        assert len(decoder.feed(b": ping\n\ndata: " + b"x" * 100 + b"\n\nda")) == 1
        assert decoder.feed(b"ta: y\n\n") == [ServerSentEvent("y")]
    assert not decoder._line
    assert not decoder._data


@pytest.mark.parametrize("raw", [b"data: " + b"x" * 90, b"data: 12345678\n" * 12])
def test_an_event_without_an_end_is_refused(raw: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_call, "MAX_EVENT", 80)
    with pytest.raises(InvalidInputError, match="more than 80 bytes"):
        SSEDecoder().feed(raw)
