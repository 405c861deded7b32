"""The routes of the console: of a server, or read-only of a home directory."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tinkex.server.bodies import IncomingRequest
from tinkex.server.console.admin_pages import AdminChanges, AdminPages
from tinkex.server.console.change_pages import RunChanges
from tinkex.server.console.checkpoint_pages import CheckpointChanges, CheckpointPages
from tinkex.server.console.console_data import ConsoleData
from tinkex.server.console.event_pages import LiveStreams
from tinkex.server.console.export_pages import ExportPages
from tinkex.server.console.live_service import LiveService
from tinkex.server.console.now_page import NowPage
from tinkex.server.console.playground import Playground
from tinkex.server.console.rollout_pages import RolloutPages
from tinkex.server.console.run_pages import RunPages
from tinkex.server.console.site import ConsoleSite
from tinkex.server.console.token_texts import HomeTokenTexts, ServedTokenTexts
from tinkex.server.console.visitors import HomeVisitors, KeyVisitors
from tinkex.server.gateway import Gateway
from tinkex.service.home import Home
from tinkex.service.ledger_reader import LedgerReader
from tinkex.service.peers import Elsewhere

LAPSE = 60.0  # seconds without a heartbeat, after which the process that trains is taken for gone


def server_console(gateway: Gateway, secret: bytes) -> list[Route]:
    """The routes of a server's console."""
    service, counts = gateway.service, gateway.metrics.requests

    def count(status: int) -> None:
        counts["console", status] += 1

    async def check_here(run_id: str) -> None:
        if service.peers is not None:
            await service.peers.check_session(run_id.partition(":")[0], fresh=False)

    async def forward(request: Request, body: bytes, there: Elsewhere) -> Response:
        return await gateway.forward(IncomingRequest(request.scope, request.receive), body, there)

    site = ConsoleSite(
        KeyVisitors(gateway.authenticator, service.ledger, secret, gateway.public_url),
        urlsplit(gateway.public_url).path, ready=lambda: service.ready, clean=gateway.without_paths,
        count=count, compressed=gateway.bodies.compressed, synced=service.disk.synced,
        check_here=check_here, forward=forward,
    )  # fmt: skip
    data = ConsoleData(service.ledger, service.home, service.config.session_lapse, LiveService(service))
    streams = LiveStreams(site.visitors, lambda: gateway.draining)
    texts = ServedTokenTexts(service)
    RunPages(site, data, streams)
    RunChanges(site, service)
    CheckpointPages(site, data)
    CheckpointChanges(site, service)
    ExportPages(site, data, service)
    NowPage(site, service, gateway.metrics, streams)
    RolloutPages(site, data, texts, service.config.keep_rollouts)
    Playground(site, service, texts, streams)
    AdminPages(site, data)
    AdminChanges(site, service)
    return site.routes


def home_console(home: Path, visitors: HomeVisitors) -> Starlette:
    """The console of a home directory: read-only, also while another process trains in it."""
    site = ConsoleSite(visitors)
    data = ConsoleData(LedgerReader(home / "ledger.sqlite"), Home(home), LAPSE)
    RunPages(site, data, LiveStreams(visitors))
    CheckpointPages(site, data)
    RolloutPages(site, data, HomeTokenTexts(home), rate=0.0)
    AdminPages(site, data)
    return Starlette(routes=site.routes)
