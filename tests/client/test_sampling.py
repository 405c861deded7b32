"""A sampler: concurrent, cancellable and rate-limited; one sample's failure affects no other."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import numpy as np
import pytest

from tests.client.conftest import PARAMS, PROMPT, close, eventually, fast_retries
from tests.stub import Stub, delay, drop, fail, status
from tinkex import (
    APIConnectionError,
    APIFuture,
    ClientClosedError,
    ExpiredError,
    InternalServerError,
    InvalidInputError,
    ModelInput,
    NotFoundError,
    RequestFailedError,
    ResultTimeoutError,
    RetryConfig,
    SampleResponse,
    SamplingClient,
    SamplingParams,
    ServiceClient,
    TensorData,
    TinkerError,
)
from tinkex.wire.ops import Pool


@pytest.fixture(params=[False, True], ids=["single", "batch"])
def either(request: pytest.FixtureRequest, stub: Stub, service: ServiceClient) -> SamplingClient:
    """A sampler of a server without and with batch retrieval."""
    stub.config = {"sample_use_retrieve_futures": request.param}
    return service.create_sampling_client(base_model="stub/base", timeout=20)


def test_a_sample_and_what_was_asked_about_it(stub: Stub, either: SamplingClient) -> None:
    targets = TensorData.from_numpy(np.zeros((2, 1), np.int64))
    future = either.sample(
        PROMPT, 2, SamplingParams(max_tokens=3, seed=5, stop=["."], temperature=0.5, top_k=7, top_p=0.9),
        include_prompt_logprobs=True, topk_prompt_logprobs=2, target_prompt_logprobs=targets,
        prompt_logprobs_last_n=2,
    )  # fmt: skip
    response = future.result(20)
    assert [sequence.tokens for sequence in response.sequences] == [[1, 2, 3]] * 2
    assert len({sequence.sequence_id for sequence in response.sequences}) == 2
    body = stub.sent("asample")[0].json
    assert body["num_samples"] == 2
    assert body["sampling_params"]["temperature"] == 0.5
    assert body["prompt_logprobs_last_n"] == 2


def test_many_at_once_finish_in_any_order(stub: Stub, either: SamplingClient) -> None:
    """None waits for another."""
    stub.latency = 0.2
    began = time.monotonic()
    futures = [either.sample(ModelInput.from_ints([n]), 1, PARAMS) for n in range(200)]
    for future in futures:
        assert len(future.result(20).sequences) == 1
    assert time.monotonic() - began < 10, "200 samples of 0.2 s each were not drawn one after another"
    assert sorted(r.json["seq_id"] for r in stub.sent("asample")) == list(range(200))


def test_a_failure_is_its_own(stub: Stub, either: SamplingClient) -> None:
    stub.script("asample", fail("bad prompt"), status(404), drop())
    futures = []
    for _ in range(4):
        futures.append(either.sample(PROMPT, 1, PARAMS))
        futures[-1].exception(5)
    assert isinstance(futures[0].exception(), RequestFailedError)
    assert isinstance(futures[1].exception(), NotFoundError)
    assert futures[2].exception() is None
    assert futures[3].exception() is None


def test_cancelling_cancels_on_the_server_too(stub: Stub, either: SamplingClient) -> None:
    """Whatever the server's flags say."""
    stub.hold("asample")
    future = either.sample(PROMPT, 1, PARAMS)
    stub.wait_for("retrieve_future*")
    assert future.cancel()
    (request,) = stub.wait_for("cancel_future")
    assert stub.cancelled == [request.json["request_id"]]
    stub.release()
    either.sample(PROMPT, 1, PARAMS).result(20)


def test_a_cancelled_sample_async_takes_its_request_with_it(stub: Stub, either: SamplingClient) -> None:
    """Nobody else has it: unlike a future that is shared."""
    stub.hold("asample")

    async def scenario() -> None:
        task = asyncio.create_task(either.sample_async(PROMPT, 1, PARAMS))
        while not stub.count("retrieve_future*"):
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    stub.wait_for("cancel_future")


