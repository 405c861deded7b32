"""The one retry policy, as a table and over sockets."""

from __future__ import annotations

import math
import random
import re
import time
from email.utils import formatdate
from typing import Any

import pytest

from tests.client.conftest import PARAMS, PROMPT, close, datum, fast_retries
from tests.stub import Stub, drop, fail, status
from tinkex import (
    APIStatusError,
    BadRequestError,
    InternalServerError,
    InvalidInputError,
    RateLimitError,
    RetryConfig,
    ServiceClient,
    TinkerError,
)
from tinkex.client.retry import Attempt, RetryPolicy, retry_after, retryable
from tinkex.errors import (
    APIConnectionError,
    FailedResponse,
    RequestErrorCategory,
    RequestFailedError,
    is_user_error,
    status_error,
)

POLICY = RetryPolicy()


# -- the table ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [408, 409, 429, 500, 502, 503, 504, 529])
def test_statuses_that_are_tried_again(code: int) -> None:
    delay = POLICY.decide(Attempt(code), tries=1, elapsed=0)
    assert delay is not None
    assert 0.375 <= delay <= 0.5


@pytest.mark.parametrize("code", [400, 401, 403, 404, 405, 410, 413, 415, 422])
def test_statuses_that_are_final(code: int) -> None:
    assert POLICY.decide(Attempt(code), tries=1, elapsed=0) is None


def test_an_empty_400_is_a_proxys() -> None:
    assert POLICY.decide(Attempt(400, empty_body=True), 1, 0) is not None
    assert not retryable(422, empty_body=True)


@pytest.mark.parametrize(("code", "word", "again"), [(500, "false", False), (404, "true", True)])
def test_x_should_retry_overrides_the_status(code: int, word: str, again: bool) -> None:
    delay = POLICY.decide(Attempt(code, {"x-should-retry": word}), 1, 0)
    assert (delay is not None) is again


def test_backoff_grows_is_jittered_and_capped() -> None:
    delays = [[POLICY.backoff(tries) for _ in range(50)] for tries in (1, 2, 3, 50)]
    for some, top in zip(delays, (0.5, 1, 2, 10), strict=True):
        assert all(0.75 * top <= delay <= top for delay in some)
        assert len(set(some)) > 1


def test_jitter_leaves_the_users_random_numbers_alone() -> None:
    random.seed(1)
    first = random.random()
    random.seed(1)
    POLICY.backoff(1)
    assert random.random() == first


@pytest.mark.parametrize(
    ("failed", "patient", "budget"),
    [
        (Attempt(), False, 10),
        (Attempt(reached=True), False, 300),
        (Attempt(503), False, 300),
        (Attempt(503), True, 300),
        (Attempt(429), False, 300),
        (Attempt(429), True, math.inf),
        (Attempt(402), False, 3600),
    ],
)
def test_how_long_each_failure_is_tried(failed: Attempt, patient: bool, budget: float) -> None:
    """One function knows every limit."""
    if budget < math.inf:
        assert POLICY.decide(failed, 5, budget, patient=patient) is None
        last = POLICY.decide(failed, 5, budget - 1, patient=patient)
        assert last == pytest.approx(1), "the last try comes at the end of the time, not before"
    assert POLICY.decide(failed, 5, min(budget, 1e6) - 20 if budget > 20 else 0, patient=patient) is not None


def test_slow_failures_to_connect_stay_within_the_time_for_an_unreachable_host() -> None:
    """A host that swallows packets is reported in 10 s too, not 10 s and a handshake."""
    assert POLICY.decide(Attempt(took=4.5), 1, 4.5) is not None
    assert POLICY.decide(Attempt(took=4.5), 2, 9.5) is None


