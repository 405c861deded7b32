"""What RestClient returns beyond plain values: lazy listings, and a run's metrics that can be plotted.

Promises: a listing fetches a page only when its items are needed, and yields an item once even if it moved
to a later page meanwhile. Deleting while iterating shifts later pages: take `list(…)` first.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Generic, TypeVar

from tinkex.client.future import APIFuture, check_timeout
from tinkex.errors import InvalidInputError

PageT = TypeVar("PageT")
ItemT = TypeVar("ItemT")

DEFAULT_CURVES = ("loss", "grad_norm", "learning_rate")
_NOT_CURVES = ("step", "time", "seconds")


class Listing(Generic[PageT, ItemT]):
    """Every item of a paginated listing, for `for` and `async for`.

    `fetch(offset)` requests a page, `items` and `total` read it, and `identify` names an item.

    >>> for run in rest.iter_training_runs():  # doctest: +SKIP
    ...     print(run.training_run_id)
    """

    def __init__(
        self,
        fetch: Callable[[int], APIFuture[PageT]],
        *,
        items: Callable[[PageT], list[ItemT]],
        identify: Callable[[ItemT], str],
        total: Callable[[PageT], int | None] = lambda page: None,
        timeout: float | None = None,
    ) -> None:
        check_timeout(timeout)
        self._fetch, self._items, self._identify = fetch, items, identify
        self._read_total, self._timeout = total, timeout
        self.total: int | None = None  # the number of items, as the last page stated it

    def __iter__(self) -> Iterator[ItemT]:
        cursor = _Cursor(self._items, self._identify)
        while cursor.offset is not None:
            page = self._fetch(cursor.offset).result(self._timeout)
            self.total = self._read_total(page)
            yield from cursor.advance(page, self.total)

    async def __aiter__(self) -> AsyncIterator[ItemT]:
        cursor = _Cursor(self._items, self._identify)
        while cursor.offset is not None:
            page = await self._fetch(cursor.offset).result_async(self._timeout)
            self.total = self._read_total(page)
            for item in cursor.advance(page, self.total):
                yield item


class _Cursor(Generic[PageT, ItemT]):
    """The position of one iteration over a listing."""

    def __init__(self, items: Callable[[PageT], list[ItemT]], identify: Callable[[ItemT], str]) -> None:
        self._items, self._identify = items, identify
        self._seen: set[str] = set()
        self._last: list[ItemT] | None = None
        self.offset: int | None = 0  # of the next page; None: there is none

    def advance(self, page: PageT, total: int | None) -> list[ItemT]:
        """The page's items that were not seen before; moves the offset.

        Without a total, pages are fetched until one is empty. A server that ignores the offset repeats its
        page, which also ends the listing.
        """
        items = self._items(page)
        assert self.offset is not None
        offset = self.offset + len(items)
        ended = not items or items == self._last or (total is not None and offset >= total)
        self.offset, self._last = None if ended else offset, items
        new = [item for item in items if self._identify(item) not in self._seen]
        self._seen.update(map(self._identify, new))
        return new


def check_page_size(size: int) -> None:
    """Refuse a page size before anything is fetched: an empty page would look like the end."""
    if type(size) is not int or not 1 <= size < 2**63:
        raise InvalidInputError(f"page_size must be a whole number from 1 on, got {size!r}")


class StepMetrics(list[dict[str, float]]):
    """The metrics of a run, one dict per step: `step`, `time`, `seconds`, `loss` and what else was logged.

    A plain list to compute with. Its repr is one line with a sparkline; a notebook shows a chart.
    """

    @classmethod
    def from_json_lines(cls, text: bytes) -> StepMetrics:
        """Parse JSON lines; an unfinished last line, of a writer that was killed, is dropped."""
        complete = text[: text.rfind(b"\n") + 1]
        return cls(json.loads(line) for line in complete.splitlines() if line.strip())

    def metrics(self) -> list[str]:
        """The names of the metrics that can be plotted."""
        return list(dict.fromkeys(name for line in self for name in line if name not in _NOT_CURVES))

    def curves(self, names: Sequence[str] = ()) -> dict[str, list[float]]:
        """Each metric's values by step; NaN where a step does not have it. Skipped steps are left out."""
        known = self.metrics()
        names = names or [name for name in DEFAULT_CURVES if name in known]
        return {name: [line.get(name, float("nan")) for line in self._taken()] for name in names}

    def steps(self) -> list[float]:
        """The numbers of the steps that were taken: an optim_step without gradients is skipped."""
        return [line["step"] for line in self._taken()]

    def _taken(self) -> list[dict[str, float]]:
        return [line for line in self if not line.get("skipped")]

    def __repr__(self) -> str:
        from tinkex.charts import number, sparkline

        taken = len(self._taken())
        count = f"{taken} step{'' if taken == 1 else 's'}"
        if not (losses := self.curves(["loss"])["loss"]) or "loss" not in self.metrics():
            return f"StepMetrics({count})"
        return f"StepMetrics({count}, loss {number(losses[0])} {sparkline(losses)} {number(losses[-1])})"

    def _repr_html_(self) -> str | None:
        """The curves, for a notebook; None: __repr__ is enough, or matplotlib is not installed."""
        from tinkex.charts import svg_chart

        if not self._taken() or find_spec("matplotlib") is None:
            return None
        return f'<div style="max-width: 800px">{svg_chart(self.curves(), x=self.steps())}</div>'
