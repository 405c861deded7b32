"""Listings that fetch themselves: iterate with `for` or `async for`, and pages are asked for when needed.

Promises: nothing is fetched before the first item is wanted; an item that moved to a later page, because
something new came in front of it, is given once. Things deleted while iterating do shift what follows, so
take `list(…)` of a listing before deleting from it. Knows nothing of what is listed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Generic, TypeVar

from tinkex.client.future import APIFuture
from tinkex.errors import InvalidInputError

Page = TypeVar("Page")
Item = TypeVar("Item")


def check_page_size(size: int) -> None:
    """Refuse it before anything is asked for: a page of none would look like the end."""
    if type(size) is not int or not 1 <= size < 2**63:
        raise InvalidInputError(f"page_size must be a whole number from 1 on, got {size!r}")


class Pages(Generic[Page]):
    """The server's answers, one by one.

    `fetch(offset)` asks for the page that starts there, `count` is how many items a page has, and `total`
    how many there are in all by what the page says, or None if it does not say.
    """

    def __init__(
        self,
        fetch: Callable[[int], APIFuture[Page]],
        count: Callable[[Page], int],
        total: Callable[[Page], int | None],
        timeout: float | None = None,
    ) -> None:
        self._fetch, self._count, self._total, self._timeout = fetch, count, total, timeout

    def __iter__(self) -> Iterator[Page]:
        offset, before = 0, None
        while offset is not None:
            page = self._fetch(offset).result(self._timeout)
            offset = self._next(offset, page, before)
            if page != before:
                yield page
            before = page

    async def __aiter__(self) -> AsyncIterator[Page]:
        offset, before = 0, None
        while offset is not None:
            page = await self._fetch(offset).result_async(self._timeout)
            offset = self._next(offset, page, before)
            if page != before:
                yield page
            before = page

    def _next(self, offset: int, page: Page, before: Page | None) -> int | None:
        """Where the next page starts; None if there is none.

        A server that gives no total is asked until it has nothing to say. One that ignores the offset repeats
        itself, and must not be asked for ever.
        """
        offset, total = offset + self._count(page), self._total(page)
        if self._count(page) == 0 or page == before or (total is not None and offset >= total):
            return None
        return offset


class Listing(Generic[Page, Item]):
    """Everything in a listing, item by item; `pages()` gives the server's answers instead.

    >>> for run in rest.iter_training_runs():  # doctest: +SKIP
    ...     print(run.training_run_id)
    """

    def __init__(
        self,
        fetch: Callable[[int], APIFuture[Page]],
        *,
        items: Callable[[Page], list[Item]],
        identify: Callable[[Item], str],
        total: Callable[[Page], int | None] = lambda page: None,
        timeout: float | None = None,
    ) -> None:
        self._items, self._identify = items, identify
        self.total: int | None = None  # how many there are in all, as the last page said
        self._pages = Pages(fetch, lambda page: len(items(page)), self._noting(total), timeout)

    def _noting(self, total: Callable[[Page], int | None]) -> Callable[[Page], int | None]:
        def noted(page: Page) -> int | None:
            self.total = total(page)
            return self.total

        return noted

    def pages(self) -> Pages[Page]:
        """The same page by page."""
        return self._pages

    def __iter__(self) -> Iterator[Item]:
        seen: set[str] = set()
        for page in self._pages:
            yield from self._unseen(page, seen)

    async def __aiter__(self) -> AsyncIterator[Item]:
        seen: set[str] = set()
        async for page in self._pages:
            for item in self._unseen(page, seen):
                yield item

    def _unseen(self, page: Page, seen: set[str]) -> Iterator[Item]:
        for item in self._items(page):
            name = self._identify(item)
            if name not in seen:
                seen.add(name)
                yield item
