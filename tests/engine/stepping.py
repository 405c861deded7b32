"""How the tests of sampling drive a batch by hand."""

from __future__ import annotations

from tinkex.engine.torch.continuous_batch import ContinuousBatch


def finish(batch: ContinuousBatch) -> None:
    """Step to the end, looking for leaks after each."""
    for _ in range(5000):
        if not batch.busy:
            break
        batch.step()
        batch.check()
    assert not batch.busy
    assert batch.cache.pages.available == batch.cache.pages.count