def test_a_sample_cancelled_while_it_queues_is_never_sent(stub: Stub, service: ServiceClient) -> None:
    config = RetryConfig(max_connections=1)
    sampler = service.create_sampling_client(base_model="stub/base", retry_config=config)
    stub.hold("asample")
    first, second, third = (sampler.sample(PROMPT, 1, PARAMS) for _ in range(3))
    stub.wait_for("retrieve_future")
    second.cancel()
    stub.release()
    for future in (first, third):
        future.result(20)
    assert stub.count("asample") == 2


def test_max_connections_of_the_user_is_honoured(stub: Stub, service: ServiceClient) -> None:
    """The official client overrides it silently."""
    sampler = service.create_sampling_client(
        base_model="stub/base", retry_config=RetryConfig(max_connections=3)
    )
    stub.hold("asample")
    futures = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(10)]
    stub.wait_for("retrieve_future", 3)
    time.sleep(0.1)
    assert stub.count("asample") == 3
    stub.release()
    for future in futures:
        future.result(20)


def test_the_servers_limit_holds_where_the_user_gives_none(stub: Stub, service: ServiceClient) -> None:
    stub.config = {"sample_max_concurrent_requests": 2}
    sampler = service.create_sampling_client(base_model="stub/base")
    stub.hold("asample")
    futures = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(5)]
    stub.wait_for("retrieve_future", 2)
    time.sleep(0.1)
    assert stub.count("asample") == 2
    stub.release()
    for future in futures:
        future.result(20)


def test_a_timeout_leaves_the_sample_running(stub: Stub, either: SamplingClient) -> None:
    stub.hold("asample")
    future = either.sample(PROMPT, 1, PARAMS)
    with pytest.raises(ResultTimeoutError):
        future.result(0.05)
    stub.release()
    future.result(20)
    assert stub.cancelled == []


# -- forgotten results -------------------------------------------------------------------------------------


def waiting_sample(stub: Stub, sampler: SamplingClient) -> APIFuture[SampleResponse]:
    """The fourth sample of a sampler, under way and polled for."""
    sampler.retry_config = RetryConfig(retry_delay_base=0.01)
    for _ in range(3):
        sampler.sample(PROMPT, 1, PARAMS).result(20)
    stub.hold("asample")
    time.sleep(0.2)  # a batch's last poll, of what was retrieved
    polls = stub.count("retrieve_future*")
    future = sampler.sample(PROMPT, 1, PARAMS)
    stub.wait_for("asample", 4)
    stub.wait_for("retrieve_future*", polls + 1)
    return future


def assert_asked_anew(stub: Stub, sampler: SamplingClient, future: APIFuture[SampleResponse]) -> None:
    assert future.result(10).sequences[0].tokens == [1, 2, 3, 4]
    assert [r.json["seq_id"] for r in stub.sent("asample")] == [0, 1, 2, 3, 4]
    sampler.sample(PROMPT, 1, PARAMS).result(10)


def test_a_result_the_server_forgot_is_asked_for_anew(stub: Stub, either: SamplingClient) -> None:
    """A restart loses samples, which answer 410; under a new seq id, or the old answer would return."""
    future = waiting_sample(stub, either)
    stub.stop()
    stub.forget_samples(abruptly=False)
    stub.release()
    stub.start()
    assert_asked_anew(stub, either, future)


@pytest.mark.slow
def test_a_server_that_is_back_before_anyone_looked(stub: Stub, either: SamplingClient) -> None:
    """The connections break, and the next one works: a waiting sample must not resume the old poll."""
    future = waiting_sample(stub, either)
    stub.held_ops = set()
    stub.forget_samples(abruptly=True)
    assert_asked_anew(stub, either, future)


@pytest.mark.slow
def test_a_server_behind_a_proxy_that_answered_for_it(stub: Stub, either: SamplingClient) -> None:
    stub.poll_seconds = 0.3
    future = waiting_sample(stub, either)
    stub.held_ops = set()
    stub.poll_seconds = 30
    stub.script("retrieve_future*", status(502))
    stub.forget_samples(abruptly=False)
    assert_asked_anew(stub, either, future)


