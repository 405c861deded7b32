"""Every exception the project raises, with the official SDK's names kept.

    TinkerError
    ├── InvalidInputError (ValueError)       refused before anything was sent
    ├── CredentialError                      no usable key: nothing was sent
    ├── TokenizerError                       no tokenizer: what was tried, and how to do without a hub
    ├── ModelError                           no base model of that name could be had, and why
    ├── ClientClosedError (RuntimeError)     the client, or its session, is closed
    ├── ForkedClientError (RuntimeError)     used in a forked child without reconnecting
    ├── PassIncompleteError                  a step held back: part of its batch was refused
    ├── ResultTimeoutError (TimeoutError)    not there yet; the request goes on
    ├── RequestFailedError                   the server accepted the request and failed it
    ├── RunLostError                         noticed by a RecoveryPolicy's watch: nothing was sent
    ├── RecoveryFailedError                  a lost run could not be resumed: what was tried
    └── APIError
        ├── APIResponseValidationError       an answer that cannot be understood
        ├── APIConnectionError               no answer: url, cause and attempts are in the message
        │   ├── APITimeoutError
        │   └── StreamBrokenError            a stream that broke off: it has what came before
        └── APIStatusError                   an HTTP status that is an answer
            ├── BadRequestError 400 · AuthenticationError 401 · BillingError 402
            ├── PermissionDeniedError 403 · NotFoundError 404 · ConflictError 409
            ├── ExpiredError 410 · UnprocessableEntityError 422 · RateLimitError 429
            ├── InternalServerError ≥500
            └── StreamingUnsupportedError    this server has no streams: use sample()

Knows nothing of HTTP libraries: a response is anything with `status_code`, `headers` and `text`.
All are picklable.
"""

from __future__ import annotations

import copyreg
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class RequestErrorCategory(StrEnum):
    """Whose fault a failed request is; parsed without regard to case, unknown strings kept as `unknown`."""

    Unknown = "unknown"
    Server = "server"
    User = "user"

    @classmethod
    def parse(cls, text: object) -> RequestErrorCategory:
        try:
            return cls(str(text).lower())
        except ValueError:
            return cls.Unknown


_Body = dict[str, Any] | list[Any] | str | int | float | bool | bytes | None  # an answer's JSON, or its bytes


@dataclass(frozen=True)
class FailedRequest:
    """What was asked: enough to name it in a message, never its credentials."""

    method: str = ""
    url: str = ""


@dataclass(frozen=True)
class FailedResponse:
    """What was answered, as an exception carries it."""

    status_code: int
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    text: str = ""
    request: FailedRequest = field(default_factory=FailedRequest)


