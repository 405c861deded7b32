"""Listings: every item once, page after page, with `for` and with `async for`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinkex.client.future import APIFuture, completed
from tinkex.client.rest_results import Listing
from tinkex.errors import ResultTimeoutError


@dataclass(frozen=True)
class Page:
    items: list[str]
    total: int | None


class Server:
    """A listing of `items` in pages of `size`; it counts how often it is asked."""

    def __init__(self, items: list[str], size: int, says_total: bool = True) -> None:
        self.items, self.size, self.says_total = items, size, says_total
        self.asked: list[int] = []
        self.between: Callable[[], None] = lambda: None

    def fetch(self, offset: int) -> APIFuture[Page]:
        if self.asked:
            self.between()
        self.asked.append(offset)
        total = len(self.items) if self.says_total else None
        return completed(Page(self.items[offset : offset + self.size], total))

    def listing(self) -> Listing[Page, str]:
        return Listing(
            self.fetch, items=lambda page: page.items, identify=str, total=lambda page: page.total, timeout=20
        )


async def collect(listing: Listing[Page, str]) -> list[str]:
    return [item async for item in listing]


@pytest.mark.slow
@settings(deadline=None)
@given(st.integers(0, 30), st.integers(1, 10), st.booleans())
def test_every_item_comes_once_and_in_order(count: int, size: int, says_total: bool):
    items = [f"item-{n}" for n in range(count)]
    server = Server(items, size, says_total)
    listing = server.listing()
    assert list(listing) == items
    offsets, server.asked = server.asked, []
    assert asyncio.run(collect(listing)) == items
    assert server.asked == offsets
    assert listing.total == (count if says_total else None)


def test_pages_are_asked_for_only_when_they_are_needed():
    server = Server([f"item-{n}" for n in range(10)], 3)
    items = iter(server.listing())
    assert server.asked == []
    assert [next(items) for _ in range(3)] == ["item-0", "item-1", "item-2"]
    assert server.asked == [0]
    assert next(items) == "item-3"
    assert server.asked == [0, 3]


def test_a_listing_can_be_gone_through_again():
    listing = Server(["a", "b", "c"], 2).listing()
    assert list(listing) == list(listing) == ["a", "b", "c"]


def test_with_a_total_no_page_too_many_is_asked_for():
    server = Server(["a", "b", "c", "d"], 2)
    list(server.listing())
    assert server.asked == [0, 2]


def test_a_server_that_gives_less_than_it_was_asked_for_is_asked_on():
    server = Server(["a", "b", "c"], 1, says_total=False)  # as if it capped the page size
    assert list(server.listing()) == ["a", "b", "c"]


@pytest.mark.parametrize("total", [None, 100])
def test_a_server_that_ignores_the_offset_is_not_asked_for_ever(total: int | None):
    asked: list[int] = []

    def fetch(offset: int) -> APIFuture[Page]:
        asked.append(offset)
        return completed(Page(["a", "b"], total))

    listing = Listing(fetch, items=lambda page: page.items, identify=str, total=lambda page: page.total)
    assert list(listing) == ["a", "b"]
    assert asyncio.run(collect(listing)) == ["a", "b"]
    assert len(asked) == 4


def test_a_total_that_is_never_reached_ends_with_the_items():
    server = Server(["a", "b"], 2)
    listing = Listing(server.fetch, items=lambda page: page.items, identify=str, total=lambda page: 100)
    assert list(listing) == ["a", "b"]


def test_an_item_that_moved_to_a_later_page_is_given_once():
    server = Server(["c", "b", "a"], 2)
    server.between = lambda: server.items.insert(0, "new")
    assert list(server.listing()) == ["c", "b", "a"]


def test_a_page_that_does_not_come_is_not_waited_for_longer_than_said():
    listing: Listing[Page, str] = Listing(
        lambda offset: APIFuture(), items=lambda page: page.items, identify=str, timeout=0.01
    )
    with pytest.raises(ResultTimeoutError):
        list(listing)
    with pytest.raises(ResultTimeoutError):
        asyncio.run(collect(listing))
