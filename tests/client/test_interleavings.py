"""Any interleaving of calls, cancels, timeouts, refusals and failures leaves a run working."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.client.chaos import Chaos
from tests.client.conftest import close, fast_retries
from tests.stub import Stub
from tinkex import ServiceClient, Timeouts

pytestmark = pytest.mark.slow


@pytest.fixture
def chaotic(stub: Stub) -> Iterator[tuple[Stub, ServiceClient]]:
    stub.config = {"fwdbwd_max_chunk_len": 1}
    stub.gap_seconds = 60  # a gap left by the client would be a hang
    service = ServiceClient(base_url=stub.url, timeouts=Timeouts(close=2))
    fast_retries(service)
    yield stub, service
    close(service)


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_any_interleaving_leaves_later_calls_working(
    chaotic: tuple[Stub, ServiceClient], seed: int, batch: bool
) -> None:
    stub, service = chaotic
    stub.config["sample_use_retrieve_futures"] = batch
    chaos = Chaos(stub, service, seed)
    for _ in range(120):
        chaos.step()
    chaos.settle()
    chaos.check_runs_still_train()
    chaos.check_order()


@pytest.mark.parametrize("seed", range(2))
def test_many_threads_at_once(chaotic: tuple[Stub, ServiceClient], seed: int) -> None:
    """The same from several threads that share the runs."""
    stub, service = chaotic
    chaos = Chaos(stub, service, seed)

    def user() -> None:
        for _ in range(25):
            chaos.random.choice([chaos.call, chaos.call, chaos.cancel, chaos.mishap, chaos.pause])()

    threads = [threading.Thread(target=user) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    chaos.settle()
    chaos.check_runs_still_train()
    chaos.check_order()