@pytest.mark.slow
def test_a_server_that_restarts_between_two_polls(stub: Stub, either: SamplingClient) -> None:
    """Nothing breaks, and cursors go on: after a poll for nothing one of those who wait asks on its own."""
    stub.poll_seconds = 1.2
    future = waiting_sample(stub, either)
    others = [either.sample(PROMPT, 1, PARAMS) for _ in range(2)]
    stub.wait_for("asample", 6)
    stub.held_ops = set()
    stub.forget_results()
    assert [len(f.result(10).sequences) for f in [future, *others]] == [1, 1, 1]
    assert sorted(r.json["seq_id"] for r in stub.sent("asample")) == list(range(9))


def test_a_server_that_counts_anew_since_it_restarted(stub: Stub, either: SamplingClient) -> None:
    """What ended before a poll that shows this is still to be told, to those who wait only from now on."""
    for _ in range(3):
        either.sample(PROMPT, 1, PARAMS).result(20)
    time.sleep(0.2)  # a batch's last poll, of what was retrieved
    stub.forget_samples(abruptly=False)
    stub.hold("asample")
    polls = stub.count("retrieve_future*")
    held = either.sample(PROMPT, 1, PARAMS)
    stub.wait_for("retrieve_future*", polls + 1)
    stub.held_ops = set()
    stub.script("asample", drop(effect=True))  # it ends before the client knows that it was accepted
    either.sample(PROMPT, 1, PARAMS).result(10)
    stub.release("asample")
    held.result(10)


def test_without_retry_logic_a_forgotten_result_is_an_error(stub: Stub, service: ServiceClient) -> None:
    config = RetryConfig(enable_retry_logic=False)
    sampler = service.create_sampling_client(base_model="stub/base", retry_config=config)
    stub.script("retrieve_future", status(410))
    with pytest.raises(ExpiredError):
        sampler.sample(PROMPT, 1, PARAMS).result(20)


@pytest.mark.slow
def test_samples_fail_in_their_own_time_however_many_there_are(stub: Stub, service: ServiceClient) -> None:
    """What is being retried does not hold the others back: all were sent when the first gives up."""
    fast_retries(service, status_budget=1.0)
    sampler = service.create_sampling_client(base_model="stub/base")
    stub.script("asample", status(500), always=True)
    futures = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(200)]
    with pytest.raises(InternalServerError):
        futures[0].result(10)
    assert len({request.json["seq_id"] for request in stub.sent("asample")}) == 200
    for future in futures:
        assert isinstance(future.exception(10), InternalServerError)


def test_samples_that_wait_to_be_sent_can_be_cancelled_and_leave_no_gap(stub: Stub, sampler: Any) -> None:
    stub.script("asample", *[delay(0.05)] * 16)
    futures = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(300)]
    for future in futures[::2]:
        future.cancel()
    for future in futures[1::2]:
        assert future.result(10).sequences[0].tokens == [1, 2, 3, 4]
    limiter = sampler._connection.transport._permits[Pool.SAMPLE]
    eventually(lambda: limiter.used == 0 and len(limiter) == 0)


def test_exceptions_that_the_user_wants_retried(stub: Stub, service: ServiceClient) -> None:
    config = RetryConfig(retryable_exceptions=(RequestFailedError,), retry_delay_base=0.01)
    sampler = service.create_sampling_client(base_model="stub/base", retry_config=config)
    stub.script("asample", fail("flaky"), fail("flaky"))
    sampler.sample(PROMPT, 1, PARAMS).result(20)
    assert stub.count("asample") == 3


@pytest.mark.parametrize("config", [RetryConfig(enable_retry_logic=False)])
def test_without_retry_logic_a_5xx_is_an_error_at_once(
    stub: Stub, service: ServiceClient, config: RetryConfig
) -> None:
    sampler = service.create_sampling_client(base_model="stub/base", retry_config=config)
    stub.script("asample", status(500), always=True)
    with pytest.raises(InternalServerError):
        sampler.sample(PROMPT, 1, PARAMS).result(20)
    assert stub.count("asample") == 1


def test_the_users_delays_are_those_between_two_tries(stub: Stub, service: ServiceClient) -> None:
    config = RetryConfig(retry_delay_base=0.001, retry_delay_max=0.002)
    fast_retries(service, base=30, cap=30)
    sampler = service.create_sampling_client(base_model="stub/base", retry_config=config)
    stub.script("asample", *[status(500)] * 5)
    sampler.sample(PROMPT, 1, PARAMS).result(20)
    assert stub.count("asample") == 6


