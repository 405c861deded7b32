"""The upkeep of a service: what expires is dropped, what lapses is evicted, what ended is deleted.

A round takes place every few seconds, and a failed one is tried again. Knows nothing of what runs compute.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass

from tinkex.service.access import Access
from tinkex.service.activity import Activity
from tinkex.service.archive import Archives
from tinkex.service.billing import Billing
from tinkex.service.checkpoints import Checkpoints
from tinkex.service.group_commit import GroupCommit
from tinkex.service.home import Home
from tinkex.service.ledger import Ledger
from tinkex.service.peers import Peers
from tinkex.service.refusal import Caller, Refusal
from tinkex.service.run_metrics import RunMetrics
from tinkex.service.runs.manager import RunManager
from tinkex.service.samplers import Samplers
from tinkex.service.saved_files import SavedFiles
from tinkex.service.sessions import Sessions, SessionTraces
from tinkex.service.shared_commit import SharedCommit
from tinkex.types.sessions import DeleteSessionRequest

log = logging.getLogger("tinkex.service")
TICK = 5.0  # seconds between two rounds
THOROUGH = 12  # every so many rounds, the slow part is done too


@dataclass(eq=False)
class Upkeep:
    """The rounds of one service, and the deletion of a session, which is the end of one."""

    _ledger: Ledger
    _home: Home
    _disk: GroupCommit | SharedCommit
    _access: Access
    _activity: Activity
    _archives: Archives
    _files: SavedFiles
    _runs: RunManager
    _samplers: Samplers
    _sessions: Sessions
    _checkpoints: Checkpoints
    _metrics: RunMetrics
    _traces: SessionTraces
    _billing: Billing
    _peers: Peers | None
    _flush: Callable[[], None]
    _expire_results: Callable[[float], None]

    async def run(self) -> None:
        """A round every TICK seconds, until cancelled."""
        for round in itertools.count(1):
            await asyncio.sleep(TICK)
            try:
                await self.tick(thorough=round % THOROUGH == 0)
            except Exception:
                log.exception("upkeep failed; trying again")

    async def tick(self, *, thorough: bool = True) -> None:
        """One round: drop what expired, evict what lapsed, delete the files of sessions that ended."""
        self._activity.check_clocks()
        self._flush()
        self._expire_results(time.monotonic())
        await self._checkpoints.expire()
        await self._runs.evict_idle(self._sessions.lapsed())
        if thorough:
            self._archives.sweep()
            await asyncio.to_thread(self._files.sweep_archives)
            self._home.keep_spare()
            self._billing.count_storage(bill=self._peers is None or self._peers.leads)
            if self._peers is not None and self._peers.leads:
                await asyncio.to_thread(self._peers.database.trim)
            self._sessions.expire()
            for session_id in list(self._activity.seen):
                await self._samplers.clean(session_id, ended=False)
        for session_id in list(self._sessions.ended):
            await self._clean_up(session_id)

    async def _clean_up(self, session_id: str) -> None:
        """After a session: close its runs once they are idle, delete its unnamed samplers and its trace."""
        open_runs = [row for row in self._ledger.runs_of_session(session_id) if row.state != "closed"]
        closed = [row.run_id for row in open_runs if await self._runs.close(row)]
        for run_id in closed:
            self._metrics.forget(run_id)
        if len(closed) == len(open_runs):
            await self._samplers.clean(session_id, ended=True)
            self._traces.forget(session_id)
            self._sessions.ended.discard(session_id)

    async def delete_session(self, request: DeleteSessionRequest, caller: Caller) -> None:
        """Delete a session with its runs, and end what they execute. Checkpoints must be deleted before."""
        row = self._access.session(request.session_id, caller, to_use=True)
        session_id = row.session_id
        runs = self._ledger.runs_of_session(session_id)
        if saved := [one.tinker_path for run in runs for one in self._ledger.checkpoints_of_run(run.run_id)]:
            raise Refusal(
                422, f"session {session_id} has checkpoints ({len(saved)}), delete them first: {saved[0]}"
            )
        self._sessions.cancel(row, "it was deleted")
        for run in runs:
            await self._runs.withdraw(run, f"session {session_id} was deleted")
        await self._clean_up(session_id)
        if session_id in self._sessions.ended:
            raise Refusal(429, f"requests of session {session_id} are being executed; ask again in a moment")
        for sampler in self._ledger.samplers_of_session(session_id):
            self._access.delete_sampler(sampler.sampler_id)
        self._ledger.delete_session(session_id)
        await self._disk.synced()  # else a power cut could bring back the session without its files
        await asyncio.to_thread(shutil.rmtree, self._home.root / "runs" / session_id, True)
        await self._files.remove(f"runs/{session_id}")
        self._activity.audit(caller, "sessions.delete", details={"session_id": session_id})
