"""The one retry policy: what is retried, when, and for how long.

    no connection, never reached before   every failure within 10 s, then an error that names the URL
    no connection, reached before         a warning at 10 s, retried for 5 minutes
    402 billing                           every 5 s, for as long as the server's settings allow
    408, 409, 429, 5xx, empty 400         Retry-After if given, else jittered backoff, for 5 minutes;
                                          429 on sampling: no limit but the progress timeout
    a poll held longer than our timeout   for as long as the server responds to other calls
    401 on a JWT                          once, with another JWT
    anything else                         never

After a few failures to connect in a row the host's circuit opens (limits.py): all its callers then wait for
one shared probe, each for as long as the table allows. `x-should-retry` overrides the table; `retry-after-ms`
overrides `retry-after` in seconds, which overrides a date; a minute is the maximum.
Pure: it decides from a failure and the elapsed time.
"""

from __future__ import annotations

import email.utils
import math
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tinkex.errors import APIError, InvalidInputError
from tinkex.strict import check_seconds, strict

MAX_RETRY_AFTER = 60.0
_random = random.Random()  # not the global one: retries must not consume numbers of a user's seed


@strict
class RetryConfig:
    """How a sampling client queues and retries; the fields are those of the official SDK.

    `max_connections` limits the samples in flight (None: what the server allows). When no sample has
    succeeded for `progress_timeout` seconds, those in flight fail.
    """

    max_connections: int | None = None
    progress_timeout: float = 7200.0
    retry_delay_base: float = 0.5
    retry_delay_max: float = 10.0
    jitter_factor: float = 0.25
    enable_retry_logic: bool = True
    enable_stuck_detection: bool = True
    retryable_exceptions: tuple[type[BaseException], ...] = ()  # retried in addition to the policy's

    def __post_init__(self) -> None:
        if (count := self.max_connections) is not None and (type(count) is not int or count < 1):
            raise self._wrong("max_connections", "a whole number from 1 on")
        for name in ("progress_timeout", "retry_delay_base", "retry_delay_max"):
            check_seconds(f"RetryConfig.{name}", getattr(self, name))
        jitter = self.jitter_factor
        if isinstance(jitter, bool) or not isinstance(jitter, int | float) or not 0 <= jitter <= 1:
            raise self._wrong("jitter_factor", "a number in [0, 1]")
        for name in ("enable_retry_logic", "enable_stuck_detection"):
            if not isinstance(getattr(self, name), bool):
                raise self._wrong(name, "True or False")
        kinds = self.retryable_exceptions
        if not isinstance(kinds, tuple) or not all(
            isinstance(k, type) and issubclass(k, BaseException) for k in kinds
        ):
            raise self._wrong("retryable_exceptions", "a tuple of exception classes")

    def _wrong(self, name: str, allowed: str) -> InvalidInputError:
        return InvalidInputError(f"RetryConfig.{name} must be {allowed}, got {getattr(self, name)!r}")


def check_sampler_settings(retry_config: object, record_stability_info: object) -> None:
    if retry_config is not None and not isinstance(retry_config, RetryConfig):
        raise InvalidInputError(f"retry_config must be a RetryConfig, got {type(retry_config).__name__}")
    if not isinstance(record_stability_info, bool):
        raise InvalidInputError(f"record_stability_info must be True or False, got {record_stability_info!r}")


@dataclass(frozen=True)
class Attempt:
    """A failed attempt: an HTTP status with its headers, or status 0, no response and its cause."""

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    cause: BaseException | None = None
    empty_body: bool = False
    reached: bool = False  # has this host ever responded?
    took: float = 0.0  # seconds from sending to failing
    error: APIError | None = None  # that it is if there is no other attempt


@dataclass(frozen=True)
class RetryPolicy:
    """Decides after each failed attempt; one instance serves every request of a transport."""

    connect_budget: float = 10.0
    lost_budget: float = 300.0
    status_budget: float = 300.0
    billing_budget: float = 3600.0
    billing_delay: float = 5.0
    base: float = 0.5
    cap: float = 10.0
    jitter: float = 0.25
    enabled: bool = True
    queues: bool = True  # wait out a 429 even if `enabled` is False: it is backpressure, not a failure
    probe_cap: float = 2.0  # seconds, at most, between two probes of a host whose circuit is open

    def tuned(self, config: RetryConfig) -> RetryPolicy:
        return replace(
            self, base=config.retry_delay_base, cap=config.retry_delay_max, jitter=config.jitter_factor,
            enabled=config.enable_retry_logic, queues=config.enable_retry_logic,
        )  # fmt: skip

    def decide(self, failed: Attempt, tries: int, elapsed: float, *, patient: bool = False) -> float | None:
        """Seconds to wait before the next attempt, or None to give up.

        `tries` counts the failures so far (1 after the first). `patient` marks work for which a 429 is
        backpressure, waited out without a limit.
        """
        forced = {"true": True, "false": False}.get(failed.headers.get("x-should-retry", ""))
        queueing = self.queues and patient and failed.status == 429
        if forced is False or not (self.enabled or queueing):
            return None
        if forced is not True and not retryable(failed.status, failed.empty_body):
            return None
        budget = self._budget(failed, patient)
        delay = retry_after(failed.headers)
        if delay is None:
            delay = self.billing_delay if failed.status == 402 else self.backoff(tries)
        if failed.status == 0 and not failed.reached:
            budget -= failed.took  # the next attempt may take as long, and must end within the budget
        if elapsed + delay > budget:
            # One last attempt at the very end, rather than giving up with time left.
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

    def patience(self, reached: bool, elapsed: float) -> float:
        """Seconds for which a caller still waits for a host whose circuit is open."""
        if not self.enabled:
            return 0.0
        return max(0.0, (self.lost_budget if reached else self.connect_budget) - elapsed)

    def probe_delay(self, probes: int) -> float:
        """Seconds before the next probe, after `probes` failed ones."""
        return min(self.backoff(probes + 1), self.probe_cap)

    def backoff(self, tries: int) -> float:
        """Exponential from `base` to `cap`; jitter only shortens it."""
        delay = min(self.base * 2.0 ** min(tries - 1, 30), self.cap)
        return delay * (1.0 - self.jitter * _random.random())


def retryable(status: int, empty_body: bool = False) -> bool:
    """Can the same request succeed later? A 400 with no body is a proxy's, not the server's."""
    return status in (0, 402, 408, 409, 429) or status >= 500 or (status == 400 and empty_body)


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait by the response's headers: milliseconds, else seconds, else a date; 60 if it is more.

    >>> retry_after({"retry-after-ms": "1500", "retry-after": "9"})
    1.5
    """
    for name, scale in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            seconds = float(headers.get(name, "")) * scale
        except ValueError:
            continue
        if seconds > 0:
            return min(seconds, MAX_RETRY_AFTER)
    # By the server's clock, if its Date header shows it: ours may be wrong.
    if (at := _timestamp(headers.get("retry-after", ""))) is None:
        return None
    seconds = at - (_timestamp(headers.get("date", "")) or time.time())
    return min(seconds, MAX_RETRY_AFTER) if seconds > 0 else None


def _timestamp(date: str) -> float | None:
    try:
        return email.utils.parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError, IndexError):
        return None
