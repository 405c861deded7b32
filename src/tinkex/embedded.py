"""Where the client and the service meet: `tinkex.ServiceClient` can also run models in this process."""

from __future__ import annotations

from tinkex.client.server_connection import ServerConnection
from tinkex.client.service import RemoteServiceClient
from tinkex.config import Settings


class ServiceClient(RemoteServiceClient):
    """The way to a Tinker server: the one given, TINKER_BASE_URL's, the hosted one, or this process.

    >>> with ServiceClient(base_url="http://127.0.0.1:8000") as service:        # doctest: +SKIP
    ...     run = service.create_lora_training_client("Qwen/Qwen3-8B", rank=32)
    """

    def _connect_embedded(self, settings: Settings) -> ServerConnection:
        from tinkex import local

        return local.connection(settings)
