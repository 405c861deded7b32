"""Services of the fake engine on one Postgres and one store, in this process: they live, stall and end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.service.harness import config, serving
from tinkex.engine.fake import FakeEngine
from tinkex.service.service import Service

LEASE = 1.0


@asynccontextmanager
async def member(home: Path, postgres: str, root: str, **changes) -> AsyncIterator[Service]:
    changes = {"lease": LEASE, **changes}
    async with serving(home, ledger=postgres, store=root, **changes) as service:
        yield service


async def dead(home: Path, postgres: str, root: str, **changes) -> Service:
    """A service that its test never stops; `stall` makes it a process that is not scheduled any more."""
    service = Service(config(home, ledger=postgres, store=root, lease=LEASE, **changes), FakeEngine)
    await service.start()
    return service


def stall(service: Service) -> None:
    assert service.peers is not None
    for task in service.peers._tasks:
        task.cancel()


async def end(service: Service) -> None:
    """What a killed process does by itself: its threads, files and connections go away."""
    await service.runs.stop()
    service.disk.close()
    service.ledger.close()
    assert service.peers is not None
    service.peers.close()
