"""What is written within one turn of the loop leaves in one piece; nothing is lost, held or reordered."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

from tinkex.server.connection import LARGE, _Gathering

pytestmark = pytest.mark.anyio


class Wire(asyncio.Transport):
    """A transport that remembers each call to send something."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 5)})
        self.sent: list[bytes] = []
        self.closed = False

    def writelines(self, list_of_data: Iterable[bytes]) -> None:  # type: ignore[override]
        assert not self.closed
        self.sent.append(b"".join(list_of_data))

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True


@pytest.fixture
async def wire() -> Wire:
    return Wire()


@pytest.fixture
async def transport(wire: Wire) -> _Gathering:
    return _Gathering(wire, asyncio.get_running_loop())


async def test_head_and_body_leave_together_at_the_end_of_the_turn(wire: Wire, transport: _Gathering):
    transport.write(b"head")
    transport.write(b"body")
    assert wire.sent == []
    await asyncio.sleep(0)
    assert wire.sent == [b"headbody"]
    transport.write(b"next")
    await asyncio.sleep(0)
    assert wire.sent == [b"headbody", b"next"]


async def test_what_is_large_leaves_at_once_and_in_order(wire: Wire, transport: _Gathering):
    transport.write(b"head")
    transport.write(b"x" * LARGE)
    assert wire.sent == [b"head" + b"x" * LARGE]
    transport.write(b"rest")
    await asyncio.sleep(0)
    assert wire.sent[1:] == [b"rest"]


async def test_closing_sends_what_was_written_before(wire: Wire, transport: _Gathering):
    transport.write(b"last words")
    transport.close()
    assert wire.sent == [b"last words"]
    assert wire.closed
    await asyncio.sleep(0)
    assert len(wire.sent) == 1


async def test_a_client_that_has_gone_meanwhile_is_no_error(wire: Wire, transport: _Gathering):
    transport.write(b"to nobody")
    wire.closed = True
    await asyncio.sleep(0)
    assert wire.sent == []


async def test_all_else_is_the_transports_own(transport: _Gathering):
    assert transport.get_extra_info("peername") == ("127.0.0.1", 5)
