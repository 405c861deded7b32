"""Every exception the project raises, with the official SDK's names kept.

    TinkerError
    ├── InvalidInputError (ValueError) · CredentialError · TokenizerError · ModelError
    ├── ClientClosedError, ForkedClientError (RuntimeError) · PassIncompleteError
    ├── ResultTimeoutError (TimeoutError) · RequestFailedError · RunLostError · RecoveryFailedError
    └── APIError
        ├── APIResponseValidationError
        ├── APIConnectionError
        │   └── APITimeoutError · StreamBrokenError
        └── APIStatusError
            ├── BadRequestError 400 · AuthenticationError 401 · BillingError 402
            ├── PermissionDeniedError 403 · NotFoundError 404 · ConflictError 409
            ├── ExpiredError 410 · UnprocessableEntityError 422 · RateLimitError 429
            └── InternalServerError ≥500 · StreamingUnsupportedError

All are picklable. Knows no HTTP library: a response is anything with `status_code`, `headers` and `text`.
"""

from __future__ import annotations

import copyreg
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar


class RequestErrorCategory(StrEnum):
    """Whose fault a failed request is. Parsing ignores case; an unknown string is `unknown`."""

    Unknown = "unknown"
    Server = "server"
    User = "user"

    @classmethod
    def parse(cls, text: object) -> RequestErrorCategory:
        try:
            return cls(str(text).lower())
        except ValueError:
            return cls.Unknown


_Body = dict[str, Any] | list[Any] | str | int | float | bool | bytes | None  # a reply's JSON, or its bytes


@dataclass(frozen=True)
class FailedRequest:
    """The request of an error: enough to name it, never its credentials."""

    method: str = ""
    url: str = ""


@dataclass(frozen=True)
class FailedResponse:
    """The reply of an error."""

    status_code: int
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    text: str = ""
    request: FailedRequest = field(default_factory=FailedRequest)


class TinkerError(Exception):
    """The base class of every error of this package."""

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
    """A base model could not be found or loaded; the message says why, and what to do."""


class ClientClosedError(TinkerError, RuntimeError):
    """The client was closed; make a new one."""


class ForkedClientError(TinkerError, RuntimeError):
    """The client was made before a fork and cannot be used in the child."""


class PassIncompleteError(TinkerError):
    """An optim_step was not sent, because only a part of the pass before it was accepted."""


class ResultTimeoutError(TinkerError, TimeoutError):
    """A wait ran out of time. Nothing was cancelled: wait again for the same result."""


class RequestFailedError(TinkerError):
    """The server accepted the request and failed it; `category` says whose fault it was."""

    received: Sequence[Any] = ()  # of a stream: what arrived before the failure

    def __init__(self, message: str, request_id: str, category: RequestErrorCategory) -> None:
        super().__init__(message)
        self.message = message
        self.request_id = request_id
        self.category = category


class RunLostError(TinkerError):
    """A call on a run that a RecoveryPolicy found lost; it was not sent."""

    def __init__(self, run_id: str, reason: str) -> None:
        super().__init__(f"run {run_id} is lost: {reason}")
        self.run_id = run_id
        self.reason = reason


class RecoveryFailedError(TinkerError):
    """A RecoveryPolicy could not resume a lost run; the last failure is the cause."""


class APIError(TinkerError):
    """A request without a usable reply."""

    def __init__(self, message: str, request: Any = None, *, body: _Body = None) -> None:
        super().__init__(message)
        self.message = message
        self.request = request
        self.body = body


class APIResponseValidationError(APIError):
    """A reply that does not follow the protocol."""

    def __init__(self, response: Any, body: _Body = None, message: str | None = None) -> None:
        message = message or "The server's reply does not follow the protocol."
        super().__init__(message, getattr(response, "request", None), body=body)
        self.response = response
        self.status_code = getattr(response, "status_code", None)


class APIConnectionError(APIError):
    """No reply; the message names the URL, the cause and the attempts made."""

    default = "Connection error."

    def __init__(self, request: Any = None, message: str | None = None) -> None:
        super().__init__(message or self.default, request)


class APITimeoutError(APIConnectionError):
    """No reply within the time limit."""

    default = "Request timed out."


class StreamBrokenError(APIConnectionError):
    """A stream ended before its result; `received` has what arrived of each sequence that had begun."""

    default = "The stream broke off."
    received: Sequence[Any] = ()


class APIStatusError(APIError):
    """An HTTP status of 4xx or 5xx."""

    by_status: ClassVar[dict[int, type[APIStatusError]]] = {}

    def __init_subclass__(cls, status: int | None = None) -> None:
        if status is not None:
            cls.by_status[status] = cls

    def __init__(self, message: str, response: Any, body: _Body = None) -> None:
        super().__init__(message, getattr(response, "request", None), body=body)
        self.response = response
        self.status_code: int = response.status_code


class BadRequestError(APIStatusError, status=400):
    """400: the request is wrong."""


class AuthenticationError(APIStatusError, status=401):
    """401: the key is missing, unknown or revoked."""


class BillingError(APIStatusError, status=402):
    """402: the account cannot pay for this."""


class PermissionDeniedError(APIStatusError, status=403):
    """403: this key may not do that."""


class NotFoundError(APIStatusError, status=404):
    """404: it does not exist, or belongs to someone else."""


class ConflictError(APIStatusError, status=409):
    """409: it conflicts with what exists."""


class ExpiredError(APIStatusError, status=410):
    """410: the result or the session has expired."""


class UnprocessableEntityError(APIStatusError, status=422):
    """422: well-formed, but not something this server can do."""


class RateLimitError(APIStatusError, status=429):
    """429: too many requests."""


class InternalServerError(APIStatusError):
    """5xx: the server failed."""


class StreamingUnsupportedError(APIStatusError):
    """This server cannot stream samples; `sample()` returns the same result at once."""


class ExperimentalWarning(FutureWarning):
    """The call may change without notice."""


def status_error(message: str, response: FailedResponse, body: _Body = None) -> APIStatusError:
    """The exception for an HTTP status."""
    other = InternalServerError if response.status_code >= 500 else APIStatusError
    return APIStatusError.by_status.get(response.status_code, other)(message, response, body)


def is_user_error(error: BaseException) -> bool:
    """Whether a retry cannot help: 4xx other than 402, 408, 409, 410 and 429, or category `user`."""
    if isinstance(error, APIStatusError):
        return 400 <= error.status_code < 500 and error.status_code not in (402, 408, 409, 410, 429)
    if isinstance(error, RequestFailedError):
        return error.category is RequestErrorCategory.User
    return isinstance(error, InvalidInputError)
