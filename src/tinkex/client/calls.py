"""What RestClient and AdminClient share: a connection, one way to make a call, and how they end.

Promises: a client made on its own sends nothing until its first call and opens no session; one that a
ServiceClient made uses that one's connection and leaves it open. Knows no operation in particular.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self, TypeVar

from tinkex.client.connection import Connection, connect
from tinkex.client.future import APIFuture, completed, start
from tinkex.errors import InvalidInputError
from tinkex.wire.ops import Op

Req = TypeVar("Req")
Reply = TypeVar("Reply")


class Calls:
    """A client that makes single calls, each a future."""

    def __init__(
        self, connection: Connection | None = None, *, base_url: str | None = None, api_key: str | None = None
    ) -> None:
        if connection is not None and (base_url is not None or api_key is not None):
            raise InvalidInputError(
                f"{type(self).__name__} takes a connection, or base_url and api_key, not both"
            )
        self._owns_connection = connection is None
        self._connection = connection or connect(base_url, api_key)

    def _submit(self, op: Op[Req, Reply], request: Req, method: str) -> APIFuture[Reply]:
        return self._connection.submit(op, request, method=method)

    def get_telemetry(self) -> None:
        """Nothing: these clients send no telemetry."""

    def close(self) -> APIFuture[None]:
        """Close the connection, if this client made it."""
        if not self._owns_connection:
            return completed(None, "close")
        return start(self._connection.close, "close")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close().result(self._connection.timeouts.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.close().result_async(self._connection.timeouts.close)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._connection.base_url!r})"


def check_id(name: str, value: str) -> str:
    """`value`, if it can stand in the path of a URL."""
    if not isinstance(value, str) or not value or "/" in value:
        raise InvalidInputError(f"{name} must be an id without '/', as the server gave it, got {value!r}")
    return value