# -- Retry-After -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after-ms": "1500", "retry-after": "9"}, 1.5),
        ({"retry-after-ms": "nonsense", "retry-after": "9"}, 9),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after": "61"}, 60),
        ({"retry-after": "1e999"}, 60),
        ({"retry-after": "-1"}, None),
        ({"retry-after": "0"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "soon"}, None),
        ({}, None),
    ],
)
def test_retry_after_in_milliseconds_and_seconds(headers: dict[str, str], seconds: float | None) -> None:
    """Milliseconds before seconds before dates; only what is sensible counts."""
    assert retry_after(headers) == seconds


def test_retry_after_as_a_date_goes_by_the_servers_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our clock may be hours off; the response's Date header is what the date is relative to."""
    now = 1_700_000_000
    monkeypatch.setattr(time, "time", lambda: now)
    later = formatdate(now + 7, usegmt=True)
    assert retry_after({"retry-after": later}) == 7
    assert retry_after({"retry-after": formatdate(now - 7, usegmt=True)}) is None
    assert retry_after({"retry-after": formatdate(now + 100, usegmt=True)}) == 60
    monkeypatch.setattr(time, "time", lambda: now - 86_400)
    assert retry_after({"retry-after": later, "date": formatdate(now + 2, usegmt=True)}) == 5


def test_the_servers_delay_beats_the_backoff() -> None:
    assert POLICY.decide(Attempt(429, {"retry-after": "3"}), 1, 0) == 3
    assert POLICY.decide(Attempt(402), 1, 0) == POLICY.billing_delay


# -- whose fault -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [400, 401, 403, 404, 422])
def test_user_errors(code: int) -> None:
    assert is_user_error(status_error("", FailedResponse(code)))


@pytest.mark.parametrize("code", [402, 408, 409, 410, 429, 500, 503])
def test_not_user_errors(code: int) -> None:
    """Unlike in the official SDK, 429, 409, 402 and 410 are nobody's mistake."""
    assert not is_user_error(status_error("", FailedResponse(code)))


def test_user_errors_that_are_no_status() -> None:
    """Failing to connect is nobody's mistake."""
    assert not is_user_error(APIConnectionError())
    assert is_user_error(InvalidInputError())
    assert is_user_error(RequestFailedError("", "r", RequestErrorCategory.User))
    assert not is_user_error(RequestFailedError("", "r", RequestErrorCategory.Server))


@pytest.mark.parametrize("bad", [{"max_connections": 0}, {"jitter_factor": 2}])
def test_a_bad_retry_config_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(bad))):
        RetryConfig(**bad)


def test_a_misspelt_wish_is_no_wish() -> None:
    with pytest.raises(InvalidInputError, match="no 'max_conections'; did you mean 'max_connections'"):
        RetryConfig(max_conections=3)  # type: ignore[call-arg]


