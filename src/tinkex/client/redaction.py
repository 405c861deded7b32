"""Removes credentials from replies.

A server or proxy may echo request headers; their values are replaced before they reach errors, logs or
returned values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any, cast

REDACTED = "[redacted]"
_SECRET = re.compile("auth|cookie|key|secret|token", re.I)  # in the name of a header
_PLAIN = frozenset(
    {"accept", "content-type", "user-agent", "x-idempotency-key", "x-sdk-method", "x-sdk-version",
     "x-tinker-request-type", "x-tinker-sampling-backpressure"}
)  # fmt: skip
_BYTES = (bytes, bytearray)
_SHORTEST = 8  # a shorter value is no secret, and would occur in ordinary words

_LONGEST = 1024 * 1024  # of text that is searched for escaped secrets: a hostile server may send much more


def secrets_of(headers: Mapping[str, str]) -> list[str]:
    """The secret values among a request's headers.

    >>> secrets_of({"accept": "application/json", "x-api-key": "tml-1234"})
    ['tml-1234']
    """
    return [
        value
        for name, value in headers.items()
        if name not in _PLAIN and _is_secret(name) and len(value) >= _SHORTEST
    ]


@cache
def _is_secret(name: str) -> bool:
    return bool(_SECRET.search(name))


@lru_cache(maxsize=64)
def _spelled(secret: str) -> str:
    """A pattern of the secret in which any character may be escaped, as in JSON or in a URL, also twice."""
    return "".join(
        rf"(?:\\{{0,4}}{re.escape(c)}|\\{{1,4}}u(?i:{ord(c):04x})|"
        + "".join(f"%(?:25){{0,2}}(?i:{byte:02x})" for byte in c.encode())
        + ")"
        for c in secret
    )


def redacted(value: Any, secrets: list[str]) -> Any:
    """`value` without them, be they escaped: text, bytes, and what parsed JSON or headers consist of.

    >>> redacted({"x-api-key": ["tml-1"]}, ["tml-1"])
    {'x-api-key': ['[redacted]']}
    """
    if isinstance(value, _BYTES):  # first: every reply comes here
        for secret in secrets:
            if (raw := secret.encode("latin-1", "replace")) in value:
                value = value.replace(raw, REDACTED.encode())
            if value[:1] in b"{[" and len(value) <= _LONGEST and (b"\\" in value or b"%" in value):
                value = re.sub(_spelled(secret).encode("latin-1", "replace"), REDACTED.encode(), value)
    elif isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, REDACTED)
            if len(value) <= _LONGEST and ("\\" in value or "%" in value):
                value = re.sub(_spelled(secret), REDACTED, value)
    elif isinstance(value, Mapping):
        fields = cast(Mapping[Any, Any], value)
        return {redacted(name, secrets): redacted(item, secrets) for name, item in fields.items()}
    elif isinstance(value, list):
        return [redacted(item, secrets) for item in cast(list[Any], value)]
    return value
