"""The circuit breaker of a host, as a table and over sockets: part of the one policy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from tests.client.conftest import PARAMS, PROMPT, close, datum, eventually, fast_retries, free_port
from tests.stub import Stub, drop, hang, status
from tinkex import APIConnectionError, ClientClosedError, RetryConfig, ServiceClient, Timeouts
from tinkex.client.limits import CIRCUIT_LIMIT, Host, shared_host
from tinkex.client.retry import RetryPolicy

POLICY = RetryPolicy()
REFUSED = ConnectionRefusedError("refused")


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(coroutine)


def open_breaker(host: Host) -> None:
    for _ in range(CIRCUIT_LIMIT):
        host.failed(REFUSED)


# -- the states --------------------------------------------------------------------------------------------


def test_it_opens_after_so_many_failures_in_a_row_and_closes_with_any_answer() -> None:
    async def scenario() -> None:
        host = Host()
        for _ in range(CIRCUIT_LIMIT - 1):
            host.failed(REFUSED)
        assert not host.is_open
        assert host.state() == "circuit closed"
        host.answered()
        for _ in range(CIRCUIT_LIMIT):
            assert not host.is_open
            host.failed(REFUSED)
        assert (host.is_open, host.cause) == (True, REFUSED)
        assert host.state() == f"circuit open: {CIRCUIT_LIMIT} failures to connect in a row over 0.0 s"
        host.answered()
        assert (host.is_open, host.failures, host.cause) == (False, 0, None)

    run(scenario())


@pytest.mark.parametrize(
    ("reached", "elapsed", "patience"),
    [(False, 0, 10), (False, 4, 6), (False, 11, 0), (True, 0, 300), (True, 299, 1)],
)
def test_how_long_a_caller_waits_is_the_policys_word(reached: bool, elapsed: float, patience: float) -> None:
    """A host that was reached and is lost keeps its five minutes."""
    assert POLICY.patience(reached, elapsed) == patience


def test_who_does_not_retry_does_not_wait() -> None:
    assert POLICY.tuned(RetryConfig(enable_retry_logic=False)).patience(True, 0) == 0


def test_probes_come_often_enough_for_whoever_has_little_time() -> None:
    delays = [POLICY.probe_delay(n) for n in range(20)]
    assert all(delay <= 2 for delay in delays)
    assert delays[0] <= 0.5


# -- waiting together --------------------------------------------------------------------------------------


def test_many_wait_for_one_probe_at_a_time() -> None:
    async def scenario() -> tuple[list[bool], int, int]:
        host = Host()
        open_breaker(host)
        probes, at_once, most = 0, 0, 0

        async def probe() -> None:
            nonlocal probes, at_once, most
            probes += 1
            at_once += 1
            most = max(most, at_once)
            await asyncio.sleep(0.01)
            at_once -= 1
            if probes < 4:
                raise REFUSED

        back = await asyncio.gather(*(host.reachable(5, probe, lambda n: 0.01) for _ in range(500)))
        return back, probes, most

    back, probes, most = run(scenario())
    assert all(back)
    assert (probes, most) == (4, 1)


def test_each_waits_for_as_long_as_it_may() -> None:
    async def scenario() -> None:
        host = Host()
        open_breaker(host)
        probes = 0

        async def probe() -> None:
            nonlocal probes
            probes += 1
            raise REFUSED

        now = asyncio.get_running_loop().time
        began, ends = now(), []

        async def wait(seconds: float) -> None:
            assert not await host.reachable(seconds, probe, lambda n: 0.02)
            ends.append(now() - began)

        await asyncio.gather(wait(0.3), wait(0.1), wait(0))
        assert ends == sorted(ends)
        assert ends[0] < 0.1 <= ends[1] < 0.3 <= ends[2]
        await asyncio.sleep(0.1)
        before = probes
        await asyncio.sleep(0.1)
        assert probes == before, "nobody waits, nobody asks"

    run(scenario())


def test_an_answer_from_elsewhere_lets_everyone_go() -> None:
    """Whatever was under way when the circuit opened may still be answered."""

    async def scenario() -> list[bool]:
        host = Host()
        open_breaker(host)

        async def never() -> None:
            await asyncio.sleep(60)

        waiting = [asyncio.ensure_future(host.reachable(5, never, lambda n: 0)) for _ in range(10)]
        await asyncio.sleep(0.02)
        host.answered()
        return await asyncio.wait_for(asyncio.gather(*waiting), 1)

    assert all(run(scenario()))


def test_when_the_one_who_probes_leaves_another_goes_on() -> None:
    async def scenario() -> bool:
        host = Host()
        open_breaker(host)

        async def closed() -> None:
            raise ClientClosedError("closed")

        async def fine() -> None:
            pass

        first = asyncio.ensure_future(host.reachable(0.05, closed, lambda n: 0))
        second = asyncio.ensure_future(host.reachable(5, fine, lambda n: 0))
        await asyncio.sleep(0)
        first.cancel()
        return await asyncio.wait_for(second, 1)

    assert run(scenario())


def test_one_host_for_one_server() -> None:
    one = shared_host("http://a")
    assert shared_host("http://a") is one
    assert shared_host("http://b") is not one


# -- over sockets ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_lost_server_is_not_hammered_and_everyone_goes_on_when_it_is_back(stub: Stub) -> None:
    """Issue 5(7): hundreds of callers, one probe at a time; and not one of them fails."""
    services = [ServiceClient(base_url=stub.url, api_key=f"tml-{n}") for n in range(4)]
    for service in services:
        fast_retries(service, probe_cap=0.05)
    runs = [
        service.create_lora_training_client("stub/base", timeout=20) for service in services for _ in range(5)
    ]
    samplers = [service.create_sampling_client(base_model="stub/base", timeout=20) for service in services]
    host = shared_host(stub.url)
    before = stub.total_requests
    stub.stop()
    futures = [run.optim_step() for run in runs]
    futures += [sampler.sample(PROMPT, 1, PARAMS) for sampler in samplers for _ in range(100)]
    eventually(lambda: host.is_open)
    time.sleep(1.0)
    failures = host.failures
    assert failures < 200, "420 callers would have tried some thousand times in that second"
    assert not any(future.done() for future in futures)
    stub.start()
    for future in futures:
        future.result(20)
    assert not host.is_open
    assert stub.count("healthz") <= len(services), "and the answer to one probe was enough"
    assert stub.total_requests > before
    for service in services:
        close(service)


@pytest.mark.slow
def test_a_host_that_is_lost_is_given_its_time_and_the_error_says_what_is_known(stub: Stub) -> None:
    service = ServiceClient(base_url=stub.url, timeouts=Timeouts(lost=1.0, close=0.5))
    fast_retries(service)
    sampler = service.create_sampling_client(base_model="stub/base", timeout=20)
    stub.stop()
    began = time.monotonic()
    futures = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(50)]
    for future in futures:
        with pytest.raises(
            APIConnectionError,
            match=r"no connection to http.*refused.*circuit open: \d+ failures to connect in a row over",
        ):
            future.result(15)
    assert 0.9 < time.monotonic() - began < 15
    close(service)


def test_once_it_is_open_who_does_not_retry_fails_at_once(stub: Stub) -> None:
    """Fail fast: without another attempt, which would wait for a timeout of its own."""
    service = ServiceClient(base_url=stub.url, timeouts=Timeouts(close=0.5))
    fast_retries(service)
    patient = service.create_sampling_client(base_model="stub/base", timeout=20)
    hasty = service.create_sampling_client(
        base_model="stub/base", retry_config=RetryConfig(enable_retry_logic=False), timeout=20
    )
    hasty.sample(PROMPT, 1, PARAMS).result(20)
    stub.stop()
    waiting = patient.sample(PROMPT, 1, PARAMS)
    eventually(lambda: shared_host(stub.url).is_open)
    began = time.monotonic()
    with pytest.raises(APIConnectionError, match="circuit open"):
        hasty.sample(PROMPT, 1, PARAMS).result(20)
    assert time.monotonic() - began < 4
    stub.start()
    waiting.result(10)
    hasty.sample(PROMPT, 1, PARAMS).result(20)
    close(service)


@pytest.mark.slow
def test_a_host_never_reached_is_tried_again_by_a_later_call() -> None:
    """An open circuit is no verdict for ever: the next call finds out for itself, within its own time."""
    port = free_port()
    service = ServiceClient(base_url=f"http://127.0.0.1:{port}", timeouts=Timeouts(unreachable=0.6))
    fast_retries(service)
    for _ in range(2):
        with pytest.raises(APIConnectionError, match=r"refused.*circuit open"):
            service.get_server_capabilities()
    with Stub(port=port):
        assert service.get_server_capabilities(timeout=20)
        close(service)


@pytest.mark.parametrize("mishap", [status(500), status(429, {"retry-after-ms": "10"}), drop()])
def test_a_server_that_answers_badly_is_there(stub: Stub, service: ServiceClient, mishap: Any) -> None:
    """Only a host that cannot be reached opens the circuit; one request's trouble is not everybody's."""
    fast_retries(service, status_budget=20)
    run = service.create_lora_training_client("stub/base", timeout=20)
    stub.script("optim_step", *[mishap] * 12)
    step = run.optim_step()
    for _ in range(30):
        run.get_info(timeout=20)
    step.result(10)
    run.forward_backward([datum()], "cross_entropy").result(20)


def test_a_server_that_is_slow_is_there(stub: Stub) -> None:
    """Timeouts of answers do not count: polls are long, and a hung operation is not a dead host."""
    service = ServiceClient(base_url=stub.url, timeouts=Timeouts(request=0.05, long_poll=0.05, close=0.5))
    fast_retries(service)
    stub.script("get_server_capabilities", *[hang()] * 8)
    service.get_server_capabilities(timeout=10)
    assert stub.count("get_server_capabilities") == 9
    assert stub.count("healthz") == 0
    close(service)