# -- over sockets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {"retry-after-ms": "400"},
        {"retry-after": "0.4"},
        pytest.param(
            {
                "retry-after": formatdate(1_700_000_001, usegmt=True),
                "date": formatdate(1_700_000_000, usegmt=True),
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=["ms", "seconds", "date"],
)
@pytest.mark.parametrize("code", [429, 503])
def test_sampling_waits_as_long_as_the_server_says(
    stub: Stub, sampler: Any, headers: dict[str, str], code: int
) -> None:
    """The call that met the 429 is itself sent again, after the server's delay."""
    stub.script("asample", status(code, headers))
    assert len(sampler.sample(PROMPT, 1, PARAMS).result(10).sequences) == 1
    first, second = stub.sent("asample")
    assert 0.35 <= second.time - first.time < 3
    assert first.json == second.json


@pytest.mark.parametrize("op", ["forward_backward", "asample"])
def test_x_should_retry_false_ends_it_at_once(stub: Stub, run: Any, sampler: Any, op: str) -> None:
    """For sampling too."""
    if op == "forward_backward":
        run.forward_backward([datum()], "cross_entropy").result(20)
    stub.script(op, status(503, {"x-should-retry": "false"}), always=True)
    before = stub.count(op)
    call = (
        run.forward_backward([datum()], "cross_entropy") if "for" in op else sampler.sample(PROMPT, 1, PARAMS)
    )
    with pytest.raises(InternalServerError, match="scripted 503"):
        call.result(20)
    assert stub.count(op) == before + 1


@pytest.mark.parametrize("op", ["optim_step", "asample"])
def test_x_should_retry_true_tries_what_would_be_final(stub: Stub, run: Any, sampler: Any, op: str) -> None:
    stub.script(op, status(404, {"x-should-retry": "true"}))
    call = run.optim_step() if op == "optim_step" else sampler.sample(PROMPT, 1, PARAMS)
    call.result(20)
    assert stub.count(op) == 2


@pytest.mark.parametrize("batch", [False, True])
def test_polls_honour_both_headers_too(stub: Stub, service: ServiceClient, batch: bool) -> None:
    """Every layer is the one policy, those that wait for a result as well."""
    stub.config = {"sample_use_retrieve_futures": batch}
    run = service.create_lora_training_client("stub/base", timeout=20)
    sampler = service.create_sampling_client(base_model="stub/base", timeout=20)
    for call in (run.optim_step, lambda: sampler.sample(PROMPT, 1, PARAMS)):
        stub.script("retrieve_future", status(503, {"x-should-retry": "false"}))
        with pytest.raises(InternalServerError, match="retrieve_future: scripted 503"):
            call().result(20)
        stub.script("retrieve_future", status(404, {"x-should-retry": "true"}))
        call().result(20)
    before = stub.count("retrieve_future")
    stub.script("retrieve_future", status(503, {"retry-after-ms": "400"}))
    run.optim_step().result(20)
    first, second = stub.sent("retrieve_future")[before:]
    assert second.time - first.time >= 0.35, "its own backoff would have been 0.05 s at most"


def test_a_persistent_5xx_on_sampling_is_bounded(stub: Stub, service: ServiceClient, sampler: Any) -> None:
    """One budget, whatever the layer; the error says how often it was tried."""
    fast_retries(service, status_budget=0.3)
    stub.script("asample", status(500), always=True)
    with pytest.raises(
        InternalServerError, match=r"500 from POST .*asample: scripted 500 \(\d+ attempts in 0"
    ):
        sampler.sample(PROMPT, 1, PARAMS).result(20)
    assert stub.count("asample") > 2


def test_a_wait_for_the_rate_limit_is_not_held_against_the_next_failure(
    stub: Stub, service: ServiceClient, sampler: Any
) -> None:
    """However long a 429 made a sample wait, a 503 after it is tried again like any other."""
    fast_retries(service, status_budget=0.3)
    stub.script("asample", *[status(429, {"retry-after": "0.2"})] * 3, status(503))
    sampler.sample(PROMPT, 1, PARAMS).result(20)
    assert stub.count("asample") == 5


def test_a_429_on_training_is_tried_again_and_bounded(stub: Stub, service: ServiceClient, run: Any) -> None:
    fast_retries(service, status_budget=0.2)
    stub.script("optim_step", status(429))
    run.optim_step().result(20)
    stub.script("optim_step", status(429), always=True)
    with pytest.raises(RateLimitError):
        run.optim_step().result(20)


@pytest.mark.slow
def test_billing_is_waited_for_as_long_as_the_server_says(stub: Stub) -> None:
    stub.config = {"billing_exception_max_pause_duration_sec": 1}
    service = ServiceClient(base_url=stub.url)
    fast_retries(service, billing_delay=0.05)
    sampler = service.create_sampling_client(base_model="stub/base", timeout=20)
    stub.script("asample", status(402), status(402))
    sampler.sample(PROMPT, 1, PARAMS).result(20)
    stub.script("asample", status(402), always=True)
    with pytest.raises(APIStatusError) as caught:
        sampler.sample(PROMPT, 1, PARAMS).result(20)
    assert caught.value.status_code == 402
    close(service)


def test_the_idempotency_key_is_one_for_one_logical_call(stub: Stub, run: Any) -> None:
    """The same over retries, another for the next call."""
    stub.script("optim_step", status(503), status(500))
    run.optim_step().result(20)
    run.optim_step().result(20)
    keys = [request.headers["x-idempotency-key"] for request in stub.sent("optim_step")]
    assert len(keys) == 4
    assert len(set(keys[:3])) == 1
    assert keys[3] != keys[0]


def _calls(service: ServiceClient) -> dict[str, Any]:
    run = service.create_lora_training_client("stub/base", timeout=20)
    sampler = service.create_sampling_client(base_model="stub/base", timeout=20)
    path = run.save_state("kept").result(20).path
    return {
        "forward_backward": lambda: run.forward_backward([datum()], "cross_entropy").result(20),
        "save_weights": lambda: run.save_state("again").result(20),
        "asample": lambda: sampler.sample(PROMPT, 1, PARAMS).result(20),
        "create_model": lambda: service.create_lora_training_client("stub/base", timeout=20),
        "create_sampling_session": lambda: service.create_sampling_client(base_model="stub/base", timeout=20),
        "copy_weights": lambda: service.copy_weights(path).result(20),
    }


@pytest.mark.parametrize(
    "op",
    [
        "forward_backward",
        "save_weights",
        "asample",
        "create_model",
        "create_sampling_session",
        "copy_weights",
    ],
)
def test_every_kind_of_call_is_one_logical_call_over_its_retries(
    stub: Stub, service: ServiceClient, op: str
) -> None:
    """The same key and, word for word, the same request; whatever made it be sent again."""
    call = _calls(service)[op]
    call()
    before = stub.count(op)
    mishaps = [status(503), drop(), status(429, {"retry-after-ms": "10"}), status(409), status(408)]
    stub.script(op, *mishaps)
    call()
    sent = stub.sent(op)[before:]
    assert len(sent) == len(mishaps) + 1
    assert len({(request.headers["x-idempotency-key"], request.body) for request in sent}) == 1
    assert sent[0].headers["x-idempotency-key"] not in {
        request.headers.get("x-idempotency-key") for request in stub.requests if request not in sent
    }


@pytest.mark.parametrize("where", ["submission", "poll", "failure"])
def test_messages_are_for_people(stub: Stub, run: Any, where: str) -> None:
    """No class, no attribute and no object's repr in what is said."""
    words = {"detail": "no such thing"}
    if where == "failure":
        stub.script("optim_step", fail("no such thing"))
    else:
        stub.script("optim_step" if where == "submission" else "retrieve_future", status(404, body=words))
    with pytest.raises(TinkerError) as caught:
        run.optim_step().result(20)
    said = str(caught.value)
    assert said.endswith("no such thing")
    assert not re.search(r"self\.|<class|object at|[A-Za-z]+\(|\{", said), said


def test_errors_come_at_once_and_say_what_the_server_said(stub: Stub, run: Any) -> None:
    """Nothing is between a refusal and the user, and the message is for people."""
    stub.script("optim_step", status(400, body={"detail": "the moon is full"}))
    began = time.monotonic()
    with pytest.raises(
        BadRequestError, match=r"400 from POST http://.*/optim_step: the moon is full"
    ) as caught:
        run.optim_step().result(20)
    assert time.monotonic() - began < 5
    assert caught.value.status_code == 400
    assert caught.value.body == {"detail": "the moon is full"}
    assert stub.count("telemetry") == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"progress_timeout": 0}, {"progress_timeout": -1}, {"max_connections": "3"}, {"max_connections": 0},
        {"retry_delay_base": 0}, {"retryable_exceptions": [ValueError]}, {"retryable_exceptions": (3,)},
        {"retry_delay_max": float("nan")}, {"jitter_factor": "much"}, {"jitter_factor": float("nan")},
        {"enable_retry_logic": "no"}, {"enable_stuck_detection": None}, {"progress_timeout": "long"},
    ],
)  # fmt: skip
def test_a_config_that_cannot_work_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(wrong))):
        RetryConfig(**wrong)  # type: ignore[arg-type]
