"""`Transport`: the interface through which every call of a client leaves it.

Implemented by `HttpTransport` (http_transport.py) and by `LocalTransport` (tinkex/local.py), which calls a
service in the same process. An implementation promises one reply or one typed error for each call.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from tinkex.client.credentials import Credential
from tinkex.client.retry import RetryConfig, RetryPolicy
from tinkex.types.config import ClientConfigResponse
from tinkex.types.sampling import SampleEvent, SampleRequest
from tinkex.wire.ops import Op

AnyOp = Op[Any, Any]
QueueListener = Callable[[str, str | None], None]  # called with a queue state and its reason
CLOSED = "this client was closed; make a new ServiceClient"


@dataclass(frozen=True, slots=True)
class CallContext:
    """Hints for transports that send over a network: headers, permits, retries; and how to decode the reply.

    In this process only `retry` and `observer` mean something.
    """

    method: str = ""  # the public SDK method behind the call, for servers that count them
    source: str = ""  # the run or sampler that shares permits with the others; "": read from the request
    awaiting: AnyOp | None = None  # of retrieve_future: the operation whose result is asked for
    ready: bool = False  # of retrieve_future: the result is known to be ready, so no long poll is needed
    retry: RetryConfig | None = None  # the caller's own retry settings; None: the transport's policy
    observer: QueueListener | None = None  # called when the server pauses the call, and when it accepts it


NO_CONTEXT = CallContext()


class Transport(Protocol):
    """Where a client's calls go: an HTTP server, or a service in this process."""

    base_url: str  # "" for a service in this process

    @property
    def credential(self) -> Credential | None:
        """None where no credential is needed."""
        ...

    @property
    def policy(self) -> RetryPolicy: ...

    async def open(self) -> ClientConfigResponse:
        """Fetch the server's settings, and apply those that concern the transport. Called before any call."""
        ...

    async def call(self, op: AnyOp, request: Any, context: CallContext = NO_CONTEXT) -> Any: ...

    def stream(
        self, request: SampleRequest, context: CallContext = NO_CONTEXT
    ) -> AsyncGenerator[SampleEvent, None]:
        """A sample's events; closing the generator stops the work. StreamBrokenError if they break off."""
        ...

    async def aclose(self) -> None: ...
