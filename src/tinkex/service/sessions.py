"""Sessions: opened, kept alive by heartbeats, finished, found again. One method per operation.

Promises: one that is not heard of lapses, and is as before when it is heard of again; one that is over stays
so. What becomes of its runs and samplers is theirs to know.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from tinkex.service.core import Core
from tinkex.service.refusal import Caller
from tinkex.service.rows import Scope, SessionRow
from tinkex.types import sessions as types


class Sessions:
    """The leases of client processes."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._started = time.time()
        self.ended: set[str] = set()  # whose runs and samplers are to be cleaned away
        # Told of sessions that were put into another project, with their runs.
        self.on_move: Callable[[str], None] = lambda session_id: None

    async def create_session(
        self, request: types.CreateSessionRequest, caller: Caller
    ) -> types.CreateSessionResponse:
        project = self._core.project(request.project_id, caller)
        return types.CreateSessionResponse(session_id=self.open(request, caller, project))

    def open(
        self,
        request: types.CreateSessionRequest,
        caller: Caller,
        project: str | None,
        session_id: str | None = None,
    ) -> str:
        session_id, now = session_id or str(uuid.uuid4()), time.time()
        metadata = None if request.user_metadata is None else dict(request.user_metadata)
        row = SessionRow(
            session_id, caller.user, now, now, project, request.tags,
            metadata, request.display_name, request.sdk_version,
        )  # fmt: skip
        self._core.ledger.add_session(row)
        self._core.seen[session_id] = now
        return session_id

    async def session_heartbeat(
        self, request: types.SessionHeartbeatRequest, caller: Caller
    ) -> types.SessionHeartbeatResponse:
        self._core.active_session(request.session_id, caller)
        return types.SessionHeartbeatResponse()

    async def finish_session(self, request: types.FinishSessionRequest, caller: Caller) -> None:
        self._core.session(request.session_id, caller, to_use=True)
        status = types.ClientSessionFinished(reason=request.reason, detail=request.detail)
        self._end(request.session_id, status)
        self._core.flush()  # in a user's own process nothing may come after this

    def _end(self, session_id: str, status: Any) -> None:
        self._core.ledger.update_session(session_id, status=status.model_dump(mode="json"))
        self._core.seen.pop(session_id, None)
        self.ended.add(session_id)

    # -- those not heard of ------------------------------------------------------------------------------

    def lapsed(self) -> set[str]:
        """Active sessions that have not been heard of for too long."""
        return self._silent_for(self._core.config.session_lapse)

    def expire(self) -> None:
        """End those that nobody will come back to. A service that was itself away waits for them first."""
        if time.time() - self._core.awake_since > self._core.config.session_lapse:
            for session_id in self._silent_for(self._core.config.session_expiry):
                self._abandon(session_id, "it was not heard of for too long")

    def end_all(self) -> None:
        """No client of an earlier process is left."""
        for row in self._core.ledger.active_sessions(seen_before=self._started):
            self._abandon(row.session_id, "its process has ended")

    def _abandon(self, session_id: str, why: str) -> None:
        """End a session that its client did not: it failed if one of its runs did."""
        broken = [run for run in self._core.ledger.runs_of_session(session_id) if run.corrupted]
        status = types.SessionCancelled(detail=why)
        if broken:
            reason = types.SessionFailedTrainingRunReason(training_run_id=broken[0].run_id)
            message = f"run {broken[0].run_id} could not be made, or not be restored"
            status = types.SessionFailed(category="internal", reason=reason, message=message)
        self._end(session_id, status)

    def _silent_for(self, seconds: float) -> set[str]:
        limit = time.time() - seconds
        rows = self._core.ledger.active_sessions(seen_before=limit)
        return {row.session_id for row in rows if self._core.seen.get(row.session_id, 0.0) < limit}

    # -- looking back ------------------------------------------------------------------------------------

    async def list_sessions(
        self, request: types.ListSessionsRequest, caller: Caller
    ) -> types.ListSessionsResponse:
        scope = self._core.scope(caller, request.access_scope)
        page = self._core.ledger.sessions(scope, limit=request.limit, offset=request.offset)
        return types.ListSessionsResponse(sessions=[row.session_id for row in page.rows])

    async def get_session(self, request: types.GetSessionRequest, caller: Caller) -> types.GetSessionResponse:
        row, ledger = self._core.session(request.session_id, caller), self._core.ledger
        return types.GetSessionResponse(
            training_run_ids=[run.run_id for run in ledger.runs_of_session(row.session_id)],
            sampler_ids=[sampler.sampler_id for sampler in ledger.samplers_of_session(row.session_id)],
            user_metadata=texts(row.user_metadata),
            display_name=row.display_name,
        )

    async def assign_session_project(
        self, request: types.AssignSessionProjectRequest, caller: Caller
    ) -> None:
        self._core.session(request.session_id, caller, to_use=True)
        self._core.project(request.project_id, caller)
        self._core.ledger.move_session(request.session_id, request.project_id)
        self.on_move(request.session_id)
        self._core.audit(caller, "projects.assign", details=request.model_dump())

    async def search_sessions(
        self, request: types.SessionSearchRequest, caller: Caller
    ) -> types.SessionSearchResponse:
        own = isinstance(request.owner, types.OwnSearchOwner)
        scope = Scope(caller.user, None if own else caller.project)
        found, more = self._core.ledger.search_sessions(request, scope)
        sessions = [
            types.SessionSummary(
                session_id=item.session.session_id,
                created_at=datetime.fromtimestamp(item.session.created_at, UTC),
                owner=item.session.owner,
                project_id=item.session.project_id or "",
                status=item.session.status,  # type: ignore[arg-type]
                checkpoints_count=item.checkpoints,
                display_name=item.session.display_name,
                user_metadata=texts(item.session.user_metadata),
                checkpoint_storage_bytes=item.checkpoint_bytes,
            )
            for item in found
        ]
        cursor = None
        if more and sessions:
            cursor = types.SessionSearchCursor(
                last_created_at=sessions[-1].created_at, last_session_id=sessions[-1].session_id
            )
        return types.SessionSearchResponse(sessions=sessions, next_cursor=cursor)


def texts(metadata: dict[str, Any] | None) -> dict[str, str]:
    """Metadata as clients read it back: they take texts alone."""
    return {key: str(value) for key, value in (metadata or {}).items()}