class TinkerError(Exception):
    """The base of everything this package raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Constructors differ, so rebuild from the finished state instead of the arguments.
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class InvalidInputError(TinkerError, ValueError):
    """Bad input, refused at the call; the message names what was given and what is allowed."""


class CredentialError(TinkerError):
    """No usable key could be found; the message names every way to give one."""


class TokenizerError(TinkerError):
    """A tokenizer could not be loaded; the message names what was tried."""


class ModelError(TinkerError):
    """A base model could not be had by its name; the message says why, and what to do."""


class ClientClosedError(TinkerError, RuntimeError):
    """The client was closed; make a new one."""


class ForkedClientError(TinkerError, RuntimeError):
    """The client was made before a fork and cannot be used in the child."""


class PassIncompleteError(TinkerError):
    """An optim_step was not sent, because only a part of the pass before it was accepted."""


class ResultTimeoutError(TinkerError, TimeoutError):
    """A wait ran out of time. Nothing was cancelled: wait again for the same result."""


class RequestFailedError(TinkerError):
    """The server took the request and failed it; `category` says whose fault it was."""

    def __init__(self, message: str, request_id: str, category: RequestErrorCategory) -> None:
        super().__init__(message)
        self.message = message
        self.request_id = request_id
        self.category = category
        self.received: Sequence[Any] = ()  # of a stream: what came before it failed


class RunLostError(TinkerError):
    """A call of a run that the server has lost, as a RecoveryPolicy has noticed; it was not sent."""

    def __init__(self, run_id: str, reason: str) -> None:
        super().__init__(f"run {run_id} is lost: {reason}")
        self.run_id = run_id
        self.reason = reason


class RecoveryFailedError(TinkerError):
    """A run is lost, and a RecoveryPolicy gave it up; the last failure is the cause."""


class APIError(TinkerError):
    """A request that did not get a usable answer."""

    def __init__(self, message: str, request: Any = None, *, body: _Body = None) -> None:
        super().__init__(message)
        self.message = message
        self.request = request
        self.body = body


class APIResponseValidationError(APIError):
    """An answer that does not follow the protocol."""

    def __init__(self, response: Any, body: _Body = None, message: str | None = None) -> None:
        super().__init__(
            message or "The server's answer does not follow the protocol.",
            getattr(response, "request", None),
            body=body,
        )
        self.response = response
        self.status_code = getattr(response, "status_code", None)


class APIConnectionError(APIError):
    """No answer at all; the message names the URL, the cause and the attempts made."""

    def __init__(self, request: Any = None, message: str = "Connection error.") -> None:
        super().__init__(message, request)


class APITimeoutError(APIConnectionError):
    """No answer within the time given."""

    def __init__(self, request: Any = None, message: str = "Request timed out.") -> None:
        super().__init__(request, message)


class StreamBrokenError(APIConnectionError):
    """A stream ended before its result.

    `received` has what came of it: for each sequence that had begun, its tokens and logprobs so far.
    """

    def __init__(self, request: Any = None, message: str = "The stream broke off.") -> None:
        super().__init__(request, message)
        self.received: Sequence[Any] = ()


class APIStatusError(APIError):
    """An HTTP status of 4xx or 5xx."""

    def __init__(self, message: str, response: Any, body: _Body = None) -> None:
        super().__init__(message, getattr(response, "request", None), body=body)
        self.response = response
        self.status_code: int = response.status_code


class BadRequestError(APIStatusError):
    """400: the request is wrong."""


class AuthenticationError(APIStatusError):
    """401: the key is missing, unknown or revoked."""


class BillingError(APIStatusError):
    """402: the account cannot pay for this now."""


class PermissionDeniedError(APIStatusError):
    """403: this key may not do that."""


class NotFoundError(APIStatusError):
    """404: no such thing, or not yours."""


class ConflictError(APIStatusError):
    """409: it clashes with what is there."""


class ExpiredError(APIStatusError):
    """410: the result, or the session, is no longer kept."""


class UnprocessableEntityError(APIStatusError):
    """422: well-formed, but not something this server can do."""


class RateLimitError(APIStatusError):
    """429: too many requests."""


class InternalServerError(APIStatusError):
    """5xx: the server failed."""


class StreamingUnsupportedError(APIStatusError):
    """This server offers no streams of samples; `sample()` gives the same, all at once."""


class ExperimentalWarning(FutureWarning):
    """The call may change without notice."""


_BY_STATUS: dict[int, type[APIStatusError]] = {
    400: BadRequestError,
    401: AuthenticationError,
    402: BillingError,
    403: PermissionDeniedError,
    404: NotFoundError,
    409: ConflictError,
    410: ExpiredError,
    422: UnprocessableEntityError,
    429: RateLimitError,
}


def status_error(message: str, response: FailedResponse, body: _Body = None) -> APIStatusError:
    """The exception for an HTTP status."""
    kind = _BY_STATUS.get(response.status_code)
    if kind is None:
        kind = InternalServerError if response.status_code >= 500 else APIStatusError
    return kind(message, response, body)


def is_user_error(error: BaseException) -> bool:
    """True if asking again cannot help: 4xx but for 402, 408, 409, 410 and 429, or category `user`."""
    if isinstance(error, APIStatusError):
        return 400 <= error.status_code < 500 and error.status_code not in (402, 408, 409, 410, 429)
    if isinstance(error, RequestFailedError):
        return error.category is RequestErrorCategory.User
    return isinstance(error, InvalidInputError)
