"""Samplers that travel to other processes, in a pickle or as a handle: what goes along, and how it is used.

Promises: the source of a credential travels, never the credential itself, nor a header that looks like one;
copies that come into one process share one session, so that a thousand of them beat one heart. Knows nothing
of sampling.
"""

from __future__ import annotations

import base64
import json
import logging
import weakref
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from tinkex.client.retry import RetryConfig
from tinkex.client.server_connection import ServerConnection, connect, may_travel
from tinkex.client.session import Session
from tinkex.config import Timeouts

log = logging.getLogger("tinkex")
_joined: weakref.WeakValueDictionary[tuple[Any, ...], Session] = weakref.WeakValueDictionary()


def way_of(connection: ServerConnection, sampler: object) -> dict[str, Any]:
    """How another process finds the server of a connection; warns of headers that `sampler` leaves here."""
    if not connection.base_url:
        raise TypeError(
            "this sampler runs inside this process and cannot be sent to another one; start a server "
            "with `tinkex serve` to share it"
        )
    headers = connection.headers
    if left := [name for name, value in headers.items() if not may_travel(name, value)]:
        log.warning(
            "%r travels without the header %s, which may hold a credential: "
            "SamplingClient.from_sampler_handle(…, default_headers_overrides=…) takes it there",
            sampler, ", ".join(left),
        )  # fmt: skip
    return {
        "base_url": connection.base_url,
        "headers": {name: value for name, value in headers.items() if name not in left},
        "timeouts": asdict(connection.timeouts),
        "credential": connection.credential_source,
    }


def joined_session(state: Mapping[str, Any], api_key: str | None) -> Session:
    """The session of a sampler that came from elsewhere, the same for all that came the same way."""
    headers, timeouts = state.get("headers", {}), Timeouts(**state.get("timeouts", {}))
    source = None if api_key else state["credential"]
    connection = connect(state["base_url"], api_key, source=source, headers=headers, timeouts=timeouts)
    ways = connection.credential_source, api_key or "", tuple(sorted(headers.items())), timeouts
    key = (state["base_url"], state["session_id"], *ways)
    session = _joined.get(key)
    if session is None or session.connection.closed:
        session = _joined[key] = Session(connection, session_id=state["session_id"])
    return session


def to_handle(state: Mapping[str, Any], retry_config: RetryConfig) -> str:
    """A sampler's state as a string. Classes of exceptions stay here: they may not exist over there."""
    config = asdict(replace(retry_config, retryable_exceptions=()))
    return base64.urlsafe_b64encode(json.dumps({**state, "retry_config": config}).encode()).decode()


def from_handle(handle: str) -> tuple[dict[str, Any], RetryConfig]:
    """What `to_handle` was given; ValueError, TypeError, … if this is no handle."""
    state: dict[str, Any] = json.loads(base64.urlsafe_b64decode(handle))
    config: dict[str, Any] = {**state.pop("retry_config"), "retryable_exceptions": ()}
    return state, RetryConfig(**config)