def test_a_closed_client_is_not_retried_whatever_the_user_wants_retried(
    stub: Stub, service: ServiceClient
) -> None:
    config = RetryConfig(retryable_exceptions=(TinkerError,))
    sampler = service.create_sampling_client(base_model="stub/base", retry_config=config)
    stub.hold("asample")
    future = sampler.sample(PROMPT, 1, PARAMS)
    stub.wait_for("asample", 1)
    service.close().result(20)
    with pytest.raises(ClientClosedError):
        future.result(20)


def test_the_batch_poller_forgets_what_failed_or_was_cancelled(stub: Stub, service: ServiceClient) -> None:
    stub.config = {"sample_use_retrieve_futures": True}
    sampler = service.create_sampling_client(base_model="stub/base")
    stub.script("asample", *[fail("no")] * 20)
    for _ in range(20):
        with pytest.raises(RequestFailedError):
            sampler.sample(PROMPT, 1, PARAMS).result(20)
    poller: Any = sampler._sender._batch
    eventually(lambda: not poller._waiting and len(poller._early) + len(poller._retrieved) < 5)


# -- the batch poller --------------------------------------------------------------------------------------


def test_a_poller_with_nothing_to_wait_for_does_not_have_the_server_hold_it(
    stub: Stub, service: ServiceClient
) -> None:
    """Each step of a loop has a sampler of its own: polls left behind would take the next one's place."""
    stub.config = {"sample_use_retrieve_futures": True}
    sampler = service.create_sampling_client(base_model="stub/base")
    for future in [sampler.sample(PROMPT, 1, PARAMS) for _ in range(6)]:
        future.result(20)

    def told() -> int:
        return sum(len(sent.json.get("retrieved_request_ids", [])) for sent in stub.sent("retrieve_futures"))

    eventually(lambda: told() == 6)
    assert stub.sent("retrieve_futures")[-1].json["timeout"] == 0


