"""429 with Retry-After: every kind of call waits as long as it was told, and nobody else does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.client.conftest import PARAMS, PROMPT, QUICK, close, datum, eventually, fast_retries
from tests.client.events import DONE, events
from tests.stub import Stub, status
from tinkex import APIConnectionError, RateLimitError, RetryConfig, ServiceClient

LIMITED, OTHER = "tml-limited", "tml-other"
WAIT = 0.6  # seconds that the server asks for
LATER = status(429, {"retry-after": str(WAIT)})
STREAM = events(DONE)


class Caller:
    """One tenant: a call of each kind, by the path that a limit on it would refuse."""

    def __init__(self, stub: Stub, key: str) -> None:
        self.service = ServiceClient(base_url=stub.url, api_key=key, timeouts=QUICK)
        fast_retries(self.service)
        run = self.service.create_lora_training_client("stub/base", timeout=20)
        sampler = self.service.create_sampling_client(base_model="stub/base", timeout=20)
        rest = self.service.create_rest_client()
        self.calls: dict[str, Callable[[], Any]] = {
            "create_model": lambda: self.service.create_lora_training_client("stub/base", timeout=20),
            "create_sampling_session": lambda: self.service.create_sampling_client(
                base_model="stub/base", timeout=20
            ),
            "forward_backward": lambda: run.forward_backward([datum()], "cross_entropy").result(20),
            "optim_step": lambda: run.optim_step().result(20),
            "save_weights": lambda: run.save_state("kept", overwrite=True).result(20),
            "get_info": run.get_info,
            "retrieve_future": lambda: run.optim_step().result(20),
            "asample": lambda: sampler.sample(PROMPT, 1, PARAMS).result(20),
            "retrieve_futures": lambda: sampler.sample(PROMPT, 1, PARAMS).result(20),
            "stream_sample": lambda: list(sampler.sample_stream(PROMPT, PARAMS)),
            "sessions": lambda: rest.list_sessions().result(20),
            "get_server_capabilities": lambda: self.service.get_server_capabilities(timeout=20),
        }


KINDS = [
    "create_model", "create_sampling_session", "forward_backward", "optim_step", "save_weights", "get_info",
    "retrieve_future", "asample", "retrieve_futures", "stream_sample", "sessions", "get_server_capabilities",
]  # fmt: skip


def quick(some: set[str], of: list[str]) -> list[Any]:
    """All kinds, of which `make test-fast` takes some."""
    return [kind if kind in some else pytest.param(kind, marks=pytest.mark.slow) for kind in of]


@pytest.fixture
def tenants(stub: Stub) -> Iterator[tuple[Caller, Caller]]:
    stub.config = {"sample_use_retrieve_futures": True}
    both = Caller(stub, LIMITED), Caller(stub, OTHER)
    yield both
    for tenant in both:
        close(tenant.service)


@pytest.mark.slow
@pytest.mark.parametrize("kind", quick({"create_model", "forward_backward", "retrieve_futures"}, KINDS))
def test_the_wait_is_kept_and_is_nobody_elses(stub: Stub, tenants: tuple[Caller, Caller], kind: str) -> None:
    limited, other = tenants
    assert limited.calls.keys() == set(KINDS)
    stub.script(kind, LATER, where=lambda request: request.headers.get("x-api-key") == LIMITED)
    stub.script("stream_sample", STREAM, always=True)
    before = len(stub.sent(kind))

    def sent() -> list[Any]:
        return [r for r in stub.sent(kind)[before:] if r.headers.get("x-api-key") == LIMITED]

    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(limited.calls[kind])
        eventually(sent)
        began = time.monotonic()
        other.calls[kind]()
        assert time.monotonic() - began < WAIT
        waiting.result(20)
    first, second, *_ = sent()
    assert WAIT - 0.05 <= second.time - first.time < WAIT + 3


def test_one_runs_wait_does_not_hold_up_another_run_of_the_same_key(stub: Stub, service: Any) -> None:
    waits = service.create_lora_training_client("stub/base", timeout=20)
    works = service.create_lora_training_client("stub/base", timeout=20)
    stub.script("optim_step", LATER, where=lambda request: request.json["model_id"] == waits.model_id)
    waiting = waits.optim_step()
    works.forward_backward([datum()], "cross_entropy").result(20)
    works.optim_step().result(20)
    assert not waiting.done()
    waiting.result(20)


@pytest.mark.parametrize(
    "kind",
    quick(
        {"forward_backward", "sessions"},
        [k for k in KINDS if k not in ("asample", "stream_sample", "retrieve_futures")],
    ),
)
def test_a_limit_that_never_ends_is_an_error_in_the_end(
    stub: Stub, tenants: tuple[Caller, Caller], kind: str
) -> None:
    limited, _ = tenants
    fast_retries(limited.service, status_budget=0.3)
    stub.script(kind, status(429, {"retry-after": "0.1"}), always=True)
    with pytest.raises(RateLimitError, match=r"scripted 429 \(\d+ attempts in"):
        limited.calls[kind]()


def test_a_sample_waits_for_as_long_as_its_progress_timeout(stub: Stub, service: ServiceClient) -> None:
    sampler = service.create_sampling_client(
        base_model="stub/base", retry_config=RetryConfig(progress_timeout=0.5)
    )
    stub.script("asample", status(429, {"retry-after": "0.1"}), always=True)
    with pytest.raises(APIConnectionError, match="progress_timeout"):
        sampler.sample(PROMPT, 1, PARAMS).result(20)
