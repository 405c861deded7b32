"""The rate limit that all samplers of a process share."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import Coroutine
from typing import Any

import pytest

from tests.client.conftest import PARAMS, PROMPT, close, datum, eventually
from tests.stub import Stub, delay, status
from tinkex import (
    APIConnectionError,
    ExpiredError,
    InternalServerError,
    ModelInput,
    ResultTimeoutError,
    RetryConfig,
    ServiceClient,
)
from tinkex.client.limits import RateLimit, shared_rate_limit


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(coroutine)


def test_after_a_pause_one_probe_goes_first() -> None:
    async def scenario() -> None:
        limit = RateLimit()
        assert not await limit.turn()
        limit.pause(0.02)
        turns = [asyncio.ensure_future(limit.turn()) for _ in range(5)]
        await asyncio.sleep(0.06)
        assert [turn.done() for turn in turns] == [True, False, False, False, False]
        assert turns[0].result()
        limit.succeeded()
        limit.finish_probe()
        assert not any(await asyncio.gather(*turns[1:]))

    run(scenario())


def test_one_limit_for_one_server_and_credential() -> None:
    """The same object while anyone uses it, none left over afterwards."""
    one = shared_rate_limit("http://a", "me")
    assert shared_rate_limit("http://a", "me") is one
    assert shared_rate_limit("http://a", "you") is not one
    assert shared_rate_limit("http://b", "me") is not one
    old = weakref.ref(one)
    del one
    gc.collect()
    assert old() is None


@pytest.mark.slow
@pytest.mark.parametrize("same_key", [True, False])
def test_a_429_pauses_every_sampler_with_the_same_credential_and_no_other(stub: Stub, same_key: bool) -> None:
    """Across ServiceClients, and however the URL is spelled."""
    services = [
        ServiceClient(base_url=stub.url, api_key="tml-one"),
        ServiceClient(base_url=stub.url.upper() + "/", api_key="tml-one" if same_key else "tml-two"),
    ]
    first, second = (
        service.create_sampling_client(base_model="stub/base", timeout=20) for service in services
    )
    stub.script("asample", status(429, {"retry-after": "0.8"}))
    limited = first.sample(PROMPT, 1, PARAMS)
    stub.wait_for("asample", 1)
    identity = services[0]._connection.transport.credential.identity  # type: ignore[attr-defined]
    eventually(lambda: shared_rate_limit(stub.url, identity)._cautious)
    other = second.sample(PROMPT, 1, PARAMS)
    for future in (limited, other):
        future.result(20)
    refused = stub.sent("asample")[0].time
    (sent,) = [
        request.time
        for request in stub.sent("asample")
        if request.json["sampling_session_id"] == second._sampling_session_id
    ]
    assert (sent - refused >= 0.7) is same_key
    for service in services:
        close(service)


def test_many_limited_samples_go_on_when_the_server_does(stub: Stub, sampler: Any) -> None:
    """A burst that meets 429s ends with every sample done and few requests wasted."""
    stub.script("asample", *[status(429, {"retry-after-ms": "30"})] * 10)
    futures = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(40)]
    for future in futures:
        future.result(10)
    assert stub.count("asample") == 50


# -- what a server's settings say ------------------------------------------------------------------------


LONG = ModelInput.from_ints(range(1000))  # about 7 kB of JSON


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "at_once"), [(1_000_000, 5), (15_000, 2), (1, 1)])
def test_prompts_on_their_way_are_limited_by_their_bytes(
    stub: Stub, service: ServiceClient, limit: int, at_once: int
) -> None:
    """One that is larger than the limit goes alone."""
    stub.config = {"sample_dispatch_bytes_semaphore_size": limit}
    sampler = service.create_sampling_client(base_model="stub/base")
    stub.script("asample", *[delay(0.5)] * at_once)
    futures = [sampler.sample(LONG, 1, PARAMS) for _ in range(5)]
    stub.wait_for("asample", at_once)
    time.sleep(0.2)
    assert stub.count("asample") == at_once
    for future in futures:
        future.result(20)


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "at_once"), [(1_000_000, 4), (9_000, 2), (1, 1)])
def test_passes_on_their_way_are_limited_by_their_bytes(
    stub: Stub, service: ServiceClient, limit: int, at_once: int
) -> None:
    stub.config = {"fwdbwd_dispatch_bytes_semaphore_size": limit, "fwdbwd_max_chunk_len": 1}
    run = service.create_lora_training_client("stub/base")
    stub.script("forward_backward", *[delay(0.5)] * at_once)
    future = run.forward([datum(400) for _ in range(5)], "cross_entropy")  # 4.8 kB each; the first goes last
    stub.wait_for("forward_backward", at_once)
    time.sleep(0.2)
    assert stub.count("forward_backward") == at_once
    assert len(future.result(20).loss_fn_outputs) == 5


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "at_once"), [(1_000_000, 5), (1, 1)])
@pytest.mark.parametrize("batch", [False, True])
def test_results_on_their_way_are_limited_by_their_bytes(
    stub: Stub, service: ServiceClient, limit: int, at_once: int, batch: bool
) -> None:
    """A server that says how large a result is has it fetched when there is room for it."""
    stub.config = {"inflight_response_bytes_semaphore_size": limit, "sample_use_retrieve_futures": batch}
    stub.metadata_first = True
    sampler = service.create_sampling_client(base_model="stub/base")
    sampler.sample(PROMPT, 1, PARAMS).result(20)
    before = len(fetched := [r for r in stub.sent("retrieve_future") if not r.json["allow_metadata_only"]])
    assert before == 1, fetched
    wanted = lambda request: not request.json["allow_metadata_only"]  # noqa: E731
    stub.script("retrieve_future", *[delay(0.5)] * at_once, where=wanted)
    futures = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(5)]
    eventually(lambda: sum(map(wanted, stub.sent("retrieve_future"))) == before + at_once)
    time.sleep(0.2)
    assert sum(map(wanted, stub.sent("retrieve_future"))) == before + at_once
    for future in futures:
        assert future.result(20).sequences[0].tokens == [1, 2, 3, 4]


def test_a_server_that_wants_no_retries_of_samples_gets_none(stub: Stub, service: ServiceClient) -> None:
    stub.config = {"sample_no_retries": True}
    sampler = service.create_sampling_client(base_model="stub/base")
    stub.script("asample", status(500))
    with pytest.raises(InternalServerError):
        sampler.sample(PROMPT, 1, PARAMS).result(20)
    stub.script("retrieve_future", status(410))
    with pytest.raises(ExpiredError):
        sampler.sample(PROMPT, 1, PARAMS).result(20)
    assert stub.count("asample") == 2
    stub.script("asample", status(429, {"retry-after-ms": "20"}))  # its pace, not a failure
    sampler.sample(PROMPT, 1, PARAMS).result(20)
    stub.script("optim_step", status(500))
    service.create_lora_training_client("stub/base").optim_step().result(20)  # said of samples only


@pytest.mark.parametrize("watched", [True, False])
def test_a_server_can_have_stuck_samples_waited_for(
    stub: Stub, service: ServiceClient, watched: bool
) -> None:
    stub.config = {"sample_enable_stuck_detection": watched}
    config = RetryConfig(progress_timeout=0.2)
    sampler = service.create_sampling_client(base_model="stub/base", retry_config=config)
    stub.hold("asample")
    future = sampler.sample(PROMPT, 1, PARAMS)
    with pytest.raises(APIConnectionError if watched else ResultTimeoutError):
        future.result(1)
    stub.release()
