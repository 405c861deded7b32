"""The console put together: of a server, with everything, or of a home directory, to be looked at alone."""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.routing import Route

from tinkex.server.console.change_pages import RunChanges
from tinkex.server.console.console_data import ConsoleData
from tinkex.server.console.event_pages import LiveStreams
from tinkex.server.console.live_service import LiveService
from tinkex.server.console.run_pages import RunPages
from tinkex.server.console.site import ConsoleSite
from tinkex.server.console.visitors import KeyVisitors
from tinkex.server.gateway import Gateway


def server_console(gateway: Gateway, secret: bytes) -> list[Route]:
    """The routes of a server's console."""
    service, counts = gateway.service, gateway.metrics.requests

    def count(status: int) -> None:
        counts["console", status] += 1

    site = ConsoleSite(
        KeyVisitors(gateway.authenticator, secret, gateway.public_url),
        urlsplit(gateway.public_url).path,
        ready=lambda: service.ready,
        clean=gateway.without_paths,
        count=count,
    )
    data = ConsoleData(service.ledger, service.home, service.config.session_lapse, LiveService(service))
    streams = LiveStreams(lambda: gateway.draining)
    RunPages(site, data, streams)
    RunChanges(site, service)
    return site.routes
