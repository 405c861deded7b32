"""Embedded mode: a service and its engine behind the client's transport, inside the user's process.

Promises: the same client, the same service, no HTTP and no codec in between; one service per home directory
and process, shared by every ServiceClient. Injected into the client by `tinkex/__init__`, so that no client
module knows the engine's side.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Any

from tinkex.client.connection import Connection
from tinkex.config import Settings
from tinkex.errors import Request, Response, TinkerError, status_error
from tinkex.service.config import ServiceConfig
from tinkex.service.refusal import Caller, Refusal
from tinkex.service.service import Service
from tinkex.wire.ops import Op

log = logging.getLogger("tinkex")


class LocalTransport:
    """Calls a service directly. It is started by the first call, on the client's background loop."""

    base_url = ""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._caller = Caller(user="local")
        self._starting: asyncio.Task[None] | None = None

    async def call(
        self,
        op: Op[Any, Any],
        request: Any,
        *,
        awaiting: Op[Any, Any] | None = None,
        ready: bool = False,
        method: str = "",
    ) -> Any:
        await self._started()
        try:
            return await self._service.call(op, request, self._caller)
        except Refusal as refusal:
            response = Response(refusal.status, {}, refusal.message, Request(op.method, op.name))
            raise status_error(refusal.message, response) from None

    async def _started(self) -> None:
        if self._starting is None or (self._starting.done() and self._starting.exception() is not None):
            self._starting = asyncio.get_running_loop().create_task(self._service.start())
        if not self._starting.done():
            await asyncio.shield(self._starting)
        self._starting.result()

    async def aclose(self) -> None:
        """The service outlives its clients: it is the process's."""


_transports: dict[str, LocalTransport] = {}


def connection(settings: Settings) -> Connection:
    """The connection of a ServiceClient that was given neither a key nor a URL."""
    home = str(settings.home)
    if home not in _transports:
        try:
            import torch  # noqa: F401
        except ImportError:
            raise TinkerError(
                "no API key is set, so training would run in this process, but the engine is not installed. "
                "Either `pip install 'tinkex[engine]'`, or set TINKER_API_KEY (and TINKER_BASE_URL)"
            ) from None
        _transports[home] = LocalTransport(Service(ServiceConfig(home=settings.home)))
        print(f"tinkex: no API key set, so models run in this process; state is in {home}", file=sys.stderr)  # noqa: T201
    return Connection(_transports[home], settings)
