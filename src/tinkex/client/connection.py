"""A server as a client sees it: the transport to it, and the settings it asked us to honour.

Promises: the settings are fetched once, before the first call; every client object of one ServiceClient
shares the connection. Knows nothing of sessions (see session.py): REST calls need none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, TypeVar

from tinkex._version import __version__
from tinkex.client import auth
from tinkex.client.future import APIFuture, start
from tinkex.client.transport import CLOSED, HttpTransport, Transport
from tinkex.config import HOSTED_URL, Settings, Timeouts, normalize_url
from tinkex.errors import ClientClosedError, NotFoundError
from tinkex.types.config import ClientConfigRequest, ClientConfigResponse
from tinkex.wire import ops
from tinkex.wire.ops import Op

Req = TypeVar("Req")
Reply = TypeVar("Reply")


class Connection:
    """One server, its settings, and the way to it. Made without any traffic."""

    def __init__(self, transport: Transport, settings: Settings, timeouts: Timeouts | None = None) -> None:
        self.transport = transport
        self.settings = settings
        self.timeouts = timeouts or Timeouts()
        self.config = ClientConfigResponse()
        self.closed = False
        self._opened = False
        self._opening: asyncio.Task[None] | None = None

    @property
    def base_url(self) -> str:
        return self.transport.base_url

    @property
    def credential_source(self) -> str:
        """Where the credential came from, as `connect(source=…)` takes it; "" where none is needed."""
        return self.transport.credential.source if isinstance(self.transport, HttpTransport) else ""

    def check_open(self) -> None:
        if self.closed:
            raise ClientClosedError(CLOSED)

    async def open(self) -> None:
        """Fetch the server's settings, once; a failure is raised to every caller and tried anew later."""
        if self._opened:
            return
        if self._opening is None or self._opening.done():
            self._opening = asyncio.get_running_loop().create_task(self._open())
        await asyncio.shield(self._opening)

    async def _open(self) -> None:
        request = ClientConfigRequest(sdk_version=__version__)
        try:
            self.config = await self.transport.call(ops.GET_CLIENT_CONFIG, request)
        except NotFoundError:
            pass  # an older or other server: the defaults describe it
        if isinstance(self.transport, HttpTransport):
            self.transport.honour(self.config)
        self._opened = True

    async def call(self, op: Op[Req, Reply], request: Req, **context: Any) -> Reply:
        """Do one operation, opening the connection first if need be."""
        self.check_open()
        if not self._opened:
            await self.open()
        return await self.transport.call(op, request, **context)

    def submit(self, op: Op[Req, Reply], request: Req, **context: Any) -> APIFuture[Reply]:
        """The same from any thread, as a future."""
        self.check_open()
        return start(lambda: self.call(op, request, **context), op.name)

    async def close(self) -> None:
        if not self.closed:
            self.closed = True
            await self.transport.aclose()


def connect(
    base_url: str | None = None,
    api_key: str | None = None,
    *,
    settings: Settings | None = None,
    headers: Mapping[str, str] | None = None,
    source: str | None = None,
    timeouts: Timeouts | None = None,
) -> Connection:
    """A connection to a server: the one given, TINKER_BASE_URL's, or the hosted one. Sends nothing yet.

    `source` says where to find the credential, for a client that came from another process.
    """
    settings = settings or Settings.read()
    if settings.log:
        _log_to_stderr(settings.log)
    url = normalize_url(base_url or settings.base_url or HOSTED_URL)
    if source is not None:
        credential = auth.resolve_from_source(source, settings)
    else:
        credential = auth.resolve(settings, api_key, url)
    transport = HttpTransport(
        url,
        credential,
        headers={**dict(settings.extra_headers), **(headers or {})},
        timeouts=timeouts,
        direct=not settings.http_proxy,
    )
    return Connection(transport, settings, timeouts)


def _log_to_stderr(level: str) -> None:
    """What TINKER_LOG asks for; once, and only where nobody has set logging up."""
    log = logging.getLogger("tinkex")
    if not log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.DEBUG if level.lower() == "debug" else logging.INFO)
