"""The one retry policy: what is asked again, when, and for how long.

    no connection, never reached before   every failure within 10 s, then an error that names the URL
    no connection, reached before         said at 10 s, retried for 5 minutes
    402 billing                           every 5 s, for as long as the server's settings allow
    408, 409, 429, 5xx, empty 400         Retry-After if given, else jittered backoff, for 5 minutes;
                                          429 on sampling: no limit but the progress timeout
    anything else                         never

`x-should-retry` overrides the table; `retry-after-ms` beats `retry-after` in seconds, which beats a date.
Pure: decides from a failure and the time spent, sleeps nowhere, knows no HTTP library.
"""

from __future__ import annotations

import email.utils
import math
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tinkex.errors import InvalidInputError

NO_HEADERS: Mapping[str, str] = {}
MAX_RETRY_AFTER = 60.0
_dice = random.Random()  # not the global ones: a seed of the user's gives the same numbers, retries or not


@dataclass(frozen=True)
class RetryConfig:
    """How a sampling client queues and retries; the fields are the official ones.

    `max_connections` caps the samples in flight (None: what the server allows). Without any success for
    `progress_timeout` seconds a sample that is being retried gives up.
    """

    max_connections: int | None = None
    progress_timeout: float = 7200.0
    retry_delay_base: float = 0.5
    retry_delay_max: float = 10.0
    jitter_factor: float = 0.25
    enable_retry_logic: bool = True
    enable_stuck_detection: bool = True
    retryable_exceptions: tuple[type[BaseException], ...] = ()  # retried besides what the policy retries

    def __post_init__(self) -> None:
        if self.max_connections is not None and not _is_count(self.max_connections):
            raise InvalidInputError(
                f"RetryConfig.max_connections must be a whole number from 1 on, got {self.max_connections!r}"
            )
        for name in ("progress_timeout", "retry_delay_base", "retry_delay_max"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise InvalidInputError(f"RetryConfig.{name} must be seconds above 0, got {value!r}")
        if not 0 <= self.jitter_factor <= 1:
            raise InvalidInputError(f"RetryConfig.jitter_factor must be in [0, 1], got {self.jitter_factor}")
        kinds = self.retryable_exceptions
        if not isinstance(kinds, tuple) or not all(
            isinstance(k, type) and issubclass(k, BaseException) for k in kinds
        ):
            raise InvalidInputError(
                f"RetryConfig.retryable_exceptions must be a tuple of exception classes, got {kinds!r}"
            )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


@dataclass(frozen=True)
class Attempt:
    """One failed try: an HTTP status with its headers, or (status 0) no answer and its cause."""

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=lambda: NO_HEADERS)
    cause: BaseException | None = None
    empty_body: bool = False
    reached: bool = False  # has this host ever answered?
    took: float = 0.0  # seconds from sending to failing


@dataclass(frozen=True)
class RetryPolicy:
    """Decides after each failed try; one instance serves every request of a connection."""

    connect_budget: float = 10.0
    lost_budget: float = 300.0
    status_budget: float = 300.0
    billing_budget: float = 3600.0
    billing_delay: float = 5.0
    base: float = 0.5
    cap: float = 10.0
    jitter: float = 0.25
    enabled: bool = True

    def tuned(self, config: RetryConfig) -> RetryPolicy:
        """This policy with a sampling client's own wishes."""
        return replace(
            self, base=config.retry_delay_base, cap=config.retry_delay_max, jitter=config.jitter_factor,
            enabled=config.enable_retry_logic,
        )  # fmt: skip

    def with_billing(self, seconds: float) -> RetryPolicy:
        return replace(self, billing_budget=seconds)

    def decide(self, failed: Attempt, tries: int, elapsed: float, *, patient: bool = False) -> float | None:
        """Seconds to wait before the next try, or None to give up.

        `tries` counts the failures so far (1 after the first). `patient` marks work that queues politely:
        a 429 is then waited out whatever it takes.
        """
        forced = should_retry(failed.headers)
        if forced is False or not self.enabled:
            return None
        if forced is not True and not retryable(failed.status, failed.empty_body):
            return None
        budget = self._budget(failed, patient)
        delay = retry_after(failed.headers)
        if delay is None:
            delay = self.billing_delay if failed.status == 402 else self.backoff(tries)
        if failed.status == 0 and not failed.reached:
            budget -= failed.took  # the next try may take as long, and must be over by then
        if elapsed + delay > budget:
            # One last try at the very end, rather than giving up with time left.
            delay = budget - elapsed
            if delay < 0.05:
                return None
        return delay

    def _budget(self, failed: Attempt, patient: bool) -> float:
        if failed.status == 0:
            return self.lost_budget if failed.reached else self.connect_budget
        if failed.status == 402:
            return self.billing_budget
        if failed.status == 429 and patient:
            return math.inf
        return self.status_budget

    def backoff(self, tries: int) -> float:
        """Exponential from `base` to `cap`, jittered downwards so that no one waits longer than said."""
        delay = min(self.base * 2.0 ** min(tries - 1, 30), self.cap)
        return delay * (1.0 - self.jitter * _dice.random())


def retryable(status: int, empty_body: bool = False) -> bool:
    """Can the same request succeed later? A 400 with no body is a proxy's, not the server's."""
    return status in (0, 402, 408, 409, 429) or status >= 500 or (status == 400 and empty_body)


def should_retry(headers: Mapping[str, str]) -> bool | None:
    """The server's own word, from `x-should-retry`."""
    return {"true": True, "false": False}.get(headers.get("x-should-retry", ""))


def retry_after(headers: Mapping[str, str], now: float | None = None) -> float | None:
    """Seconds to wait by the response's headers: milliseconds, then seconds, then a date; at most 60.

    >>> retry_after({"retry-after-ms": "1500", "retry-after": "9"})
    1.5
    """
    for name, scale in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            seconds = float(headers.get(name, "")) * scale
        except ValueError:
            continue
        if 0 < seconds <= MAX_RETRY_AFTER:
            return seconds
    try:
        at = email.utils.parsedate_to_datetime(headers.get("retry-after", "")).timestamp()
    except (TypeError, ValueError, IndexError):
        return None
    seconds = at - _server_time(headers, now)
    return seconds if 0 < seconds <= MAX_RETRY_AFTER else None


def _server_time(headers: Mapping[str, str], now: float | None) -> float:
    """The server's clock by its Date header, since ours may be off; ours if it sent none."""
    try:
        return email.utils.parsedate_to_datetime(headers.get("date", "")).timestamp()
    except (TypeError, ValueError, IndexError):
        return time.time() if now is None else now
