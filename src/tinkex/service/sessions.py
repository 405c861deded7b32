"""Sessions: opened, kept alive by heartbeats, finished, listed; and traces of what was executed for them.

A session without heartbeats lapses; its next request revives it. A finished session stays finished.
"""

from __future__ import annotations

import json
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from tinkex.service.access import Access, scope_of
from tinkex.service.activity import Activity
from tinkex.service.config import ServiceConfig
from tinkex.service.home import Home
from tinkex.service.ledger import Ledger
from tinkex.service.refusal import Caller
from tinkex.service.rows import RunEnd, SamplerRow, Scope, SessionRow, texts
from tinkex.service.runs.execution import Execution
from tinkex.service.runs.manager import RunManager
from tinkex.service.samplers import Outcome
from tinkex.service.saved_files import SavedFiles
from tinkex.service.served_models import ServedModels
from tinkex.types import sessions as types
from tinkex.types.futures import RequestFailedResponse
from tinkex.types.sampling import SampleRequest

TRACE_LENGTH = 20_000  # events kept of one session


@dataclass(eq=False)
class Sessions:
    """The leases of client processes, one method per operation."""

    _config: ServiceConfig
    _ledger: Ledger
    _access: Access
    _activity: Activity
    _models: ServedModels
    _runs: RunManager
    _flush: Callable[[], None]  # what is collected in memory, to the ledger
    _owns: Callable[[str], bool]  # does this server own that session?
    _started: float = field(default_factory=time.time, init=False)
    ended: set[str] = field(default_factory=set[str], init=False)  # whose runs and samplers are to be deleted

    async def create_session(self, request: types.CreateSessionRequest, caller: Caller):
        session_id, now = str(uuid.uuid4()), time.time()
        metadata = None if request.user_metadata is None else dict(request.user_metadata)
        project = self._access.project_for(request.project_id, caller)
        row = SessionRow(
            session_id, caller.user, now, now, project, request.tags, metadata, request.display_name,
            request.sdk_version,
        )  # fmt: skip
        self._ledger.add_session(row)
        self._activity.seen[session_id] = now
        return types.CreateSessionResponse(session_id=session_id)

    async def session_heartbeat(self, request: types.SessionHeartbeatRequest, caller: Caller):
        self._access.active_session(request.session_id, caller)
        return types.SessionHeartbeatResponse()

    async def finish_session(self, request: types.FinishSessionRequest, caller: Caller) -> None:
        self._access.session(request.session_id, caller, to_use=True)
        status = types.ClientSessionFinished(reason=request.reason, detail=request.detail)
        self._end(request.session_id, status)
        self._flush()  # in embedded mode nothing may come after this

    def cancel(self, row: SessionRow, why: str) -> None:
        """End a session that is not over yet."""
        if row.status["type"] == "active":
            self._end(row.session_id, types.SessionCancelled(detail=why))
        self.ended.add(row.session_id)

    def _end(self, session_id: str, status: Any) -> None:
        with self._ledger.transaction():
            self._ledger.update_session(session_id, status=(said := status.model_dump(mode="json")))
            self._ledger.end_runs(session_id, *ending(said))
        self._activity.seen.pop(session_id, None)
        self.ended.add(session_id)

    # -- sessions without heartbeats ---------------------------------------------------------------------

    def lapsed(self) -> set[str]:
        """Active sessions that have not been heard of for too long."""
        return self._silent_for(self._config.session_lapse)

    def expire(self) -> None:
        """End the abandoned ones; after a sleep or a restart of this machine, clients get time to return."""
        if time.time() - self._activity.awake_since > self._config.session_lapse:
            for session_id in self._silent_for(self._config.session_expiry):
                self._abandon(session_id, "it was not heard of for too long")

    def end_all(self) -> None:
        """End every session of an earlier process: none of its clients is left."""
        for row in self._ledger.active_sessions(seen_before=self._started):
            self._abandon(row.session_id, "its process has ended")

    def _abandon(self, session_id: str, why: str) -> None:
        """End a session that its client did not: it failed if one of its runs did."""
        broken = [run for run in self._ledger.runs_of_session(session_id) if run.corrupted]
        status = types.SessionCancelled(detail=why)
        if broken:
            reason = types.SessionFailedTrainingRunReason(training_run_id=broken[0].run_id)
            message = broken[0].problem or f"run {broken[0].run_id} could not be made, or not be restored"
            status = types.SessionFailed(category="internal", reason=reason, message=message)
        self._end(session_id, status)

    def _silent_for(self, seconds: float) -> set[str]:
        limit = time.time() - seconds
        rows = self._ledger.active_sessions(seen_before=limit)
        return {
            row.session_id
            for row in rows
            if self._activity.seen.get(row.session_id, 0.0) < limit and self._owns(row.session_id)
        }

    # -- listing -----------------------------------------------------------------------------------------

    async def list_sessions(self, request: types.ListSessionsRequest, caller: Caller):
        scope = scope_of(caller, request.access_scope)
        page = self._ledger.sessions(scope, limit=request.limit, offset=request.offset)
        return types.ListSessionsResponse(sessions=[row.session_id for row in page.rows])

    async def get_session(self, request: types.GetSessionRequest, caller: Caller) -> types.GetSessionResponse:
        row, ledger = self._access.session(request.session_id, caller), self._ledger
        samplers = ledger.samplers_of_session(row.session_id)
        return types.GetSessionResponse(
            training_run_ids=[run.run_id for run in ledger.runs_of_session(row.session_id)],
            sampler_ids=[s.sampler_id for s in samplers if not self._models.has_failed(s.base_model)],
            user_metadata=texts(row.user_metadata),
            display_name=row.display_name,
        )

    async def assign_session_project(self, request: types.AssignSessionProjectRequest, caller: Caller):
        self._access.session(request.session_id, caller, to_use=True)
        self._access.project_for(request.project_id, caller)
        self._ledger.move_session(request.session_id, request.project_id)
        self._runs.reread(request.session_id)
        self._activity.audit(caller, "projects.assign", details=request.model_dump())

    async def search_sessions(self, request: types.SessionSearchRequest, caller: Caller):
        own = isinstance(request.owner, types.OwnSearchOwner)
        scope = Scope(caller.user, None if own else caller.project)
        found, more = self._ledger.search_sessions(request, scope)
        sessions = [
            types.SessionSummary(
                session_id=row.session_id, created_at=datetime.fromtimestamp(row.created_at, UTC),
                owner=row.owner, project_id=row.project_id or "", display_name=row.display_name,
                status=row.status,  # type: ignore[arg-type]
                user_metadata=texts(row.user_metadata), checkpoints_count=saved,
                checkpoint_storage_bytes=saved_bytes,
            )
            for row, saved, saved_bytes in found
        ]  # fmt: skip
        cursor = None
        if more:
            at, last = sessions[-1].created_at, sessions[-1].session_id
            cursor = types.SessionSearchCursor(last_created_at=at, last_session_id=last)
        return types.SessionSearchResponse(sessions=sessions, next_cursor=cursor)


