"""Forwards a request to the server that owns its session, and relays the response (streaming).

At most one hop. If the owner is unreachable it answers 503, and the client retries while another server
takes over.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator

from starlette.responses import Response, StreamingResponse

from tinkex.client.http1 import HttpRequest
from tinkex.client.http_pools import LIBRARY_ERRORS, LibraryClient
from tinkex.server.bodies import IncomingRequest
from tinkex.service.peers import Elsewhere
from tinkex.service.refusal import Refusal

FORWARDED = "x-tinkex-forwarded"
CONNECT_SECONDS = 3.0
IDLE_CONNECTIONS = 64
# Of one connection, not of the request.
_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "content-length", "host"}


class Forwarder:
    """Connections to the other servers."""

    def __init__(self) -> None:
        self._client = LibraryClient(math.inf, CONNECT_SECONDS, IDLE_CONNECTIONS, streaming=True)

    async def send(self, http: IncomingRequest, body: bytes, there: Elsewhere) -> Response:
        """The other server's response."""
        if FORWARDED in http.headers or not there.url:
            raise Refusal(there.status, there.message)
        scope = http.scope
        path, query = scope["raw_path"].decode("latin-1"), scope["query_string"].decode("latin-1")
        url = f"{there.url}{path}{'?' if query else ''}{query}"
        headers = {name: value for name, value in http.headers.items() if name not in _HOP}
        if peer := scope.get("client"):
            headers["x-forwarded-for"] = peer[0]
        headers[FORWARDED] = "1"
        try:
            stream = await self._client.stream(
                HttpRequest(scope["method"], url, headers, bytes(body) or None)
            )
        except (OSError, *LIBRARY_ERRORS) as error:
            why = (
                f"the server of this session does not answer ({type(error).__name__}): ask again in a moment"
            )
            raise Refusal(503, why) from error
        except asyncio.CancelledError:  # uvicorn cancels it at the end of its drain time
            raise Refusal(503, "this server is stopping: ask again in a moment") from None

        async def pieces() -> AsyncGenerator[bytes]:
            try:
                async for piece in stream.pieces:
                    yield piece
            finally:
                await stream.aclose()

        kept = {name: value for name, value in stream.headers.items() if name.lower() not in _HOP}
        length = stream.headers.get("content-length")
        if length is not None:
            kept["content-length"] = length
        return StreamingResponse(pieces(), stream.status, kept)

    async def aclose(self) -> None:
        await self._client.aclose()
