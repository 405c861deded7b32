"""Recovery: what a start, or a takeover, does with the files that a killed process left.

`recover` is all of it, in order. A request that was acknowledged then has its result, or is queued again and
gets it under the same request id. Knows nothing of what requests mean.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tinkex.service.group_commit import replay
from tinkex.service.ledger_file import LedgerFullError
from tinkex.service.refusal import Refusal
from tinkex.service.rows import RunRow

if TYPE_CHECKING:
    from tinkex.service.service import Service

log = logging.getLogger("tinkex.service")


async def recover(service: Service) -> None:
    # 1. Write the appends that only the group-commit log holds into their files.
    await asyncio.to_thread(replay, service.home.root)
    # 2. Delete files that were half-written: they were never acknowledged.
    await asyncio.to_thread(service.home.clear_unfinished)
    await asyncio.to_thread(service.files.clear_unfinished)
    await asyncio.to_thread(service.archives.sweep)
    # Before anything resumes: if a model cannot be loaded, unanswered requests wait for a better start.
    if service.config.preload:
        await service.models.load_all()
    # 3. Restore the feed of samples: those that were not fetched are reported as finished.
    service.completions.restore()
    # 4. Resume the runs: this home's, or those of servers whose leases have run out.
    if (peers := service.peers) is not None:
        await peers.start()  # our own lease, which must be renewed from here on
        await peers.take_over(partial(_adopt, service))
        peers.keep(partial(_adopt, service))
        return
    if not service.config.resume:
        with suppress(LedgerFullError):
            service.sessions.end_all()
    await _resume(service, service.ledger.runs_in_state("live", "evicted"))


async def _adopt(service: Service, sessions: list[str], samples: list[Path]) -> None:
    """Steps 3 and 4 for the sessions of another server, whose files are here now."""
    for path in samples:
        service.completions.adopt(path)
    await _resume(service, [run for one in sessions for run in service.ledger.runs_of_session(one)])


async def _resume(service: Service, runs: Iterable[RunRow]) -> None:
    for row in runs:
        session = service.ledger.session(row.session_id)
        if session is None or session.status["type"] != "active":
            # 5. Its session has ended: upkeep deletes its files.
            service.sessions.ended.add(row.session_id)
        elif row.state == "live" and not row.corrupted:
            # With pending requests it is resumed; without, it stays on disk as an evicted run.
            # On a full disk the ledger stays as it is, and the next start finds the run again.
            try:
                with suppress(LedgerFullError):
                    await service.runs.resume_pending(row)
            except Refusal as error:  # damaged, as the ledger says now, or its base model is not configured
                log.error("run %s was not restored: %s", row.run_id, error)