def ending(status: dict[str, Any]) -> tuple[RunEnd, str]:
    """How the runs of a session ended, and why, by the status in the session's row."""
    detail = status.get("detail") or status.get("message") or ""
    match status.get("reason", {}).get("type"):
        case "success":
            return "finished", detail
        case "errored":
            return "failed", detail or "its script ended with an exception"
        case "interrupted":
            return "interrupted", detail or "its script was interrupted"
        case _:
            return "interrupted", detail


# -- traces ----------------------------------------------------------------------------------------------

# Its name, run or sampler, beginning, seconds, seq id, and whether it failed.
TraceEvent = tuple[str, str, float, float, int | None, bool]


@dataclass(eq=False)
class SessionTraces:
    """The latest events of each session, since this process began. Also counts training tokens."""

    _home: Home
    _files: SavedFiles
    _access: Access
    _activity: Activity

    def __post_init__(self) -> None:
        self._traces = defaultdict[str, deque[TraceEvent]](lambda: deque(maxlen=TRACE_LENGTH))

    def worked(self, work: Execution, seconds: float) -> None:
        """A training request was executed."""
        row, failed = work.run.row, work.future.failed
        if work.one_pass is not None and not failed:
            self._activity.count(row, {"training": work.tokens})
        self._add(row.session_id, (work.op, row.run_id, time.time() - seconds, seconds, work.seq_id, failed))

    def sampled(self, row: SamplerRow, seconds: float, outcome: Outcome, request: SampleRequest) -> None:
        """A sample ended."""
        failed = isinstance(outcome, RequestFailedResponse)
        self._add(row.session_id, ("sample", row.sampler_id, time.time() - seconds, seconds, None, failed))

    def _add(self, session_id: str, event: TraceEvent) -> None:
        if session_id:
            self._traces[session_id].append(event)

    def latest(self, session_id: str, run_id: str, most: int) -> list[TraceEvent]:
        """The last requests of a run, and the samples of its session."""
        events = reversed(self._traces.get(session_id, ()))
        return [*islice((e for e in events if e[1] == run_id or e[0] == "sample"), most)][::-1]

    def forget(self, session_id: str) -> None:
        self._traces.pop(session_id, None)
        self._files.remove_file(_trace_file(session_id))

    async def export_session_trace(self, request: types.ExportSessionTraceRequest, caller: Caller):
        self._access.session(request.session_id, caller)
        self._home.check_disk()
        events = list(self._traces.get(request.session_id, ()))
        session_id = request.session_id
        link = await self._files.link_to_file(
            caller, _trace_file(session_id), lambda path: _write_trace(path, session_id, events)
        )
        return types.SessionTraceExportResponse(status="ready", url=link)


def _trace_file(session_id: str) -> str:
    return f"traces/{session_id}.json"


def _write_trace(path: Path, session_id: str, events: list[TraceEvent]) -> None:
    """Write Chrome's trace format, which Perfetto opens too: a row for each run and sampler."""
    rows = {of: n for n, of in enumerate(dict.fromkeys(event[1] for event in events), 1)}
    names: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": n, "args": {"name": of}} for of, n in rows.items()
    ]
    spans = [
        {"name": name, "cat": "failed" if failed else "ok", "ph": "X", "pid": 1, "tid": rows[of],
         "ts": begun * 1e6, "dur": seconds * 1e6, "args": {} if seq_id is None else {"seq_id": seq_id}}
        for name, of, begun, seconds, seq_id, failed in events
    ]  # fmt: skip
    content = {"traceEvents": names + spans, "displayTimeUnit": "ms", "otherData": {"session": session_id}}
    path.write_text(json.dumps(content))
