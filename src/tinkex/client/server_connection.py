"""`ServerConnection`: a transport and the server's settings, shared by all clients of one ServiceClient.

Promises: the settings are fetched once, before the first call; errors that users see go to telemetry too, if
it is on; an invalid header is refused when the client is made.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Coroutine, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

from tinkex.client import credentials
from tinkex.client.future import APIFuture, start
from tinkex.client.http_transport import HttpTransport
from tinkex.client.retry import RetryConfig
from tinkex.client.telemetry import Telemetry
from tinkex.client.transport import CLOSED, NO_CONTEXT, CallContext, Transport
from tinkex.config import HOSTED_URL, Settings, Timeouts, console_url, normalize_url
from tinkex.errors import ClientClosedError, InvalidInputError, TinkerError
from tinkex.fair_permits import FairPermits
from tinkex.types.config import ClientConfigResponse
from tinkex.wire import ops
from tinkex.wire.ops import Op

Req = TypeVar("Req")
Reply = TypeVar("Reply")
ONCE = CallContext(retry=RetryConfig(enable_retry_logic=False))
_NO_TELEMETRY = nullcontext()

_HEADER_NAME = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII)
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e\xa0-\xff]*")
# Headers that may carry a credential, by their names or by how their values begin.
_SECRET_NAME = re.compile(r"auth|cookie|key|token|secret|passw|credential|signature|session|jwt", re.I)
_SECRET_VALUE = re.compile(r"(basic|bearer|digest)\b|tml-|eyJ", re.I)


class ServerConnection:
    """One server, its settings, and the transport to it. Making one sends nothing."""

    def __init__(
        self,
        transport: Transport,
        settings: Settings,
        timeouts: Timeouts | None = None,
        headers: Mapping[str, str] | None = None,
        telemetry: Telemetry | None = None,
    ) -> None:
        self.transport = transport
        self.settings = settings
        self.timeouts = timeouts or Timeouts()
        self.headers = headers or {}  # the user's own, sent with every request
        self.telemetry = telemetry
        self.config = ClientConfigResponse()
        # Bytes of results being fetched.
        self.responses = FairPermits(self.config.inflight_response_bytes_semaphore_size)
        self.closed = False
        self._opened = False
        self._opening: asyncio.Task[None] | None = None

    @property
    def base_url(self) -> str:
        return self.transport.base_url

    def console_url(self, page: str) -> str:
        """The URL of a page of the server's console; embedded there is none, and the home is shown."""
        if not self.base_url:
            return self.settings.home.absolute().as_uri()
        return console_url(self.base_url, page)

    @property
    def credential_source(self) -> str:
        """Where the credential came from, as `connect(source=…)` takes it; "" where none is needed."""
        credential = self.transport.credential
        return "" if credential is None else credential.source

    def check_open(self) -> None:
        if self.closed:
            raise ClientClosedError(CLOSED)

    async def open(self) -> None:
        """Fetch the server's settings, once; a failure is raised to every caller, and later ones retry it."""
        if self._opened:
            return
        if self._opening is None or self._opening.done():
            self._opening = asyncio.get_running_loop().create_task(self._open())
        await asyncio.shield(self._opening)

    async def _open(self) -> None:
        self.config = await self.transport.open()
        self.responses.resize(self.config.inflight_response_bytes_semaphore_size)
        self._opened = True

    def call(
        self, op: Op[Req, Reply], request: Req, context: CallContext = NO_CONTEXT
    ) -> Coroutine[Any, Any, Reply]:
        """Do one operation, opening the connection first if need be."""
        if self._opened and self.telemetry is None and not self.closed:  # as usual: no coroutine in between
            return self.transport.call(op, request, context)
        return self._call(op, request, context)

    async def _call(self, op: Op[Req, Reply], request: Req, context: CallContext) -> Reply:
        self.check_open()
        with self.reporting(op.name):
            if not self._opened:
                await self.open()
            return await self.transport.call(op, request, context)

    def submit(self, op: Op[Req, Reply], request: Req, context: CallContext = NO_CONTEXT) -> APIFuture[Reply]:
        """`call` from any thread, as a future."""
        self.check_open()
        return start(lambda: self.call(op, request, context), op.name)

    def reporting(self, what: str) -> AbstractContextManager[None]:
        """Report errors of a block to telemetry, if it is on, without waiting for that."""
        return _NO_TELEMETRY if self.telemetry is None else _reporting(self.telemetry, what)

    async def close(self) -> None:
        if not self.closed:
            self.closed = True
            if self.telemetry is not None:
                await self.telemetry.close(self.timeouts.close)
            await self.transport.aclose()


