"""Calls that failed, as the errors a user reads: the URL, the cause, how often and for how long it was tried.

Pure functions; decides nothing about retries (see retry.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tinkex.errors import APIConnectionError, APIError, APITimeoutError, Request, Response, status_error
from tinkex.wire import codec
from tinkex.wire.ops import Op


def connection_error(op: Op[Any, Any], url: str, cause: BaseException) -> APIConnectionError:
    """No answer came."""
    request = Request(op.method, url)
    if isinstance(cause, TimeoutError) and not isinstance(cause, ConnectionError):
        return APITimeoutError(request, f"no answer from {op.method} {url} in time")
    return APIConnectionError(request, f"no connection to {url}: {root_cause(cause)}")


def root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error) or type(error).__name__


def answer_error(
    op: Op[Any, Any], url: str, status: int, headers: Mapping[str, str], body: bytes
) -> APIError:
    """An answer came that is a refusal."""
    text, parsed = codec.decode_error(status, headers, body)
    said = body[:4096].decode(errors="replace")
    response = Response(status, dict(headers.items()), said, Request(op.method, url))
    return status_error(f"{status} from {op.method} {url}: {text}", response, parsed)


def with_history(error: APIError, tries: int, elapsed: float, state: str = "") -> APIError:
    """The error, saying how often and how long it was tried, and what is known of the host."""
    tried = f"{tries} attempts in {elapsed:.1f} s" if tries > 1 else ""
    if history := "; ".join(filter(None, (tried, state))):
        error.message = f"{error.message} ({history})"
        error.args = (error.message,)
    return error