def test_a_sample_does_not_wait_for_what_the_poll_before_it_told(
    stub: Stub, service: ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked for while a poll that nobody holds tells what was retrieved."""
    monkeypatch.setattr("tinkex.client.polling.PACE", 30.0)
    stub.config = {"sample_use_retrieve_futures": True}
    sampler = service.create_sampling_client(base_model="stub/base")
    stub.script("retrieve_futures", delay(0.0), delay(0.3))
    sampler.sample(PROMPT, 1, PARAMS).result(20)
    assert stub.wait_for("retrieve_futures", 2)[-1].json["timeout"] == 0
    stub.hold("asample")
    second = sampler.sample(PROMPT, 1, PARAMS)
    stub.wait_for("retrieve_futures", 3)
    stub.release()
    second.result(20)


@pytest.mark.parametrize("code", [404, 401, 422])
def test_a_dead_batch_poller_falls_back(stub: Stub, service: ServiceClient, code: int) -> None:
    """What waits and what comes later is polled for one by one."""
    stub.config = {"sample_use_retrieve_futures": True}
    sampler = service.create_sampling_client(base_model="stub/base")
    sampler.sample(PROMPT, 1, PARAMS).result(20)
    stub.hold("asample")
    stub.script("retrieve_futures", status(code), always=True)
    waiting = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(3)]
    stub.wait_for("asample", 4)
    stub.release()
    later = sampler.sample(PROMPT, 1, PARAMS)
    for future in (*waiting, later):
        assert len(future.result(10).sequences) == 1


def test_an_unreadable_batch_poll_falls_back(stub: Stub, service: ServiceClient) -> None:
    stub.config = {"sample_use_retrieve_futures": True}
    stub.script("retrieve_futures", status(200, body={"completions": "all of them"}))
    sampler = service.create_sampling_client(base_model="stub/base")
    sampler.sample(PROMPT, 1, PARAMS).result(20)


@pytest.mark.slow
def test_a_batch_poll_survives_failures_that_pass(stub: Stub, service: ServiceClient) -> None:
    stub.config = {"sample_use_retrieve_futures": True}
    stub.script("retrieve_futures", status(503), drop(), status(408, body={"type": "try_again"}))
    sampler = service.create_sampling_client(base_model="stub/base")
    for future in [sampler.sample(PROMPT, 1, PARAMS) for _ in range(5)]:
        future.result(10)
    for _ in range(20):
        if stub.count("retrieve_futures") < 3:
            sampler.sample(PROMPT, 1, PARAMS).result(10)
    singly = stub.count("retrieve_future")
    stub.hold("asample")
    later = sampler.sample(PROMPT, 1, PARAMS)
    eventually(lambda: stub.count("retrieve_futures") >= 4)
    assert stub.count("retrieve_future") == singly  # polled for with the batch again
    stub.release()
    later.result(10)


def test_a_batch_poll_that_always_fails_is_given_up(
    stub: Stub, service: ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinkex.client.polling.MAX_FAILURES", 2)
    stub.config = {"sample_use_retrieve_futures": True}
    stub.script("retrieve_futures", status(503), always=True)
    sampler = service.create_sampling_client(base_model="stub/base")
    for _ in range(5):
        sampler.sample(PROMPT, 1, PARAMS).result(10)
    eventually(lambda: stub.count("retrieve_futures") == 3)
    sampler.sample(PROMPT, 1, PARAMS).result(10)
    assert stub.count("retrieve_futures") == 3


@pytest.mark.slow
def test_a_server_that_never_holds_a_batch_poll_is_paced(stub: Stub, service: ServiceClient) -> None:
    stub.config = {"sample_use_retrieve_futures": True}
    answer = status(200, body={"completions": [], "cursor": 0})
    sampler = service.create_sampling_client(base_model="stub/base")
    stub.hold("asample")
    stub.script("retrieve_futures", answer, always=True)
    future = sampler.sample(PROMPT, 1, PARAMS)
    stub.wait_for("retrieve_futures")
    time.sleep(1)
    assert stub.count("retrieve_futures") < 25
    stub.unscript()
    stub.release()
    future.result(20)


# -- being stuck -------------------------------------------------------------------------------------------


def test_samples_that_make_no_progress_give_up(stub: Stub, service: ServiceClient) -> None:
    config = RetryConfig(progress_timeout=0.4)
    sampler = service.create_sampling_client(base_model="stub/base", retry_config=config)
    stub.hold("asample")
    future = sampler.sample(PROMPT, 1, PARAMS)
    with pytest.raises(APIConnectionError, match=r"no sample of .* finished for .*progress_timeout"):
        future.result(20)
    stub.wait_for("cancel_future")
    stub.release()
    sampler.sample(PROMPT, 1, PARAMS).result(20)


@pytest.mark.slow
def test_idleness_is_not_being_stuck(stub: Stub, service: ServiceClient) -> None:
    """Also while the user keeps old results."""
    config = RetryConfig(progress_timeout=0.4)
    sampler = service.create_sampling_client(base_model="stub/base", retry_config=config)
    kept = sampler.sample(PROMPT, 1, PARAMS)
    kept.result(20)
    time.sleep(0.8)
    stub.script("asample", delay(0.25))
    assert len(sampler.sample(PROMPT, 1, PARAMS).result(20).sequences) == 1


# -- queue states ------------------------------------------------------------------------------------------


def test_a_paused_queue_is_said_once_and_so_is_its_end(
    stub: Stub, service: ServiceClient, caplog: pytest.LogCaptureFixture
) -> None:
    """On each change, and to an observer; one that fails costs no result."""
    seen: list[tuple[str, str | None]] = []

    class Watching(SamplingClient):
        def on_queue_state_change(self, queue_state: str, queue_state_reason: str | None) -> None:
            seen.append((queue_state, queue_state_reason))
            raise RuntimeError("an observer's own trouble")

    sampler = service.create_sampling_client(base_model="stub/base")
    watching = Watching(sampler.session, sampler._sampling_session_id)
    paused = {"type": "try_again", "queue_state": "paused_rate_limit", "queue_state_reason": "too keen"}
    stub.script("retrieve_future", *[status(408, body=paused)] * 3)
    with caplog.at_level(logging.INFO, "tinkex"):
        watching.sample(PROMPT, 1, PARAMS).result(20)
    eventually(lambda: len(seen) == 2)
    assert seen == [("paused_rate_limit", "too keen"), ("active", None)]
    assert caplog.text.count("is paused (paused_rate_limit): too keen") == 1


# -- logprobs and input ------------------------------------------------------------------------------------


def test_logprobs_of_a_prompt(stub: Stub, either: SamplingClient) -> None:
    assert either.compute_logprobs(PROMPT).result(20) == [None, -0.5, -0.5]
    assert asyncio.run(either.compute_logprobs_async(PROMPT)) == [None, -0.5, -0.5]
    stub.hold("asample")
    polls = stub.count("retrieve_future*")
    future = either.compute_logprobs(PROMPT)
    stub.wait_for("asample", 3)
    if not stub.config["sample_use_retrieve_futures"]:
        stub.wait_for("retrieve_future", polls + 1)
    time.sleep(0.1)
    future.cancel()
    stub.wait_for("cancel_future")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([1, 2], 1, PARAMS), "prompt must be a ModelInput, got list"),
        ((PROMPT, 0, PARAMS), "num_samples must be a whole number from 1 on, got 0"),
        ((PROMPT, True, PARAMS), "num_samples"),
        ((PROMPT, 1, {"max_tokens": 1}), "sampling_params must be SamplingParams, got dict"),
        ((PROMPT, 1, PARAMS, False, -1), "topk_prompt_logprobs"),
        ((PROMPT, 1, PARAMS, False, 0, 0, TensorData.from_numpy(np.zeros((3, 1), np.int64))), r"\[2, K\]"),
    ],
)
def test_bad_input_is_refused_at_the_call(stub: Stub, sampler: Any, arguments: Any, words: str) -> None:
    before = len(stub.requests)
    with pytest.raises(InvalidInputError, match=words):
        sampler.sample(*arguments)
    assert len(stub.requests) == before
    sampler.sample(PROMPT, 1, PARAMS).result(20)


def test_a_misspelt_parameter_is_refused() -> None:
    """The official class ignores it."""
    with pytest.raises(InvalidInputError, match=r"temprature.*did you mean 'temperature'"):
        SamplingParams(temprature=0.5)  # type: ignore[call-arg]


def test_what_the_server_left_out_is_said(stub: Stub, sampler: Any) -> None:
    stub.script("retrieve_future", status(200, body={"sequences": [{"stop_reason": "stop", "tokens": [9]}]}))
    with pytest.raises(TinkerError, match="1 sequences for num_samples=2"):
        sampler.sample(PROMPT, 2, PARAMS).result(20)
    stub.script("retrieve_future", status(200, body={"sequences": [{"stop_reason": "stop", "tokens": [9]}]}))
    with pytest.raises(TinkerError, match="prompt_alt_tokens_k"):
        sampler.sample(PROMPT, 1, PARAMS, prompt_alt_tokens_k=2).result(20)


def test_what_it_samples_from(stub: Stub, sampler: Any) -> None:
    assert sampler.get_base_model(timeout=20) == "stub/base"
    assert asyncio.run(sampler.get_base_model_async()) == "stub/base"
    assert sampler._sampling_session_id in repr(sampler)
    assert sampler.get_telemetry() is None


def test_a_failed_sample_is_not_logged_besides_being_raised(
    stub: Stub, service: ServiceClient, sampler: Any, caplog: pytest.LogCaptureFixture
) -> None:
    fast_retries(service, status_budget=0.1)
    stub.script("asample", status(500), always=True)
    with caplog.at_level(logging.INFO), pytest.raises(TinkerError):
        sampler.sample(PROMPT, 1, PARAMS).result(20)
    assert caplog.records == []


def test_a_sampler_needs_a_model(service: ServiceClient) -> None:
    with pytest.raises(InvalidInputError, match=r"model_path .* or base_model"):
        service.create_sampling_client()
    with pytest.raises(InvalidInputError, match="must start with tinker://"):
        service.create_sampling_client("weights/1")
    close(service)