@contextmanager
def _reporting(telemetry: Telemetry, what: str) -> Generator[None]:
    try:
        yield
    except TinkerError as error:
        if not isinstance(error, ClientClosedError):
            telemetry.log_exception(error, during=what)
        raise


def connect(
    base_url: str | None = None,
    api_key: str | None = None,
    *,
    settings: Settings | None = None,
    headers: Mapping[str, str] | None = None,
    source: str | None = None,
    timeouts: Timeouts | None = None,
    telemetry: bool | None = None,
    retries: bool = True,
) -> ServerConnection:
    """A connection to a server: the one given, TINKER_BASE_URL's, or the hosted one. Sends nothing yet.

    `source` says where to find the credential, for a client that came from another process. `telemetry` says
    whether to report failures to the server; None: as TINKER_TELEMETRY says, else no. Without `retries` the
    first failure of a call is raised.
    """
    settings = settings or Settings.read()
    if settings.log:
        _log_to_stderr(settings.log)
    url = normalize_url(base_url or settings.base_url or HOSTED_URL)
    headers = check_headers(headers)
    if source is None:
        credential = credentials.resolve(settings, api_key, url)
    else:
        credential = credentials.resolve_from_source(source, settings)
    all_headers = {**check_headers(dict(settings.extra_headers)), **headers}
    transport = HttpTransport(
        url, credential, headers=all_headers, timeouts=timeouts, direct=not settings.http_proxy,
        retries=retries, credential_cmd=settings.credential_cmd,
    )  # fmt: skip

    def allowed(name: str, value: str) -> bool:
        return is_public(name, value) and not any(
            header and header in value for header in all_headers.values()
        )

    events: Telemetry | None = None
    if settings.telemetry if telemetry is None else telemetry:
        events = Telemetry(lambda request: transport.call(ops.SEND_TELEMETRY, request, ONCE), allowed)
    return ServerConnection(transport, settings, timeouts, headers, events)


def _log_to_stderr(level: str) -> None:
    """Set up logging as TINKER_LOG says, unless the program has handlers already."""
    log = logging.getLogger("tinkex")
    if not log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.DEBUG if level.lower() == "debug" else logging.INFO)


def check_headers(headers: Mapping[str, str] | None) -> dict[str, str]:
    """`headers` by their names in lower case; an error about an invalid one does not show its value."""
    if headers is not None and not isinstance(headers, Mapping):
        raise InvalidInputError(f"headers must be a dict of strings, got {type(headers).__name__}")
    for name, value in (headers or {}).items():
        if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
            raise InvalidInputError(f"{name!r} cannot be the name of a header: use letters, digits and '-'")
        if not isinstance(value, str):
            raise InvalidInputError(f"the header {name!r} must be a string, got {type(value).__name__}")
        if not _HEADER_VALUE.fullmatch(value):
            problem = "has a line break in it, or another control character"
            raise InvalidInputError(f"the header {name!r} {problem}")
    return {name.lower(): value for name, value in (headers or {}).items()}


def is_public(name: str, value: str) -> bool:
    """May this header be pickled or reported? Not if it looks like a credential."""
    return not _SECRET_NAME.search(name) and not _SECRET_VALUE.match(value)
