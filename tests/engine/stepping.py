"""How the tests of sampling drive a batch by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tinkex.engine.torch.continuous_batch import ContinuousBatch
from tinkex.engine.torch.kv import Pages


def finish(batch: ContinuousBatch) -> None:
    """Step to the end, looking for leaks after each."""
    for _ in range(5000):
        if not batch.busy:
            break
        batch.step()
        check(batch)
    assert not batch.busy
    assert batch.cache.pages.available == batch.cache.pages.count


def check(batch: ContinuousBatch) -> None:
    """Assert that running sequences own all pages in use."""
    assert not any(s.pages for r in batch._requests for s in r.sequences if s not in batch.running)
    check_pages(batch.cache.pages, (s.pages for s in batch.running))


def check_pages(pages: Pages, holders: Iterable[Sequence[int]]) -> None:
    """Assert that the owners are exactly `holders`, and that every page is free, idle or owned."""
    held = Counter(page for owned in holders for page in owned)
    assert all(pages._refs[p] == held.get(p, 0) for p in range(pages.count)), "references leak"
    assert sorted([*pages._free, *pages._idle, *held]) == list(range(pages.count)), "pages lost or doubled"
    assert {d: p for p, d in pages._digest.items()} == pages._by_digest, "digests disagree"
    assert all(page in pages._digest for page in pages._idle), "an idle page cannot be found"
